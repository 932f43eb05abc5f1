"""Emu3: the original's logits, codes and pixels on random weights, and what a call of its pipeline generates and
refuses."""

import numpy as np
import pytest
import torch
from accelerate import cpu_offload_with_hook
from pipelines.emu3 import tiny as tiny_emu3
from pipelines.emu3.tiny import EXPECTED, VOCABULARY
from transformers import Emu3ForConditionalGeneration

from arimage import AutoPipeline, SpeculativeJacobiDecoding, decoding_from_name, decoding_names
from arimage.pipelines.emu3.pipeline_emu3 import Emu3Pipeline
from arimage.pipelines.emu3.prompts import NEGATIVE_PROMPT, PROMPT_SUFFIX
from arimage.pipelines.emu3.vq_emu3 import decode_image


PROMPTS = ["a red heart", "tree", "a blue book with a grinning cat face"]
NEGATIVE = ["blurry", "low quality, text", "no"]
GIVEN = {"input_ids": EXPECTED["prompt_ids"][None], "negative_input_ids": EXPECTED["negative_prompt_ids"][None]}
SIZE = {"height": 32, "width": 40}
TALL = {"height": 40, "width": 24}
EXACT = [
    name
    for name in decoding_names()
    if name.startswith(("ar", "sjd")) and name != "sjd2" and decoding_from_name(name).exact
]
FIRST = VOCABULARY["<|visual token 000000|>"]


def seeded(seed):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def pipe():
    return tiny_emu3.pipeline()


@pytest.fixture(scope="module")
def bare():
    """Without a tokenizer, as the vocabulary of the original's outputs has no text."""
    return tiny_emu3.pipeline(tokenizer=False)


# Parity


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("decoding", "guidance_scale", "sequence"),
    [("ar", 1.0, "nocfg_sequence"), *((name, 3.0, "cfg_sequence") for name in EXACT)],
)
def test_greedy_codes_equal_the_original_with_every_exact_decoding(bare, decoding, guidance_scale, sequence):
    out = bare(**GIVEN, **SIZE, top_k=1, guidance_scale=guidance_scale, decoding=decoding, output_type="latent")
    rows = EXPECTED[sequence][13 : 13 + 4 * 6].reshape(4, 6)
    assert torch.equal(out.images[0], rows[:, :-1] - FIRST)
    if decoding != "ar":
        assert out.stats.forward_passes < 20


def test_pixels_equal_the_original(bare):
    out = bare(**GIVEN, **SIZE, top_k=1, guidance_scale=3.0, output_type="pt")
    assert torch.equal(out.tokens[0], EXPECTED["image_codes"])
    expected = (EXPECTED["decoded_pixels"] / 2 + 0.5).clamp(0, 1)
    torch.testing.assert_close(out.images, expected, atol=1e-5, rtol=0)


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


@pytest.mark.parametrize("guidance_scale", [1.0, 2.5])
def test_codes_from_text_on_another_grid_equal_those_of_transformers(pipe, guidance_scale):
    ours = pipe("a red heart", **TALL, top_k=1, guidance_scale=guidance_scale, output_type="latent").images
    rows, columns = 5, 3

    def encode(text):
        header = f"<|image start|>{rows}*{columns}<|image token|>"
        return pipe.tokenizer(f"<|extra_203|>{text}{header}", return_tensors="pt").input_ids

    prompt, visual = encode("a red heart" + PROMPT_SUFFIX), list(range(FIRST, FIRST + 64))

    def allowed(_, ids):
        return [VOCABULARY["<|extra_200|>"]] if (len(ids) - prompt.shape[1] + 1) % (columns + 1) == 0 else visual

    options = {"guidance_scale": guidance_scale, "negative_prompt_ids": encode(NEGATIVE_PROMPT)}
    theirs = pipe.model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        prefix_allowed_tokens_fn=allowed,
        max_new_tokens=rows * (columns + 1),
        do_sample=False,
        **(options if guidance_scale > 1 else {}),
    )
    theirs = theirs[0, prompt.shape[1] :].reshape(rows, columns + 1)
    assert torch.equal(ours[0], theirs[:, :-1] - FIRST)


# Drawing


def test_images_of_every_output_type_show_the_decoded_codes(pipe):
    options = {"prompt": PROMPTS, "guidance_scale": 2.0, **TALL}
    out = {kind: pipe(**options, generator=seeded(1), output_type=kind) for kind in ("pil", "np", "pt", "latent")}
    tokens = out["latent"].images
    assert tokens.shape == (3, 5, 3) and all(torch.equal(each.tokens, tokens) for each in out.values())
    with torch.no_grad():
        expected = (pipe.vq.decode(tokens) / 2 + 0.5).clamp(0, 1)
    assert expected.std() > 0.03
    torch.testing.assert_close(out["pt"].images, expected, atol=1e-5, rtol=0)
    np.testing.assert_allclose(out["np"].images, expected.permute(0, 2, 3, 1).numpy(), atol=1e-5)
    assert [one.size for one in out["pil"].images] == [(24, 40)] * 3


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("decoding", "guidance_scale"),
    [
        ("ar", 1.0),
        ("ar", 3.0),
        (SpeculativeJacobiDecoding(window=7), 3.0),
        ("sjd-tree", 1.0),
        ("zipar", 3.0),
    ],
)
def test_an_image_does_not_depend_on_its_batch(pipe, decoding, guidance_scale):
    options = {"decoding": decoding, "guidance_scale": guidance_scale, "top_k": 9, "output_type": "latent", **TALL}
    batch = pipe(PROMPTS, NEGATIVE, generator=[seeded(i) for i in range(3)], **options).images
    for i in range(3):
        assert torch.equal(batch[i : i + 1], pipe(PROMPTS[i], NEGATIVE[i], generator=seeded(i), **options).images)
    assert not torch.equal(batch[0], batch[1])


def test_several_images_of_a_prompt_differ_and_do_not_mix_with_others(pipe):
    options = {"num_images_per_prompt": 2, "guidance_scale": 2.0, "temperature": 5.0, "output_type": "latent"}
    out = pipe(PROMPTS, NEGATIVE, generator=[seeded(i) for i in range(6)], **options).images
    again = pipe(PROMPTS[1], NEGATIVE[1], generator=[seeded(2), seeded(3)], **options).images
    assert torch.equal(out[2:4], again) and not torch.equal(again[0], again[1])


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


def test_ids_may_be_given_in_place_of_words(pipe):
    ids, mask = pipe.encode_prompt([text + PROMPT_SUFFIX for text in PROMPTS], (40, 24))
    negative_ids, negative_mask = pipe.encode_prompt(NEGATIVE, (40, 24))
    options = {"guidance_scale": 3.0, "top_k": 5, "output_type": "latent", **TALL}
    said = pipe(PROMPTS, NEGATIVE, generator=seeded(3), **options).images
    given = pipe(
        input_ids=ids,
        attention_mask=mask,
        negative_input_ids=negative_ids,
        negative_attention_mask=negative_mask,
        generator=seeded(3),
        **options,
    ).images
    assert torch.equal(said, given)
    shared = pipe(PROMPTS, NEGATIVE[0], generator=seeded(3), **options).images
    assert torch.equal(said[0], shared[0]) and not torch.equal(said[1:], shared[1:])
    with pytest.raises(ValueError, match="input_ids announce an image of another size than 40x32"):
        pipe(input_ids=ids, attention_mask=mask, **options | {"width": 32})


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
        ({"ratio": "0:9"}, "ratio is '0:9'"),
        ({"ratio": "1:" + "9" * 400}, "ratio is .1:99"),
    ):
        with pytest.raises(ValueError, match=said):
            gen.image_size(**arguments)


def test_a_callback_sees_the_image_grow(pipe):
    shapes = []

    def show(pipe, step, passes, tensors):
        shapes.append(pipe.decode_tokens(pipe.current_call, tensors["tokens"]).shape)

    inputs = ["tokens", "decided"]
    pipe("tree", **TALL, callback_on_step_end=show, callback_on_step_end_tensor_inputs=inputs, output_type="latent")
    assert shapes == [(1, 3, 40, 24)] * 15


def test_a_saved_pipeline_generates_the_same_images(tmp_path):
    pipe = tiny_emu3.pipeline()
    pipe.generation_config.update(guidance_scale=3.0, top_k=7)
    pipe.decoding = SpeculativeJacobiDecoding(window=6)
    pipe.save_pretrained(tmp_path)
    loaded = AutoPipeline.from_pretrained(tmp_path)
    loaded.set_progress_bar_config(disable=True)
    assert type(loaded) is Emu3Pipeline and loaded.decoding == SpeculativeJacobiDecoding(window=6)
    assert loaded.config.image_area == 32 * 32 and not loaded.model.training
    before, after = (each(PROMPTS, generator=seeded(5), output_type="pt").images for each in (pipe, loaded))
    assert torch.equal(before, after)
    half = AutoPipeline.from_pretrained(tmp_path, dtype=torch.bfloat16, tokenizer=None)
    images = half(**GIVEN, **SIZE, generator=seeded(0), output_type="pt").images
    assert half.model.dtype == torch.bfloat16 and images.isfinite().all() and images.std() > 0.03


@pytest.mark.slow
def test_weights_that_wait_elsewhere_give_the_same_codes(bare, tmp_path):
    bare.save_pretrained(tmp_path)
    parts = {"model.text_model.embed_tokens": "cpu", "model.text_model.layers.0": "cpu", "model.vqmodel": "disk"}
    parts |= {"model.text_model.layers.1": "disk", "model.text_model.norm": "disk", "lm_head": "disk"}
    model = Emu3ForConditionalGeneration.from_pretrained(
        tmp_path / "model",
        device_map=parts | {"model.text_model.rotary_emb": "cpu"},
        offload_folder=tmp_path / "offloaded",
    )
    assert model.lm_head.weight.is_meta
    offloaded = AutoPipeline.from_pretrained(tmp_path, model=model)
    options = {**GIVEN, **SIZE, "top_k": 1, "guidance_scale": 3.0, "output_type": "pt"}
    expected, out = bare(**options), offloaded(**options)
    assert torch.equal(out.tokens, expected.tokens)
    torch.testing.assert_close(out.images, expected.images, atol=1e-5, rtol=0)


def test_an_offloaded_model_is_brought_before_its_parts_are_called(monkeypatch):
    pipe = tiny_emu3.pipeline()
    cpu_offload_with_hook(pipe.model, "cpu")
    brought = []
    monkeypatch.setattr(pipe.model._hf_hook, "pre_forward", brought.append)
    pipe("tree", output_type="latent")
    assert brought == [pipe.model]


# Editing


def test_images_are_encoded_as_in_the_original(bare):
    pixels = EXPECTED["encode_pixel_values"]
    with torch.no_grad():
        codes = bare.encode_known_tokens(pixels, torch.zeros(1, 1, 32, 40, dtype=torch.bool))
    assert torch.equal(codes.reshape(4, 5), EXPECTED["encode_codes"])


@pytest.mark.every(2)
@pytest.mark.parametrize("decoding", ["ar", "sjd-coupled"])
def test_what_is_kept_stands_and_the_rest_is_generated(pipe, decoding):
    given = torch.rand(3, 3, 40, 24, generator=seeded(3))
    mask = torch.zeros(1, 1, 40, 24)
    # One pixel of the code in the third row and second column.
    mask[..., 23, 8] = 1
    with torch.no_grad():
        codes = torch.stack(pipe.vq.encode(given * 2 - 1, [(40, 24)] * 3).image_tokens)
    options = {"image": given, "mask_image": mask, "decoding": decoding, "guidance_scale": 2.0, **TALL}
    out = pipe(PROMPTS, **options, generator=seeded(0), output_type="pt")
    generated = torch.zeros(5, 3, dtype=torch.bool)
    generated[2, 1] = True
    assert torch.equal(out.tokens[:, ~generated], codes[:, ~generated])
    white = mask[0, 0].bool()
    torch.testing.assert_close(out.images[..., ~white], given[..., ~white], atol=1e-6, rtol=0)
    others = [pipe(PROMPTS, **options, generator=seeded(i), output_type="latent").images for i in range(1, 4)]
    assert any(not torch.equal(other, out.tokens) for other in others)


# Refusals


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "either a prompt or input_ids"),
        ({"prompt": "a", "input_ids": GIVEN["input_ids"]}, "either a prompt or input_ids"),
        (
            {"prompt": "a", "negative_prompt": "b", "negative_input_ids": GIVEN["input_ids"]},
            "either a negative_prompt",
        ),
        ({"prompt": []}, "prompt is []"),
        ({"prompt": ["a", "b"], "negative_prompt": ["c"] * 3}, "negative_prompt holds 3 for 2 prompts"),
        ({"input_ids": GIVEN["input_ids"][:, :-1]}, "end with the header of an image, its last token 105"),
        ({"input_ids": GIVEN["input_ids"][0]}, "give token ids [B, P]"),
        (
            {"input_ids": GIVEN["input_ids"], "attention_mask": torch.ones(1, 12)},
            "attention_mask is",
        ),
        ({"input_ids": GIVEN["input_ids"], "attention_mask": torch.arange(13)[None] < 9}, "pad on the left"),
        ({"prompt": "a", "image": torch.zeros(1, 3, 8, 8)}, "belong together"),
        ({"prompt": "a", "output_type": "jpeg"}, "output_type is 'jpeg'"),
        ({"prompt": "a", "decoding": "eagle"}, "has no drafter"),
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
    with pytest.raises(ValueError, match="no tokenizer"):
        bare.encode_prompt(["tree"], (40, 24))


def test_a_tokenizer_may_be_replaced(pipe):
    other = tiny_emu3.pipeline(tokenizer=False)
    other.tokenizer = pipe.tokenizer
    for actual, expected in zip(*(each.encode_prompt(PROMPTS, (40, 24)) for each in (other, pipe)), strict=True):
        assert torch.equal(actual, expected)


def test_a_model_without_the_names_of_its_codes_is_refused():
    model = Emu3ForConditionalGeneration.from_pretrained(tiny_emu3.FIXTURES)
    model.config.vocabulary_map = VOCABULARY | {"<|visual token 000007|>": 3}
    with pytest.raises(ValueError, match="64 image tokens in a row"):
        Emu3Pipeline(model)
    model.config.vocabulary_map = None
    with pytest.raises(ValueError, match="<|extra_200|>"):
        Emu3Pipeline(model)
