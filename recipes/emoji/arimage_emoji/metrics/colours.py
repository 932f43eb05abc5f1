"""Named colours by hue: which colour a picture has, and how to recolour it."""

import numpy as np
import torch
from PIL import Image


# Hue in degrees, saturation relative to a pure colour, and how light an object of this colour is, of 255.
COLOURS = {
    "red": (2, 1.0, 225),
    "orange": (28, 1.0, 240),
    "yellow": (50, 1.0, 240),
    "green": (125, 0.8, 180),
    "blue": (212, 0.95, 230),
    "purple": (275, 0.75, 205),
    "pink": (325, 0.6, 240),
}
# Where one colour ends and the next begins; the last range is red again.
_BOUNDS = (15, 40, 68, 165, 248, 300, 345)
_SATURATED, _LIT, _NEAR = 70, 60, 40
# The lowest median saturation of a recoloured object, of 255.
_PURE = 200


def _hsv(images: torch.Tensor) -> np.ndarray:
    """uint8 [M, 3, S, S] to int32 [M, S, S, 3]: hue in degrees, saturation and value in 0 to 255."""
    count, _, height, width = images.shape
    tall = images.permute(0, 2, 3, 1).reshape(count * height, width, 3).contiguous().numpy()
    hsv = np.asarray(Image.fromarray(tall).convert("HSV")).astype(np.int32)
    hsv[..., 0] = hsv[..., 0] * 360 // 256
    return hsv.reshape(count, height, width, 3)


def _saturated(hsv: np.ndarray) -> np.ndarray:
    return (hsv[..., 1] > _SATURATED) & (hsv[..., 2] > _LIT)


def _distance(hue: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Degrees between hues, at most 180."""
    return np.abs((hue - other + 180) % 360 - 180)


def colour_shares(images: torch.Tensor, masks: torch.Tensor) -> np.ndarray:
    """The share of the pixels in `masks`, bool [M, S, S], that has each of `COLOURS` in `images`, uint8 [M, 3, S, S]:
    float [M, 7]. Pixels that are grey or too dark have no colour."""
    hsv, masks = _hsv(images), masks.numpy()
    chosen = _saturated(hsv) & masks
    colour = np.searchsorted(_BOUNDS, hsv[..., 0], side="right") % len(COLOURS)
    hits = (colour[..., None] == np.arange(len(COLOURS))) & chosen[..., None]
    return hits.sum((1, 2)) / masks.sum((1, 2)).clip(1)[:, None]


def main_hues(images: torch.Tensor, masks: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The most common hue of each image in degrees [M], and the share [M] of pixels in `masks` that are near it."""
    hsv, masks = _hsv(images), masks.numpy()
    chosen = _saturated(hsv) & masks
    counts = np.stack(
        [np.bincount(hue[some] // 10, minlength=36) for hue, some in zip(hsv[..., 0], chosen, strict=True)]
    )
    smooth = counts + np.roll(counts, 1, 1) + np.roll(counts, -1, 1)
    hues = smooth.argmax(1) * 10 + 5
    near = chosen & (_distance(hsv[..., 0], hues[:, None, None]) < _NEAR)
    return hues, near.sum((1, 2)) / masks.sum((1, 2)).clip(1)


def recolour(images: torch.Tensor, hues: np.ndarray | list[int], colour: str) -> torch.Tensor:
    """Turn the hues near `hues` [M] of `images`, uint8 [M, 3, S, S], into `colour`, a name of `COLOURS`. Shading,
    white and other hues stay; dull colours become pure ones."""
    target, saturation, lightness = COLOURS[colour]
    hsv = _hsv(images)
    hue, hues = hsv[..., 0], np.asarray(hues)[:, None, None]
    near = (_distance(hue, hues) < _NEAR) & (hsv[..., 1] > 0)
    # Half of the spread: a shading that runs from yellow to orange must not run from blue to purple.
    turned = (target + ((hue - hues + 180) % 360 - 180) // 2) % 360
    value = hsv[..., 2].astype(np.float32)
    some = near & _saturated(hsv)

    def median(of: np.ndarray) -> np.ndarray:
        pairs = zip(of, some, strict=True)
        return np.array([np.median(one[chosen]) if chosen.any() else 255 for one, chosen in pairs])[:, None, None]

    # Dark orange is brown and dark yellow olive.
    gain = np.clip(lightness / median(value).clip(1), 0.7, 1.8)
    saturated = np.minimum(255, hsv[..., 1] * np.clip(_PURE / median(hsv[..., 1]), 1, 3))
    value = np.minimum(255, value * (1 + (gain - 1) * saturated / 255))
    pixels = np.stack([turned * 256 // 360, saturated * saturation, value], -1).astype(np.uint8)
    count, height, width = hue.shape
    tall = Image.fromarray(pixels.reshape(count * height, width, 3), "HSV").convert("RGB")
    found = torch.from_numpy(np.array(tall)).reshape(count, height, width, 3).permute(0, 3, 1, 2)
    return torch.where(torch.from_numpy(near)[:, None], found, images)
