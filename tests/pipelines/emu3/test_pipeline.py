"""Emu3: the original's logits, codes and pixels on random weights, and what a call of its pipeline generates and
refuses."""

import pytest
import torch
from families import seeded
from pipelines.emu3 import tiny as tiny_emu3
from pipelines.emu3.tiny import EXPECTED, VOCABULARY
from transformers import Emu3ForConditionalGeneration

from arimage.pipelines.emu3.pipeline_emu3 import Emu3Pipeline
from arimage.pipelines.emu3.prompts import NEGATIVE_PROMPT, PROMPT_SUFFIX
from arimage.pipelines.emu3.vq_emu3 import decode_image


GIVEN = {"input_ids": EXPECTED["prompt_ids"][None], "negative_input_ids": EXPECTED["negative_prompt_ids"][None]}
SIZE = {"height": 32, "width": 40}
FIRST = VOCABULARY["<|visual token 000000|>"]


@pytest.fixture(scope="module")
def pipe():
    return tiny_emu3.pipeline()


@pytest.fixture(scope="module")
def bare():
    """Without a tokenizer, as the vocabulary of the original's outputs has no text."""
    return tiny_emu3.pipeline(tokenizer=False)


@pytest.mark.parametrize(
    ("decoding", "guidance_scale", "sequence"),
    [("ar", 1.0, "nocfg_sequence"), ("ar", 3.0, "cfg_sequence"), ("sjd-coupled", 3.0, "cfg_sequence")],
)
def test_greedy_codes_equal_the_original(bare, decoding, guidance_scale, sequence):
    out = bare(**GIVEN, **SIZE, top_k=1, guidance_scale=guidance_scale, decoding=decoding, output_type="latent")
    rows = EXPECTED[sequence][13 : 13 + 4 * 6].reshape(4, 6)
    assert torch.equal(out.images[0], rows[:, :-1] - FIRST)
    if decoding != "ar":
        assert out.stats.forward_passes < 20


def test_logits_equal_the_original_and_guide_to_the_same_distribution(bare):
    model = bare.prepare(**GIVEN, **SIZE, guidance_scale=3.0).model
    cache, first = model.prefill(1)
    codes = EXPECTED["image_codes"].flatten()[None, :-1]
    rest = model.forward(codes, torch.arange(19)[None], cache)
    logits = torch.cat([first[:, :, None], rest], dim=2)[:, 0]
    # The original's sequences have a row end after every five codes.
    step = torch.arange(20) + torch.arange(20) // 5
    for ours, name, length in ((logits[0], "cond_logits", 13), (logits[1], "uncond_logits", 17)):
        torch.testing.assert_close(ours, EXPECTED[name][length - 1 + step, FIRST:], atol=1e-4, rtol=0)
    guided = (logits[1] + 3 * (logits[0] - logits[1])).log_softmax(-1)
    expected = EXPECTED["guided_logprobs"][step, FIRST:].log_softmax(-1)
    torch.testing.assert_close(guided, expected, atol=1e-4, rtol=0)


@torch.no_grad()
def test_an_image_is_decoded_as_the_first_frame_of_its_clip(bare):
    codes = torch.randint(64, (2, 3, 6), generator=seeded(0))
    torch.testing.assert_close(decode_image(bare.vq, codes), bare.vq.decode(codes), atol=1e-5, rtol=0)


def test_prompts_have_the_authors_words_and_a_header_with_the_size_in_codes(pipe):
    ids, mask = pipe.encode_prompt(["tree", "a red heart"], (80, 720))
    texts = [pipe.tokenizer.decode(row[kept.bool()]).replace(" ", "") for row, kept in zip(ids, mask, strict=True)]
    header = "<|imagestart|>10*90<|imagetoken|>"
    assert texts == [f"<|extra_203|>tree{header}", f"<|extra_203|>aredheart{header}"]
    assert mask[0].tolist() == [0] * 7 + [1] * 12 and mask[1].all()

    options = {"top_k": 1, "guidance_scale": 3.0, "output_type": "latent"}
    default = pipe("tree", **options).images
    said = pipe("tree" + PROMPT_SUFFIX, NEGATIVE_PROMPT, prompt_suffix="", **options).images
    assert torch.equal(default, said)
    others = (
        pipe("tree", prompt_suffix="", **options),
        pipe("tree", "", **options),
        pipe("tree", **options | {"guidance_scale": 1.0}),
    )
    assert all(not torch.equal(default, other.images) for other in others)


def test_the_size_is_that_of_the_trained_area_or_given(pipe):
    gen = Emu3Pipeline(pipe.model)
    assert gen.image_size() == (720, 720)
    assert gen.image_size(ratio="16:9") == (544, 960)
    assert gen.image_size(ratio="3:4") == (832, 624)
    assert gen.image_size(512, 768) == (512, 768)
    assert Emu3Pipeline(pipe.model, image_area=512 * 512).image_size(ratio="1:1") == (512, 512)
    assert pipe("tree", ratio="4:1", output_type="latent").images.shape == (1, 2, 8)
    for arguments, said in (
        ({"height": 512}, "either height and width"),
        ({"height": 512, "width": 512, "ratio": "1:1"}, "either height and width"),
        ({"height": 500, "width": 512}, "height is 500: give a multiple of 8"),
        ({"ratio": "16x9"}, "ratio is '16x9'"),
        ({"ratio": ""}, "ratio is ''"),
        ({"ratio": "0:9"}, "ratio is '0:9'"),
        ({"ratio": "1:" + "9" * 400}, "ratio is .1:99"),
    ):
        with pytest.raises(ValueError, match=said):
            gen.image_size(**arguments)


def test_images_are_encoded_as_in_the_original(bare):
    pixels = EXPECTED["encode_pixel_values"]
    with torch.no_grad():
        codes = bare.encode_known_tokens(pixels, torch.zeros(1, 1, 32, 40, dtype=torch.bool))
    assert torch.equal(codes.reshape(4, 5), EXPECTED["encode_codes"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "either a prompt or input_ids"),
        ({"prompt": "a", "input_ids": GIVEN["input_ids"]}, "either a prompt or input_ids"),
        (
            {"prompt": "a", "negative_prompt": "b", "negative_input_ids": GIVEN["input_ids"]},
            "either a negative_prompt",
        ),
        ({"prompt": ["a", "b"], "negative_prompt": ["c"] * 3}, "negative_prompt holds 3 for 2 prompts"),
        ({"input_ids": GIVEN["input_ids"][:, :-1]}, "end with the header of an image, its last token 105"),
        ({"input_ids": GIVEN["input_ids"], "attention_mask": torch.ones(1, 12)}, "attention_mask is"),
        ({"input_ids": GIVEN["input_ids"], "attention_mask": torch.arange(13)[None] < 9}, "pad on the left"),
    ],
)
def test_what_cannot_be_generated_is_refused_in_one_sentence(pipe, arguments, said):
    with pytest.raises(ValueError) as refused:
        pipe(**arguments)
    assert said in str(refused.value)


def test_words_without_a_tokenizer_are_refused(bare):
    with pytest.raises(ValueError, match="no tokenizer: give input_ids, not prompt"):
        bare("tree")
    with pytest.raises(ValueError, match="give negative_input_ids, or guidance_scale=1"):
        bare(input_ids=GIVEN["input_ids"], guidance_scale=2.0, **SIZE)


def test_a_model_without_the_names_of_its_codes_is_refused():
    model = Emu3ForConditionalGeneration.from_pretrained(tiny_emu3.FIXTURES)
    model.config.vocabulary_map = VOCABULARY | {"<|visual token 000007|>": 3}
    with pytest.raises(ValueError, match="64 image tokens in a row"):
        Emu3Pipeline(model)
    model.config.vocabulary_map = None
    with pytest.raises(ValueError, match="<|extra_200|>"):
        Emu3Pipeline(model)
