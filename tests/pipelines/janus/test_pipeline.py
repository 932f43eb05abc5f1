"""Janus generates, by every decoding, the tokens of its authors' code on the same weights, and answers as transformers
does."""

import numpy as np
import pytest
import torch
from PIL import Image
from pipelines.janus import tiny as tiny_janus
from profiles import WIDE, as_shown
from safetensors.torch import load_file

from arimage import JanusPipeline
from arimage.convert import convert_janus


PROMPTS = ["a red heart", "cat", "a blue book, flat style"]


@pytest.fixture(scope="module")
def pipe(tmp_path_factory):
    return convert_janus(tiny_janus.write_original(tmp_path_factory.mktemp("published") / "janus"))


@pytest.fixture(scope="module")
def expected():
    return load_file(tiny_janus.FOLDER / "expected.safetensors")


@pytest.fixture(scope="module")
def given(expected):
    return {name: expected[name] for name in ("input_ids", "attention_mask")}


@pytest.mark.parametrize("decoding", ["ar", "sjd-coupled"])
def test_greedy_codes_are_the_original_ones(pipe, given, expected, decoding):
    out = pipe(**given, top_k=1, decoding=decoding, output_type="latent")
    assert torch.equal(out.tokens.flatten(1), expected["generated_image_tokens"])
    assert out.images.shape == (2, 4, 4) and out.stats.exact


def test_logits_are_those_of_the_original_with_and_without_the_prompt(pipe, given, expected):
    model = pipe.prepare(**given).model
    cache, first = model.prefill(2)
    codes = expected["generated_image_tokens"][:, :-1]
    rest = model.forward(codes, torch.arange(15).expand(2, -1), cache)
    logits = torch.cat([first[:, :, None], rest], dim=2)
    for group, name in enumerate(("cond", "uncond")):
        theirs = torch.stack([expected[f"{name}_logits_{prompt}"] for prompt in range(2)])
        torch.testing.assert_close(logits[group], theirs, atol=1e-4, rtol=0)
    guided = logits[1] + expected["guidance_scale"] * (logits[0] - logits[1])
    theirs = torch.stack([expected[f"guided_logits_{prompt}"] for prompt in range(2)])
    torch.testing.assert_close(guided, theirs, atol=2e-4, rtol=0)


def test_pixels_are_those_of_the_original_cut_off_to_bytes(pipe, given, expected):
    theirs = expected["decoded_pixels_bhwc"]
    out = {kind: pipe(**given, top_k=1, output_type=kind).images for kind in ("pt", "np", "pil")}
    np.testing.assert_allclose(out["np"], (theirs / 2 + 0.5).clamp(0, 1), atol=1e-5)
    torch.testing.assert_close(out["pt"].permute(0, 2, 3, 1), (theirs / 2 + 0.5).clamp(0, 1), atol=1e-5, rtol=0)
    ours = np.stack([np.asarray(one) for one in out["pil"]])
    levels = np.clip((theirs.numpy() + 1) / 2 * 255, 0, 255)
    # A level that is nearly whole may fall to either side.
    sure = abs(levels - levels.round()) > 1e-3
    assert np.array_equal(ours[sure], levels.astype(np.uint8)[sure]) and sure.mean() > 0.9
    assert not np.array_equal(ours, levels.round().astype(np.uint8))


def test_images_are_encoded_as_in_the_original_not_as_in_transformers(pipe, expected):
    with torch.no_grad():
        codes = pipe.encode_image(expected["encode_pixel_values"])
    assert codes.shape == (1, 4, 4)
    assert torch.equal(codes.flatten(1), expected["encode_image_tokens_original_l2"])
    assert not torch.equal(codes.flatten(1), expected["encode_image_tokens_hf"])


def test_prompts_give_what_transformers_generates(pipe):
    ours = pipe(PROMPTS, top_k=1, output_type="latent").tokens.flatten(1)
    texts = [f"<|User|>: {prompt}\n\n<|Assistant|>:" for prompt in PROMPTS]
    inputs = pipe.processor(
        text=texts, generation_mode="image", padding=True, padding_side="left", return_tensors="pt"
    )
    theirs = pipe.model.generate(**inputs, generation_mode="image", do_sample=False, guidance_scale=5.0)
    assert torch.equal(ours, theirs)
    assert len(set(map(tuple, ours.tolist()))) == 3


SYSTEM = (
    "You are a helpful language and vision assistant. You are able to understand the visual content that the user "
    "provides, and assist the user with a variety of tasks using natural language.\n\n"
)


def answer(pipe, image, question, **options):
    """What transformers generates after the authors' prompt for a question."""
    shown = f"{tiny_janus.BOI}{tiny_janus.IMAGE * 16}{tiny_janus.EOI}"
    text = f"{tiny_janus.BOS}{SYSTEM}<|User|>: {shown}\n{question}\n\n<|Assistant|>:"
    ids = torch.tensor([tiny_janus.characters().encode(text).ids])
    pixels = pipe.processor.image_processor(image, return_tensors="pt").pixel_values
    made = pipe.model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=pixels, do_sample=False, **options
    )
    return pipe.processor.tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)


def test_questions_are_answered_as_by_transformers(pipe):
    noise = np.random.default_rng(0).integers(0, 256, (2, 50, 30, 3), dtype=np.uint8)
    images, questions, options = (
        [Image.fromarray(each) for each in noise],
        ["what is it?", "why"],
        {"max_new_tokens": 6},
    )
    of_first = [answer(pipe, images[0], question, **options) for question in questions]
    assert len(set(of_first)) == 2
    assert pipe.understand(images[0], questions, **options) == of_first
    assert pipe.understand(images[0], questions[1], **options) == of_first[1:]
    of_both = [of_first[0], answer(pipe, images[1], questions[0], **options)]
    assert pipe.understand(images, questions[0], **options) == of_both
    assert pipe.understand(images, questions, **options)[0] == of_first[0]
    with pytest.raises(ValueError, match="2 images and 3 questions: give as many, or one for all"):
        pipe.understand(images, ["what?"] * 3)


def test_questions_are_about_what_viewers_show(pipe):
    photo = Image.new("RGB", (50, 30), (60, 200, 60))
    photo.info["icc_profile"] = WIDE
    sticker = Image.new("RGBA", (50, 30), (0, 0, 0, 0))
    for image, shown in ((photo, as_shown(photo, WIDE)), (sticker, Image.new("RGB", (50, 30), "white"))):
        found, expected = (pipe.prompts.questions(each, "what?").pixel_values for each in (image, shown))
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({}, "give either a prompt or input_ids"),
        ({"prompt": "x", "input_ids": torch.tensor([[150, 153]])}, "give either a prompt or input_ids"),
        ({"input_ids": torch.tensor([[150, 7]])}, "input_ids must end .* 153"),
        (
            {"input_ids": torch.tensor([[150, 153]]), "attention_mask": torch.ones(1, 3)},
            r"attention_mask is .*\(1, 3\): give one of \(1, 2\)",
        ),
        (
            {"input_ids": torch.tensor([[150, 7, 153]]), "attention_mask": torch.tensor([[1, 0, 1]])},
            "must be zeros and then ones: pad on the left",
        ),
        ({"prompt": "x", "height": 32}, "this checkpoint generates 64x64 pixels only"),
    ],
)
def test_calls_that_cannot_be_generated_are_refused(pipe, change, sentence):
    with pytest.raises(ValueError, match=sentence):
        pipe(**change)


def test_a_model_that_names_no_begin_of_image_is_refused():
    model = convert_janus(tiny_janus.FOLDER).model
    model.generation_config.generation_kwargs = {}
    with pytest.raises(ValueError, match="no boi_token_id in its generation_kwargs: put the id"):
        JanusPipeline(model)
