"""Slicing changes nothing; tiling bounds the memory, and changes pixels as little as its docstring says."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from diffusers import VQModel
from PIL import Image
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from arimage.tokenizers.tiling import Tiling, tiled
from arimage.tokenizers.vq_llamagen import LlamaGenVQModel
from arimage.tokenizers.vq_var import VARVQModel
from arimage_emoji import MODELS


SETTINGS = [f"tile_sample_{kind}_{side}" for kind in ("min", "stride") for side in ("height", "width")]


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def vq():
    return LlamaGenVQModel.from_pretrained(MODELS / "emoji-llamagen" / "vq").eval()


@pytest.fixture
def var():
    return VARVQModel.from_pretrained(MODELS / "emoji-var" / "vq").eval()


@pytest.fixture(scope="module")
def collages():
    """Three images [3, 3, 256, 256] of 4 x 4 emoji each, at the size of 64 pixels that the packaged tokenizers
    know."""
    gallery = np.asarray(Image.open(MODELS / "emoji-reference" / "gallery.webp").convert("RGB"))
    gallery = torch.from_numpy(gallery.copy()).permute(2, 0, 1) / 127.5 - 1
    corners = [(0, 0), (256, 128), (512, 256)]
    images = torch.stack([gallery[:, y : y + 128, x : x + 128] for y, x in corners])
    return F.interpolate(images, scale_factor=2, mode="bicubic").clamp(-1, 1)


@pytest.fixture(scope="module")
def whole(collages):
    """The tokens and the decoded pixels of the collages without tiling."""
    vq = LlamaGenVQModel.from_pretrained(MODELS / "emoji-llamagen" / "vq").eval()
    with torch.no_grad():
        tokens = vq.encode(collages)
        return tokens, vq.decode(tokens)


def psnr(images, others):
    return float(10 * (4 / (images.clamp(-1, 1) - others.clamp(-1, 1)).float().square().mean()).log10())


def calls_of(module):
    """The heights and widths that `module` is called with from now on."""
    sizes = []
    module.register_forward_pre_hook(lambda module, args: sizes.append((len(args[0]), *args[0].shape[-2:])))
    return sizes


@pytest.fixture
def one_convolution(monkeypatch):
    """Without oneDNN, which torch uses or not depending on the size of a batch, and which rounds in its own way."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)


@pytest.mark.usefixtures("one_convolution")
@pytest.mark.parametrize(("batch", "tiling"), [(1, True), (2, False), (3, True)])
def test_slicing_changes_nothing(vq, collages, batch, tiling):
    images = collages[:batch, :, :96, :64]
    if tiling:
        vq.enable_tiling(64, 64)
    tokens = vq.encode(images)
    pixels = vq.decode(tokens)
    vq.enable_slicing()
    encoded, decoded = calls_of(vq.encoder), calls_of(vq.decoder)
    assert torch.equal(vq.encode(images), tokens)
    assert torch.equal(vq.decode(tokens), pixels)
    assert {size for size, *_ in encoded + decoded} == {1}
    vq.disable_slicing()
    vq.decode(tokens)
    assert decoded[-1][0] == batch


@pytest.mark.slow
@pytest.mark.parametrize(("tile", "bound"), [(None, 34), (64, 30.5)])
def test_tiles_are_as_close_to_the_whole_as_the_docstring_says(vq, collages, whole, tile, bound):
    tokens, pixels = whole
    vq.enable_tiling(tile, tile)
    blended = vq.decode(tokens)
    assert bound < psnr(blended, pixels) < bound + 2
    assert psnr(blended, collages) > psnr(pixels, collages) - 0.1


def steps(error, borders):
    """How much an error [B, 3, H, W] changes from one column to the next, at the borders of tiles and elsewhere."""
    change = error.diff(dim=-1).abs().mean((0, 1, 2))
    at_border = torch.zeros(len(change), dtype=torch.bool)
    at_border[[x - 1 for x in borders]] = True
    return float(change[at_border].mean()), float(change[~at_border].mean())


def test_no_seams(vq, whole):
    tokens, pixels = whole
    vq.enable_tiling(64, 64)
    borders = [48, 64, 96, 112, 144, 160, 192, 208]
    at_border, elsewhere = steps(vq.decode(tokens) - pixels, borders)
    assert at_border < 1.25 * elsewhere
    vq.enable_tiling(64, 64, 64, 64)
    at_border, elsewhere = steps(vq.decode(tokens) - pixels, [64, 128, 192])
    assert at_border > 1.5 * elsewhere


@pytest.mark.every(2)
@pytest.mark.parametrize(("height", "width"), [(256, 96), (64, 200)])
def test_tiles_have_one_size_whatever_that_of_the_image(vq, collages, height, width):
    images = collages[:2, :, :height, :width]
    tokens = vq.encode(images)
    whole = vq.decode(tokens)
    vq.enable_tiling()
    encoded, decoded = calls_of(vq.encoder), calls_of(vq.decoder)
    assert vq.encode(images).shape == tokens.shape
    blended = vq.decode(tokens)
    tile = 2, min(height, 128), min(width, 128)
    assert set(encoded) == {tile}
    assert set(decoded) == {(2, tile[1] // 4, tile[2] // 4)}
    assert blended.shape == whole.shape
    assert psnr(blended, whole) > 30


def test_what_does_not_depend_on_its_surroundings_is_the_same_in_tiles():
    images = torch.randn(2, 3, 28, 44)

    def pool(image):
        return F.avg_pool2d(image, 4)

    torch.testing.assert_close(tiled(pool, images, (4, 3), (3, 1), before=4, after=1), pool(images))
    torch.testing.assert_close(tiled(pool, images, (20, 2), (3, 2), before=4, after=1), pool(images))


@pytest.mark.slow
@pytest.mark.parametrize(("tile", "bound"), [(48, 34.5), (32, 27)])
def test_var_decodes_in_tiles_and_encodes_whole(var, collages, tile, bound):
    images = collages.unfold(2, 64, 64).unfold(3, 64, 64).permute(0, 2, 3, 1, 4, 5).flatten(0, 2)
    tokens = var.encode(images)
    whole = var.decode(tokens)
    var.enable_tiling(tile, tile)
    encoded, decoded = calls_of(var.encoder), calls_of(var.decoder)
    assert all(map(torch.equal, var.encode(images), tokens))
    blended = var.decode(tokens)
    assert encoded == [(48, 64, 64)]
    assert set(decoded) == {(48, tile // 4, tile // 4)}
    assert bound < psnr(blended, whole) < bound + 2


@pytest.mark.every(2)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("value", [0, -64, 66, 64.0, "64"])
def test_sizes_that_are_no_multiples_of_a_token_are_refused(vq, name, value):
    with pytest.raises(ValueError, match=rf"^{name} .*multiple of 4"):
        vq.enable_tiling(**{name: value})
    with pytest.raises(ValueError, match=f"^tile_sample_stride_{name.rpartition('_')[2]} .*64"):
        vq.enable_tiling(64, 64, **{f"tile_sample_stride_{name.rpartition('_')[2]}": 68})
    assert not vq.use_tiling


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that an operator returns."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        results = operator(*args, **(kwargs or {}))
        sizes = [leaf.nbytes for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor)]
        self.bytes = max(self.bytes, *sizes, 0)
        return results


def chameleon():
    vq = VQModel(
        down_block_types=("DownEncoderBlock2D",) * 5,
        up_block_types=("UpDecoderBlock2D",) * 5,
        block_out_channels=(128, 128, 256, 256, 512),
        layers_per_block=2,
        latent_channels=256,
        num_vq_embeddings=8192,
    )

    def decode(tokens):
        return vq.decode(vq.quantize.embedding(tokens).permute(0, 3, 1, 2), force_not_quantize=True).sample

    return decode, 16


@pytest.mark.slow
def test_memory_at_1024_pixels_is_that_of_one_tile_and_one_image():
    with FakeTensorMode(), torch.no_grad():
        decode, factor = chameleon()
        tiling = Tiling(factor)

        def largest(side, batch=1):
            with Largest() as mode:
                tokens = torch.zeros(batch, side // factor, side // factor, dtype=torch.long)
                tiling.in_tiles(decode, tokens, before=1, after=factor)
            return mode.bytes

        tile = largest(32 * factor)
        assert min(largest(1024), largest(32 * factor, batch=4)) > 3.9 * tile
        tiling.enable_tiling()
        tiling.enable_slicing()
        assert largest(1024, batch=2) == tile
