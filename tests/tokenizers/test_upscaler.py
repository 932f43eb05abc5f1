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
        assert torch.equal(ImageUpscaler((4, 6), 1, scale).upscale(given), expected)


@torch.no_grad()
def test_a_trained_one_adds_details_that_depend_on_a_neighbourhood():
    upscaler, given = tiny.upscaler(), images(1, 3, 32, 32)
    details = upscaler.upscale(given) - F.interpolate(given, scale_factor=2.0, mode="bicubic")
    assert details.std() > 0.05
    changed = given.clone()
    changed[..., 0, 0] += 1
    moved = (upscaler.upscale(changed) != upscaler.upscale(given)).any(1)[0]
    # Eight convolutions at the first level or a step to the second reach eight pixels, four at the second as many.
    assert moved[:8, :8].any() and moved[20:24].any() and not moved[40:].any() and not moved[:, 40:].any()


@pytest.mark.parametrize("size", [(8, 6), (10, 8)])
def test_a_size_that_cannot_be_halved_is_refused(size):
    with pytest.raises(ValueError, match=f"{size[0]}x{size[1]} pixels do not fit this upscaler: .* multiples of 4"):
        ImageUpscaler().upscale(images(1, 3, *size))


@torch.no_grad()
def test_levels_are_not_rounded_to_bfloat16():
    given = images(1, 3, 8, 8).bfloat16()
    upscaled = ImageUpscaler((4, 6), 1).to(torch.bfloat16).upscale(given)
    assert torch.equal(upscaled, F.interpolate(given.float(), scale_factor=2.0, mode="bicubic"))
