"""A pipeline with an upscaler generates images of two sizes from the same tokens, and edits images of both."""

import pytest
import tiny
import torch
import torch.nn.functional as F
from families import seeded
from pipelines.arpg import tiny as tiny_arpg
from pipelines.distilled_decoding import tiny as tiny_distilled
from pipelines.latent_llama import tiny as tiny_latent_llama
from pipelines.llamagen import tiny as tiny_llamagen
from pipelines.var import tiny as tiny_var

from arimage import FewStepDecoding
from arimage.media.trace import Trace


def student():
    pipe = tiny_distilled.pipeline("llamagen")
    # All of its vectors are those of its tokens.
    pipe.decoding = FewStepDecoding(codes_until=16)
    return pipe


BUILD = {
    "llamagen": tiny_llamagen.text_pipeline,
    "arpg": lambda: tiny_arpg.pipeline("text"),
    "var": lambda: tiny_var.pipeline("text"),
    "latent-llama": tiny_latent_llama.pipeline,
    "llamagen-dd": student,
}
EDITING = ("llamagen", "arpg", "var")


def condition_of(pipe):
    return {"prompt": ["a red heart", "tree"]} if pipe.num_classes is None else {"class_labels": [3, 5]}


def upscaled_pipeline(family):
    pipe = BUILD[family]()
    pipe.register_modules(upscaler=tiny.upscaler())
    return pipe


# The upscaler of a family reads the pixels of its image tokenizer, which those that are slow share with another one.
@pytest.fixture(params=[pytest.param(it, marks=[pytest.mark.slow] * (it in ("arpg", "llamagen-dd"))) for it in BUILD])
def pipe(request):
    return upscaled_pipeline(request.param)


@pytest.fixture(params=EDITING)
def editor(request):
    return upscaled_pipeline(request.param)


def generate(pipe, **options):
    return pipe(**{**condition_of(pipe), "generator": seeded(0), "output_type": "pt"} | options)


def flat(tokens):
    return torch.cat([part.flatten(1) for part in tokens], 1) if isinstance(tokens, list) else tokens


def test_the_same_tokens_come_out_at_both_sizes(pipe):
    (large, _), (small, _) = pipe.image_sizes
    assert large == 2 * small and small == pipe.decoded_size[0]
    upscaled, decoded = generate(pipe), generate(pipe, height=small, width=small)
    assert torch.equal(flat(upscaled.tokens), flat(decoded.tokens))
    assert upscaled.images.shape[-2:] == (large, large) and decoded.images.shape[-2:] == (small, small)
    # The upscaler reads the pixels before they are clamped.
    call = pipe.prepare(**condition_of(pipe), generator=seeded(0), height=small)
    tokens = flat(decoded.tokens)
    if pipe.abilities.kind == "causal_latents":
        tokens = pipe.to_tokens(tokens)
    elif call.model.kind == "tokens":
        tokens = pipe.prepare(**condition_of(pipe), generator=seeded(0)).layout.to_ranks(tokens.flatten(1))
    elif call.model.kind == "vectors":
        tokens = tokens.flatten(1)
    pixels = pipe.decode_tokens(call, tokens)
    with torch.no_grad():
        expected = (pipe.upscaler.upscale(pixels) / 2 + 0.5).clamp(0, 1)
    torch.testing.assert_close(upscaled.images, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(decoded.images, (pixels / 2 + 0.5).clamp(0, 1), atol=1e-4, rtol=0)


@pytest.mark.every(2)
def test_slices_and_tiles_reach_the_upscaler(pipe):
    expected, seen = generate(pipe).images, []
    pipe.upscaler.conv_in.register_forward_pre_hook(lambda module, args: seen.append(tuple(args[0].shape)))
    pipe.enable_vae_slicing()
    torch.testing.assert_close(generate(pipe).images, expected, atol=1e-4, rtol=0)
    assert [shape[0] for shape in seen] == [1, 1]
    tile = 2 * pipe.vq.scale_factor
    pipe.enable_vae_tiling(tile, tile)
    assert generate(pipe).images.shape == expected.shape and set(seen[2:]) == {(1, 3, tile, tile)}


def given_image(pipe, size):
    return torch.rand(3, size, size, generator=seeded(1)), torch.arange(size).expand(size, -1) >= size // 2


@pytest.mark.every(2)
@pytest.mark.parametrize("output_type", ["pt", "pil"])
def test_an_edit_keeps_the_pixels_outside_of_the_mask_at_both_sizes(editor, output_type):
    for size, _ in editor.image_sizes:
        image, mask = given_image(editor, size)
        images = generate(editor, image=image, mask_image=mask, height=size, output_type=output_type).images
        if output_type == "pil":
            assert [one.size for one in images] == [(size, size)] * 2
            continue
        assert torch.allclose(images[..., ~mask], image[..., ~mask], atol=1e-6)
        assert (images - image)[..., mask].abs().mean() > 0.05


def test_an_edit_reads_a_large_image_as_the_average_of_its_pixels(editor):
    (large, _), (small, _) = editor.image_sizes
    image, mask = given_image(editor, large)
    reduced = F.avg_pool2d(image[None], 2)[0]
    sides = mask[::2, ::2]
    found = generate(editor, image=image, mask_image=mask).tokens
    expected = generate(editor, image=reduced, mask_image=sides, height=small, width=small).tokens
    assert torch.equal(flat(found), flat(expected))
    known = editor.prepare(**condition_of(editor), image=image, mask_image=mask, generator=seeded(0)).sampling.forced
    assert (known >= 0).any() and (known < 0).any()


@pytest.mark.every(2)
def test_steps_and_previews_have_the_size_of_the_call(pipe):
    sizes = []

    def look(pipe, step, passes, tensors):
        call = pipe.current_call
        sizes.append(pipe.preview(call.select([0]), tensors["tokens"][:1]).shape[-1])

    for size, _ in pipe.image_sizes:
        generate(pipe, height=size, callback_on_step_end=look)
        assert set(sizes) == {size}
        sizes.clear()
    recorder = Trace()
    generate(pipe, callback_on_step_end=recorder, callback_on_step_end_tensor_inputs=Trace.inputs)
    assert recorder.call.size == pipe.image_sizes[0]
