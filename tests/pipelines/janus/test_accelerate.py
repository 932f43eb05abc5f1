"""`arimage.accelerate`: images of a loaded Janus by its own `generate`, text as before."""

import copy

import pytest
import torch
from pipelines.janus import tiny as tiny_janus
from transformers import GenerationConfig, JanusForConditionalGeneration

import arimage
from arimage import JanusPipeline, SpeculativeJacobiDecoding


IMAGE = {"generation_mode": "image"}


@pytest.fixture
def model():
    model = JanusForConditionalGeneration.from_pretrained(tiny_janus.FOLDER)
    if model.generation_config.pad_token_id is None:
        model.generation_config.pad_token_id = tiny_janus.FIRST_SPECIAL + 2
    return model.eval()


@pytest.fixture
def inputs():
    texts = ["a red heart", "cat"]
    return dict(
        tiny_janus.processor()(
            text=texts, generation_mode="image", padding=True, padding_side="left", return_tensors="pt"
        )
    )


@pytest.mark.parametrize(
    ("decoding", "guidance_scale"), [("ar", 5.0), (SpeculativeJacobiDecoding(window=4), 5.0), ("sjd-coupled", 2.5)]
)
def test_greedy_tokens_are_those_of_transformers(model, inputs, decoding, guidance_scale):
    theirs = model.generate(**inputs, **IMAGE, do_sample=False, guidance_scale=guidance_scale)
    assert arimage.accelerate(model, decoding) is model
    ours = model.generate(**inputs, **IMAGE, do_sample=False, guidance_scale=guidance_scale)
    assert ours.shape == (2, 16) and ours.dtype == theirs.dtype and torch.equal(ours, theirs)


def test_a_sampled_image_has_the_distribution_that_transformers_would_sample_from(model, inputs):
    arimage.accelerate(model)
    pipe = JanusPipeline(model)
    given = dict(**inputs, generator=torch.Generator().manual_seed(3), output_type="latent", decoding="sjd-coupled")

    def ours(**options):
        generator = torch.Generator().manual_seed(3)
        return model.generate(**inputs, **IMAGE, do_sample=True, generator=generator, **options)

    # transformers: guidance 5 by default, top-k 50 by default, 0 and 1.0 for none.
    assert torch.equal(ours(), pipe(**given, guidance_scale=5.0, top_k=50).tokens.flatten(1))
    given["generator"].manual_seed(3)
    config = GenerationConfig(do_sample=True, temperature=0.7, top_k=0, top_p=0.8, min_p=0.01, guidance_scale=2.0)
    expected = pipe(**given, guidance_scale=2.0, temperature=0.7, top_p=0.8, min_p=0.01).tokens.flatten(1)
    generator = torch.Generator().manual_seed(3)
    assert torch.equal(model.generate(**inputs, **IMAGE, generation_config=config, generator=generator), expected)
    several = ours(num_return_sequences=3)
    assert several.shape == (6, 16) and len(several.unique(dim=0)) == 6


def test_without_a_generator_the_global_seed_chooses(model, inputs):
    arimage.accelerate(model)
    made = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        made.append(model.generate(**inputs, **IMAGE, do_sample=True, top_k=0))
    assert torch.equal(made[0], made[1]) and not torch.equal(made[0], made[2])


def test_text_is_generated_as_before(model, inputs):
    text = {"max_new_tokens": 5, "do_sample": False}
    before = model.generate(**inputs, **text)
    arimage.accelerate(model)
    assert torch.equal(model.generate(**inputs, **text), before)
    assert torch.equal(model.generate(**inputs, **text, generation_mode="text"), before)


def test_the_object_alone_is_changed_and_restored(model, inputs):
    calls = []
    model.model.language_model.register_forward_pre_hook(lambda *_: calls.append(1))

    def passes(of):
        calls.clear()
        of.generate(**inputs, **IMAGE, do_sample=False)
        return len(calls)

    assert passes(model) == 16
    # It takes fewer passes whatever the model.
    arimage.accelerate(model, "zipar:window=2")
    assert passes(model) < 16 and passes(copy.deepcopy(model)) < 16
    del model.generate
    assert passes(model) == 16 and "generate" not in vars(JanusPipeline(model).model)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate"),
        ({"repetition_penalty": 1.5}, "RepetitionPenaltyLogitsProcessor"),
        ({"do_sample": True, "typical_p": 0.5}, "TypicalLogitsWarper"),
        ({"pixel_values": torch.zeros(1)}, "pixel_values"),
    ],
)
def test_what_it_cannot_do_is_refused(model, inputs, options, named):
    arimage.accelerate(model)
    with pytest.raises(ValueError, match=f"do not support {named}: leave it out"):
        model.generate(**inputs, **IMAGE, **options)


def test_other_models_and_decodings_are_refused(model):
    with pytest.raises(ValueError, match="JanusModel cannot be accelerated in place.*Emu3Pipeline"):
        arimage.accelerate(model.model)
    with pytest.raises(ValueError, match="nonsense"):
        arimage.accelerate(model, "nonsense")
    assert "generate" not in vars(model)
