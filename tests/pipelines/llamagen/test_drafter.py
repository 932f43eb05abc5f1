"""A drafter continues features, with a cache as without one, and its pipeline samples from the model."""

import json

import pytest
import tiny
import torch
from pipelines.llamagen import tiny as tiny_llamagen

from arimage import AutoPipeline, DraftTreeDecoding, LlamaGenPipeline
from arimage.decoding import Layout
from arimage.pipelines.llamagen.transformer_llamagen import LlamaGenTokenModel


BATCH = 2


@pytest.fixture(params=["class", "text"])
@torch.no_grad()
def drafting(request):
    """A guided model and its drafter, codes, and the features that they were sampled from [2, B, N, D]."""
    transformer = tiny_llamagen.transformer(request.param)
    if request.param == "class":
        condition = {"class_labels": torch.tensor([1, 3])}
    else:
        embeds = torch.randn(BATCH, tiny.TEXT_LENGTH, tiny.TEXT_WIDTH, generator=torch.Generator().manual_seed(1))
        mask = torch.arange(tiny.TEXT_LENGTH) >= torch.tensor([[3], [7]])
        condition = {"prompt_embeds": embeds, "prompt_attention_mask": mask}
    model = LlamaGenTokenModel(transformer, condition, Layout((4, 4)), guided=True)
    codes = torch.randint(model.vocab_size, (BATCH, 16), generator=torch.Generator().manual_seed(0))
    _, features = transformer.predict(codes.repeat(2, 1), return_features=True, **model.condition)
    return model, tiny_llamagen.drafter(transformer), codes, features.unflatten(0, (2, BATCH))


def chain(model, cache, codes, features, start, stop):
    positions = torch.arange(start, stop).expand(BATCH, -1)
    return model.forward(codes[:, start:stop], features[:, :, start:stop], positions, cache)


@torch.no_grad()
def test_a_step_with_a_cache_is_a_step_of_training(drafting):
    model, drafter, codes, features = drafting
    logits, drafted = drafter.predict(model.transformer, codes.repeat(2, 1), features.flatten(0, 1))
    draft_model = drafter.bind(model)
    cache = draft_model.open_cache(BATCH, 3)
    for start, stop in ((0, 1), (1, 4), (3, 16)):
        got_logits, got = chain(draft_model, cache, codes, features, start, stop)
        assert torch.allclose(got_logits, logits.unflatten(0, (2, BATCH))[:, :, start:stop], atol=1e-4)
        assert torch.allclose(got, drafted.unflatten(0, (2, BATCH))[:, :, start:stop], atol=1e-4)


PROMPTS = ["a red heart", "green tree", "a blue book"]
CALLS = {
    "class": {"class_labels": [1, 2, 3], "guidance_scale": 1.0},
    "class, guided": {"class_labels": [1, 2, 3], "guidance_scale": 2.5},
    "text, guided": {"prompt": PROMPTS, "guidance_scale": 2.0},
}


@pytest.fixture(scope="module")
def pipes():
    return {"class": tiny_llamagen.class_pipeline(), "text": tiny_llamagen.text_pipeline()}


def codes(pipe, seed=0, **call):
    generator = torch.Generator().manual_seed(seed)
    return pipe(generator=generator, output_type="latent", **call)


@pytest.mark.parametrize("call", CALLS)
def test_a_dynamic_tree_generates_the_images_of_autoregressive_decoding(pipes, call):
    pipe = pipes[call.split(",")[0]]
    expected, found = (codes(pipe, 5, **CALLS[call], decoding=name).tokens for name in ("ar", "eagle"))
    assert torch.equal(found, expected)


def test_a_pipeline_without_a_drafter_loads_and_says_what_it_lacks(tmp_path):
    pipe = tiny_llamagen.class_pipeline()
    LlamaGenPipeline(pipe.transformer, pipe.vq).save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    # As folders were written before there were drafters.
    index.pop("drafter", None)
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    loaded = AutoPipeline.from_pretrained(tmp_path)
    assert loaded.drafter is None
    with pytest.raises(ValueError, match="no drafter: give the pipeline one"):
        loaded(class_labels=1, decoding="eagle")
    decoding = DraftTreeDecoding(drafter=pipe.drafter)
    expected, found = (codes(loaded, class_labels=1, decoding=one).tokens for one in ("ar", decoding))
    assert torch.equal(found, expected)
    loaded.decoding = decoding
    with pytest.raises(ValueError, match="pipe.drafter"):
        loaded.save_pretrained(tmp_path / "more")
