"""`enable_vae_slicing` and `enable_vae_tiling` of every pipeline, whatever the class of its image tokenizer."""

from functools import partial

import pytest
import torch
from families import BUILD, condition_of, one_of_each_kind, seeded

from arimage import JanusPipeline


# Those whose image tokenizer is a class of transformers or diffusers: one of each, and the others.
FOREIGN = ("janus", "lumina")
MORE = [pytest.param(name, marks=pytest.mark.slow) for name in ("emu3", "lumina-2", "anole")]
TILE = 6


@pytest.fixture(params=one_of_each_kind(BUILD))
def pipe(request):
    return BUILD[request.param]()


@pytest.fixture(params=[*FOREIGN, *MORE])
def foreign(request):
    with torch.no_grad():
        yield BUILD[request.param]()


def decoder_of(pipe):
    return (pipe.parts.vqmodel if isinstance(pipe, JanusPipeline) else pipe.vq).decoder


def sizes_of(decoder):
    """The shapes of what the first convolution of `decoder` is called with from now on: [B, h, w]."""
    sizes = []
    decoder.conv_in.register_forward_pre_hook(lambda module, args: sizes.append((len(args[0]), *args[0].shape[-2:])))
    return sizes


@pytest.mark.every(2)
def test_slicing_and_tiles_that_hold_the_image_change_nothing(pipe):
    options = {**condition_of(pipe), "num_images_per_prompt": 2, "output_type": "pt"}
    sizes = sizes_of(decoder_of(pipe))
    expected = pipe(**options, generator=seeded(0)).images
    pipe.enable_vae_tiling()
    assert torch.equal(pipe(**options, generator=seeded(0)).images, expected)
    pipe.enable_vae_slicing()
    sliced = pipe(**options, generator=seeded(0)).images
    torch.testing.assert_close(sliced, expected, atol=1e-4, rtol=0)
    pipe.disable_vae_slicing()
    pipe.disable_vae_tiling()
    assert torch.equal(pipe(**options, generator=seeded(0)).images, expected)
    assert [size[0] for size in sizes] == [2, 2, 1, 1, 2]


@pytest.mark.every(2)
def test_large_images_are_decoded_in_tiles_that_fade_into_each_other(foreign):
    tokens = torch.randint(32, (2, 14, 10), generator=seeded(0))
    factor = foreign.scale_factor
    decode = partial(foreign.tiling.in_tiles, foreign.decode_image, before=1, after=factor)
    whole = decode(tokens)
    sizes = sizes_of(decoder_of(foreign))
    foreign.enable_vae_tiling(TILE * factor, TILE * factor)
    pixels = decode(tokens)
    assert set(sizes) == {(2, TILE, TILE)} and pixels.shape == whole.shape
    # The first four rows and columns of six are in no other tile.
    corner = foreign.decode_image(tokens[:, :TILE, :TILE])[..., : 4 * factor, : 4 * factor]
    torch.testing.assert_close(pixels[..., : 4 * factor, : 4 * factor], corner, atol=1e-5, rtol=0)
    # Random networks see far; the nearer a tile is to the whole image, the less is missing.
    foreign.enable_vae_tiling(2 * TILE * factor, 2 * TILE * factor)
    assert 0 < (decode(tokens) - whole).std() < 0.6 * (pixels - whole).std()


@pytest.mark.every(2)
def test_large_images_are_encoded_in_tiles(foreign):
    factor = foreign.scale_factor
    images = torch.rand(2, 3, 14 * factor, 10 * factor, generator=seeded(0)) * 2 - 1
    whole = foreign.encode_image(images)
    foreign.enable_vae_slicing()
    assert torch.equal(foreign.encode_image(images), whole)
    foreign.enable_vae_tiling(TILE * factor, TILE * factor)
    tokens = foreign.encode_image(images)
    corner = foreign.encode_image(images[..., : TILE * factor, : TILE * factor])[:, :4, :4]
    assert tokens.shape == whole.shape == (2, 14, 10) and torch.equal(tokens[:, :4, :4], corner)
