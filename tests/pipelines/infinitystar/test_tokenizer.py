"""The video tokenizer of InfinityStar next to the authors' (tiny random weights in the published format)."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from arimage.convert.checkpoint import load_original
from arimage.pipelines.infinitystar import vq_infinitystar
from arimage.pipelines.infinitystar.convert import infinitystar_tokenizer_from_original
from arimage.pipelines.infinitystar.vq_infinitystar import InfinityStarVideoTokenizer


FIXTURES = Path(__file__).parent / "fixtures"
FILE = FIXTURES / "infinitystar_videovae_tiny.pth"


@pytest.fixture(scope="module")
def expected():
    return load_file(FIXTURES / "expected.safetensors")


@pytest.fixture(scope="module")
def original():
    return load_original(FILE, ("vae",))


@pytest.fixture
def vq(original):
    return infinitystar_tokenizer_from_original(original, source=FILE)


def pixels(expected, name):
    return expected[f"{name}.video"].float() / 127.5 - 1


@pytest.mark.every(2)
@pytest.mark.parametrize(("name", "chunk"), [("vae_image", 2), ("vae_nine", 1), ("vae_nine", 3), ("vae_nine", 100)])
@torch.no_grad()
def test_latents_and_frames_equal_the_originals_whatever_the_chunk(vq, expected, name, chunk, monkeypatch):
    monkeypatch.setattr(vq_infinitystar, "CHUNK", chunk)
    latents = expected[f"{name}.latents"]
    torch.testing.assert_close(vq.encode_latents(pixels(expected, name)), latents, atol=1e-5, rtol=0)
    torch.testing.assert_close(vq.decode_latents(latents), expected[f"{name}.decoded"], atol=1e-5, rtol=0)


@torch.no_grad()
def test_the_work_of_a_layer_is_bounded_by_the_chunk(vq, expected):
    lengths = []
    for layer in vq.decoder.modules():
        if isinstance(layer, vq_infinitystar.CausalConv):
            layer.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[2]))
    vq.decode_latents(expected["vae_nine.latents"].repeat(1, 1, 7, 1, 1))
    # One latent frame becomes four frames, and the first chunk has a latent frame more, which becomes one.
    assert max(lengths) == vq_infinitystar.CHUNK * vq_infinitystar.FRAMES + 1


@torch.no_grad()
def test_tiles_and_slices_approximate_the_whole(vq, expected):
    latents = expected["vae_nine.latents"]
    whole = vq.decode_latents(latents)
    vq.enable_slicing()
    torch.testing.assert_close(vq.decode_latents(latents), whole, atol=1e-5, rtol=0)
    vq.enable_tiling(64, 64)
    torch.testing.assert_close(vq.decode_latents(latents), whole, atol=1e-5, rtol=0)
    vq.enable_tiling(32, 48, 16, 32)
    tiled = vq.decode_latents(latents)
    assert tiled.shape == whole.shape and not torch.equal(tiled, whole)
    assert vq.encode_latents(whole).shape == latents.shape


def test_videos_of_other_lengths_and_sides_are_refused(vq):
    with pytest.raises(ValueError, match="8 frames: give 1, or 1 more than a multiple of 4"):
        vq.encode_latents(torch.zeros(1, 3, 8, 32, 32))
    with pytest.raises(ValueError, match="frames of 40x32 pixels do not fit"):
        vq.encode_latents(torch.zeros(1, 3, 5, 40, 32))


@torch.no_grad()
def test_only_the_later_widths_are_multiples_of_four():
    vq = InfinityStarVideoTokenizer((6, 12, 24, 24), 1, 4)
    latents = vq.encode_latents(torch.zeros(1, 3, 5, 32, 32))
    assert vq.decode_latents(latents).shape == (1, 3, 5, 32, 32)
    for widths in ((6, 10, 20, 20), (6, 28, 28, 28), (8, 8, 8)):
        with pytest.raises(ValueError, match="widths"):
            InfinityStarVideoTokenizer(widths, 1, 4)
