"""The upscaler adds to the bicubic interpolation, nothing before it is trained."""

import pytest
import tiny
import torch
import torch.nn.functional as F

from arimage.tokenizers.upscaler import ImageUpscaler


def images(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1


@pytest.mark.parametrize("scale", [1, 2, 3])
def test_a_fresh_upscaler_interpolates(scale):
    given = images(2, 3, 6, 10)
    expected = F.interpolate(given, scale_factor=float(scale), mode="bicubic")
    with torch.no_grad():
        assert torch.equal(ImageUpscaler(4, 1, scale).upscale(given), expected)


@torch.no_grad()
def test_a_trained_one_adds_details_that_depend_on_a_neighbourhood():
    upscaler, given = tiny.upscaler(), images(1, 3, 16, 16)
    details = upscaler.upscale(given) - F.interpolate(given, scale_factor=2.0, mode="bicubic")
    assert details.std() > 0.05
    # Four convolutions reach four pixels of the input: the lower right corner does not see the upper left one.
    changed = given.clone()
    changed[..., 0, 0] += 1
    moved = (upscaler.upscale(changed) != upscaler.upscale(given)).any(1)[0]
    assert moved[:8, :8].any() and not moved[12:].any() and not moved[:, 12:].any()


@torch.no_grad()
def test_each_image_is_upscaled_alone():
    upscaler, given = tiny.upscaler(), images(3, 3, 8, 8)
    torch.testing.assert_close(upscaler.upscale(given)[1:2], upscaler.upscale(given[1:2]), atol=1e-6, rtol=0)


@torch.no_grad()
def test_levels_are_not_rounded_to_bfloat16():
    given = images(1, 3, 8, 8).bfloat16()
    upscaled = ImageUpscaler(4, 1).to(torch.bfloat16).upscale(given)
    assert torch.equal(upscaled, F.interpolate(given.float(), scale_factor=2.0, mode="bicubic"))


@pytest.mark.parametrize("name", ["channels", "num_blocks", "scale"])
def test_a_wrong_size_is_refused(name):
    with pytest.raises(ValueError, match=f"{name} is 0: give at least 1"):
        ImageUpscaler(**{name: 0})
