"""Emu3.5: the original's logits, codes and pixels on random weights, with and without reference images, and what a
call of its pipeline generates and refuses."""

import pytest
import torch
from families import seeded
from PIL import Image
from pipelines.emu35 import tiny as tiny_emu35
from pipelines.emu35.tiny import EXPECTED, REFERENCE, REFERENCES

from arimage.pipelines.emu35.ibq_emu35 import IBQModel
from arimage.pipelines.emu35.pipeline_emu35 import Emu35Pipeline
from arimage.pipelines.emu35.prompts import smart_resize


# The prompt and the references of every call of the original, and whether its size is that of the last reference.
CALLS = {
    "t2i_0": (REFERENCE["t2i"][0], None, False),
    "t2i_1": (REFERENCE["t2i"][1], None, False),
    "x2i_one": (REFERENCE["edit"], REFERENCES[:1], True),
    "x2i_size": (REFERENCE["edit"], REFERENCES[0], False),
    "x2i_two": (REFERENCE["edit2"], REFERENCES, True),
}
SMALL = {"height": 32, "width": 48}


def size_of(name):
    rows, columns = REFERENCE[name]["grid"]
    return {"height": 16 * rows, "width": 16 * columns}


def arguments(name):
    """The arguments of the original's call, by texts and images."""
    prompt, images, size_of_reference = CALLS[name]
    given = {} if images is None else {"image": images}
    guidance = {"guidance_scale": REFERENCE[name]["guidance_scale"]}
    return {"prompt": prompt} | given | guidance | ({} if size_of_reference else size_of(name))


def ids_of(name):
    """The same by token ids."""
    kinds = ("input_ids", "negative_input_ids")
    guidance = {"guidance_scale": REFERENCE[name]["guidance_scale"]}
    return {kind: EXPECTED[f"{name}.{kind}"][None] for kind in kinds} | guidance | size_of(name)


@pytest.fixture(scope="module")
def pipe():
    return tiny_emu35.pipeline(image_area=3072)


@pytest.mark.every(3)
@pytest.mark.parametrize(("given", "decoding"), [(arguments, "ar"), (ids_of, "sjd-coupled")], ids=["texts", "ids"])
@pytest.mark.parametrize("name", CALLS)
def test_greedy_codes_equal_the_original(pipe, name, given, decoding):
    out = pipe(**given(name), top_k=1, decoding=decoding, output_type="latent")
    assert torch.equal(out.images[0], EXPECTED[f"{name}.codes"])
    if decoding == "ar":
        assert out.stats.forward_passes == out.images.numel()


@pytest.mark.every(2)
@pytest.mark.parametrize("name", CALLS)
def test_logits_and_pixels_equal_the_original(pipe, name):
    model = pipe.prepare(**arguments(name)).model
    cache, first = model.prefill(1)
    codes = EXPECTED[f"{name}.codes"].flatten()[None, :-1]
    rest = model.forward(codes, torch.arange(codes.shape[1])[None], cache)
    conditional, unconditional = torch.cat([first[:, :, None], rest], dim=2)[:, 0]
    torch.testing.assert_close(conditional, EXPECTED[f"{name}.cond_logits"], atol=1e-4, rtol=0)
    torch.testing.assert_close(unconditional, EXPECTED[f"{name}.uncond_logits"], atol=1e-4, rtol=0)
    scale = REFERENCE[name]["guidance_scale"]
    guided = (unconditional + scale * (conditional - unconditional)).log_softmax(-1)
    torch.testing.assert_close(guided, EXPECTED[f"{name}.guided"].log_softmax(-1), atol=1e-4, rtol=0)

    pixels = pipe(**arguments(name), top_k=1, output_type="pt").images[0]
    expected = (EXPECTED[f"{name}.pixels"] / 2 + 0.5).clamp(0, 1).squeeze(0)
    torch.testing.assert_close(pixels, expected, atol=1e-4, rtol=0)


@torch.no_grad()
def test_levels_of_images_are_rounded_down(pipe):
    image = pipe(**arguments("t2i_0"), top_k=1).images[0]
    levels = ((EXPECTED["t2i_0.pixels"].squeeze(0).clamp(-1, 1) + 1) * 127.5).permute(1, 2, 0)
    found = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(levels.shape)
    assert ((levels - found > -1e-3) & (levels - found < 1 + 1e-3)).all()


@pytest.mark.parametrize("index", [0, 1])
def test_a_reference_is_resized_and_encoded_as_in_the_original(pipe, index):
    resized = smart_resize("image", REFERENCES[index], 3072)
    pixels = torch.frombuffer(bytearray(resized.tobytes()), dtype=torch.uint8).view(resized.height, resized.width, 3)
    assert torch.equal(pixels, EXPECTED[f"ref_{index}.resized"])
    with torch.no_grad():
        codes = pipe.encode_image(pixels.permute(2, 0, 1)[None] / 127.5 - 1)[0]
    assert torch.equal(codes, EXPECTED[f"ref_{index}.codes"])


def tokens(pipe, prompt, **options):
    return pipe(prompt, **options, generator=seeded(0), output_type="latent").images


def test_a_list_is_for_every_prompt_and_lists_are_for_one_each(pipe):
    prompts, (first, second) = [REFERENCE["edit"], REFERENCE["edit2"]], REFERENCES
    greedy = {"top_k": 1, **SMALL}
    shared = tokens(pipe, prompts, image=[first, second], **greedy)
    nested = tokens(pipe, prompts, image=[[first], [second, first]], **greedy)
    for i, (prompt, images) in enumerate(zip(prompts, ([first], [second, first]), strict=True)):
        assert torch.equal(shared[i], tokens(pipe, prompt, image=[first, second], **greedy)[0])
        assert torch.equal(nested[i], tokens(pipe, prompt, image=images, **greedy)[0])
    assert not torch.equal(shared, nested)


def test_images_have_the_size_of_the_last_reference_unless_one_is_given(pipe):
    first, second = REFERENCES
    assert pipe.prepare("a", image=[first, second]).size == (64, 48)
    assert pipe.prepare("a", image=[second, first]).size == (48, 64)
    assert pipe.prepare("a", image=[second, first], **SMALL).size == (32, 48)
    assert pipe.prepare("a", image=[second, first], ratio="1:1").size == (48, 48)
    assert pipe.prepare(["a", "b"], image=[[first], [second, first]]).size == (48, 64)
    with pytest.raises(ValueError, match="differ in size: give height and width"):
        pipe.prepare(["a", "b"], image=[[first], [second]])


def test_references_have_a_guidance_of_their_own(pipe):
    assert pipe.prepare("a").sampling.guidance_scale == 5.0
    assert pipe.prepare("a", image=REFERENCES[0]).sampling.guidance_scale == 3.0
    assert pipe.prepare("a", image=REFERENCES[0], guidance_scale=1.5).sampling.guidance_scale == 1.5


def test_a_negative_prompt_is_the_text_of_the_unconditional_prompt(pipe):
    decode = pipe.tokenizer.decode
    prompts = pipe.prompts
    ids, _ = prompts.encode(["blurry", ""], (32, 48), negative=True)
    assert decode(ids[0]) == (
        "<|extra_203|>You are a helpful assistant. USER: blurry ASSISTANT: <|extra_100|>"
        "<|image start|>2*3<|image token|>"
    )
    plain = tokens(pipe, "a red cat", top_k=1, **SMALL)
    assert torch.equal(plain, tokens(pipe, "a red cat", negative_prompt="", top_k=1, **SMALL))
    seen = [tokens(pipe, "a red cat", negative_prompt=text, top_k=1, **SMALL) for text in ("blurry", "7 blue lamps")]
    assert any(not torch.equal(plain, other) for other in seen)


def test_sizes_are_those_of_the_authors():
    pipe = tiny_emu35.pipeline(image_area=1024 * 1024)
    grids = {"1:1": (64, 64), "4:3": (55, 73), "16:9": (47, 85), "9:16": (85, 47), "21:9": (41, 97), "5:4": (57, 71)}
    for ratio, (rows, columns) in grids.items():
        assert pipe.image_size(ratio=ratio) == (16 * rows, 16 * columns), ratio
    assert pipe.image_sizes[:2] == [(1024, 1024), (880, 1168)] and len(pipe.image_sizes) == 8
    assert pipe.image_size(2048, 16) == (2048, 16)


IDS = {"input_ids": EXPECTED["t2i_0.input_ids"][None]}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "either a prompt or input_ids"),
        ({"prompt": "a", **IDS}, "either a prompt or input_ids"),
        ({"prompt": "a", "negative_prompt": "b", "negative_input_ids": IDS["input_ids"]}, "either a negative_prompt"),
        ({"prompt": "a", "image": [REFERENCES[0]] * 4}, "image holds 4 references for a prompt: .* at most 3"),
        ({"prompt": "a", "image_reference": [REFERENCES[0]] * 4}, "image_reference holds 4 references"),
        ({"prompt": "a", "image": REFERENCES[0], "image_reference": REFERENCES[1]}, "give one of the two"),
        ({"prompt": "a", "image": Image.new("RGB", (6000, 2))}, "has 6000x2 pixels, which become 3008x16: crop it"),
        ({**IDS, "image": REFERENCES[0]}, "input_ids hold their reference images already"),
        ({**IDS, "height": 32, "width": 48}, "input_ids announce an image of another size than 32x48"),
        ({"input_ids": IDS["input_ids"][:, :-1]}, "end with the header of an image"),
        ({"prompt": "a", "height": 2064, "width": 16}, "give a multiple of 16 up to 2048"),
        ({"prompt": "a", "ratio": "1:9999"}, "longer side is above 2048 pixels"),
    ],
)
def test_other_arguments_are_refused(pipe, given, said):
    with pytest.raises(ValueError, match=said):
        pipe(**given)


def test_parts_that_do_not_belong_together_are_refused(pipe):
    with pytest.raises(ValueError, match="neither a tokenizer nor token_ids"):
        Emu35Pipeline(pipe.model, pipe.vq)
    with pytest.raises(ValueError, match="but the tokenizer has"):
        Emu35Pipeline(pipe.model, pipe.vq, pipe.tokenizer, token_ids=dict(pipe.config.token_ids, bos=3))
    bare = Emu35Pipeline(pipe.model, pipe.vq, token_ids=pipe.config.token_ids)
    with pytest.raises(ValueError, match="no tokenizer: give input_ids"):
        bare("a")
    with pytest.raises(ValueError, match="no tokenizer: give negative_input_ids, or guidance_scale=1"):
        bare(**IDS, **size_of("t2i_0"), guidance_scale=2.0)


@pytest.fixture(scope="module")
def vq():
    return tiny_emu35.pipeline().vq


@torch.no_grad()
def test_codes_and_pixels_equal_the_original(vq):
    torch.testing.assert_close(vq.encode(EXPECTED["vq.pixels"]).latents, EXPECTED["vq.latents"], atol=1e-4, rtol=0)
    assert torch.equal(vq.encode_codes(EXPECTED["vq.pixels"]), EXPECTED["vq.codes"])
    decoded = vq.decode_codes(EXPECTED["vq.decode_codes"])
    torch.testing.assert_close(decoded, EXPECTED["vq.decoded"], atol=1e-4, rtol=0)


@torch.no_grad()
def test_encoding_stays_in_float32(vq, tmp_path):
    vq.save_pretrained(tmp_path)
    half = IBQModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half.quantize.embedding.weight.dtype == half.encoder.conv_in.weight.dtype == torch.float32
    assert half.decoder.conv_in.weight.dtype == half.post_quant_conv.weight.dtype == torch.bfloat16
    assert torch.equal(
        half.encode_codes(EXPECTED["vq.pixels"].bfloat16().float()),
        vq.encode_codes(EXPECTED["vq.pixels"].bfloat16().float()),
    )
    decoded = half.decode_codes(EXPECTED["vq.decode_codes"])
    assert decoded.dtype == torch.bfloat16 and (decoded - EXPECTED["vq.decoded"]).abs().mean() < 0.05
