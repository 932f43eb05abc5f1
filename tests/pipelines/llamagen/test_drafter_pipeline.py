"""A drafter is a component of its pipeline, and a decoding with it samples from the distribution of the model."""

import json

import pytest
import tiny
import torch
from pipelines.llamagen import tiny as tiny_llamagen

from arimage import AutoPipeline, DraftTreeDecoding, LlamaGenDrafter, LlamaGenPipeline


PROMPTS = ["a red heart", "green tree", "a blue book"]
CALLS = {
    "class": {"class_labels": [1, 2, 3], "guidance_scale": 1.0},
    "class, guided": {"class_labels": [1, 2, 3], "guidance_scale": 2.5},
    "text, guided": {"prompt": PROMPTS, "guidance_scale": 2.0},
}
TREES = pytest.mark.parametrize("tree", ["dynamic", "static"])


@pytest.fixture(scope="module")
def pipes():
    return {"class": tiny_llamagen.class_pipeline(), "text": tiny_llamagen.text_pipeline()}


def codes(pipe, seed=0, **call):
    generator = torch.Generator().manual_seed(seed)
    return pipe(generator=generator, output_type="latent", **call)


@pytest.mark.parametrize(
    ("call", "tree"), [("class", "dynamic"), ("class, guided", "static"), ("text, guided", "dynamic")]
)
def test_greedy_codes_are_those_of_one_code_a_pass(pipes, call, tree):
    pipe = pipes[call.split(",")[0]]
    expected = codes(pipe, top_k=1, **CALLS[call], decoding="ar")
    found = codes(pipe, top_k=1, **CALLS[call], decoding=DraftTreeDecoding(tree=tree))
    assert torch.equal(found.tokens, expected.tokens)
    assert found.stats.exact and found.stats.forward_passes <= expected.stats.forward_passes


@pytest.mark.parametrize("call", CALLS)
def test_a_dynamic_tree_generates_the_images_of_autoregressive_decoding(pipes, call):
    pipe = pipes[call.split(",")[0]]
    expected, found = (codes(pipe, 5, **CALLS[call], decoding=name).tokens for name in ("ar", "eagle"))
    assert torch.equal(found, expected)


@pytest.mark.every(2)
@TREES
def test_an_image_of_a_batch_is_the_image_alone(pipes, tree):
    decoding = DraftTreeDecoding(tree=tree, depth=3, width=4, nodes=12)
    generators = [torch.Generator().manual_seed(seed) for seed in (3, 4, 5)]
    together = pipes["text"](PROMPTS, generator=generators, output_type="latent", decoding=decoding).tokens
    for seed, prompt, expected in zip((3, 4, 5), PROMPTS, together, strict=True):
        assert torch.equal(codes(pipes["text"], seed, prompt=prompt, decoding=decoding).tokens[0], expected)


def test_a_tree_of_every_code_is_right_at_every_pass(pipes):
    call = {"class_labels": [1, 2], "temperature": 4.0, "guidance_scale": 2.5}
    decoding = DraftTreeDecoding(depth=1, width=tiny.CODES, nodes=tiny.CODES)
    expected, found = (codes(pipes["class"], 7, **call, decoding=one) for one in ("ar", decoding))
    assert torch.equal(found.tokens, expected.tokens)
    # Each decides a draft and a code more, the last pass what is left of 15.
    assert found.stats.forward_passes == 1 + 8


def test_neighbours_relax_a_tree(pipes):
    strict, relaxed = (
        codes(pipes["class"], class_labels=[1] * 16, decoding=name).stats for name in ("eagle", "eagle-lantern")
    )
    assert strict.exact and not relaxed.exact
    assert relaxed.tokens_per_pass > strict.tokens_per_pass


def test_a_drafter_is_saved_and_loaded_with_its_pipeline(pipes, tmp_path):
    pipe = pipes["text"]
    pipe.save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    assert index["drafter"] == ["drafter_llamagen", "LlamaGenDrafter"]
    loaded = AutoPipeline.from_pretrained(tmp_path)
    loaded.set_progress_bar_config(disable=True)
    assert isinstance(loaded.drafter, LlamaGenDrafter) and loaded.components["drafter"] is loaded.drafter
    decoding = DraftTreeDecoding(tree="static")
    expected, found = (codes(one, prompt=PROMPTS, decoding=decoding) for one in (pipe, loaded))
    assert torch.equal(found.tokens, expected.tokens) and torch.equal(found.stats.accepted, expected.stats.accepted)


def test_a_drafter_goes_where_its_pipeline_goes(tmp_path):
    tiny_llamagen.class_pipeline().save_pretrained(tmp_path)
    pipe = AutoPipeline.from_pretrained(tmp_path, dtype=torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    assert pipe.drafter.dtype == torch.bfloat16
    assert codes(pipe, class_labels=1, decoding="eagle").stats.tokens_per_pass >= 1
    assert pipe.to("meta").drafter.device.type == "meta"


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


def test_a_drafter_of_another_width_is_refused():
    pipe = tiny_llamagen.class_pipeline()
    with pytest.raises(ValueError, match="the drafter has 768, the transformer 32"):
        LlamaGenPipeline(pipe.transformer, pipe.vq, drafter=LlamaGenDrafter())
