"""The colours of an image as viewers show them: 8 bits per channel, in sRGB."""

from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image, ImageCms


# What says how the colours of an image are to be understood, in the `info` of Pillow.
SPACE = ("icc_profile", "srgb", "gamma", "chromaticity")
# The kinds of devices whose profiles a file may hold: others, such as links between devices, describe no colours.
DEVICES = ("scnr", "mntr", "prtr", "spac")
# Chromaticities x, y of white, red, green and blue in sRGB, as a PNG file stores them.
SRGB = (0.3127, 0.329, 0.64, 0.33, 0.3, 0.6, 0.15, 0.06)
# The responses of the three kinds of cones to XYZ (Bradford), between which whites are adapted.
CONES = np.array([[0.8951, 0.2664, -0.1614], [-0.7502, 1.7135, 0.0367], [0.0389, -0.0685, 1.0296]])


def as_rgba(image: Image.Image) -> Image.Image:
    """An image of 8 bits per channel in mode RGBA, its colours as they are."""
    # Not all modes have a direct way.
    if image.mode == "La":
        image = image.convert("LA")
    return (image if image.has_transparency_data else image.convert("RGB")).convert("RGBA")


def eight_bits(name: str, image: Image.Image) -> Image.Image:
    """An image of mode I;16, I or F in mode L, or LA if one of its levels is transparent; others as they are."""
    if image.mode != "F" and not image.mode.startswith("I"):
        return image
    values = np.asarray(image)
    least, most = values.min(), values.max()
    # Levels of 8 bits in mode I would become black. Not a number is refused by the comparison, too.
    fits = least >= 0 and most <= 1 if image.mode == "F" else least >= 0 and most <= 65535
    if not fits or (image.mode == "I" and 0 < most < 256):
        expected = "floats in [0, 1]" if image.mode == "F" else "levels of 16 bits"
        raise ValueError(
            f"{name} has levels from {least:g} to {most:g} where mode {image.mode} means {expected}: scale them, or "
            "convert it to mode L"
        )
    levels = values * 255 if image.mode == "F" else values / 257
    grey = Image.fromarray(levels.round().astype(np.uint8))
    if "transparency" in image.info:
        grey.putalpha(Image.fromarray(np.where(values == image.info["transparency"], 0, 255).astype(np.uint8)))
    grey.info = {key: image.info[key] for key in SPACE if key in image.info}
    return grey


def in_srgb(image: Image.Image) -> Image.Image:
    """An image of 8 bits per channel converted to sRGB, after which it says nothing about its colours any more.

    They are those of its ICC profile (perceptual intent), or else of the gamma and the chromaticities of a PNG file.
    Without these, and with a profile that is damaged or of another kind of image, they are sRGB already, as in
    browsers.
    """
    convert = _by_profile(image) or _by_chromaticities(image)
    if convert is None:
        image = image.copy()
    elif image.mode in ("CMYK", "LAB"):
        image = convert(image)
    else:
        rgba = as_rgba(image)
        colours, alpha = convert(rgba.convert("RGB")), rgba.getchannel("A")
        if image.has_transparency_data:
            colours.putalpha(alpha)
        image = colours
    image.info = {key: value for key, value in image.info.items() if key not in SPACE}
    return image


def _by_profile(image: Image.Image) -> Callable[[Image.Image], Image.Image] | None:
    """From the colours of the profile of an image; None if it has none that can be used."""
    try:
        profile = _profile(image)
        mode = None if profile is None else _mode(image, profile.xcolor_space.strip())
        if profile is None or mode is None:
            return None
        transform = ImageCms.buildTransform(profile, ImageCms.createProfile("sRGB"), mode, "RGB")
    except (OSError, ImageCms.PyCMSError):
        return None

    def convert(colours: Image.Image) -> Image.Image:
        return transform.apply(colours.convert(mode))

    return convert


def _profile(image: Image.Image) -> Any:
    """The profile of an image, None if it has none that describes colours."""
    data = image.info.get("icc_profile")
    if image.mode == "LAB":
        return ImageCms.createProfile("LAB")
    if not data or _is_slow(data):
        return None
    profile = ImageCms.core.profile_frombytes(data)
    return profile if profile.device_class in DEVICES else None


def _mode(image: Image.Image, kind: str) -> str | None:
    """The mode in which a profile of this kind describes the colours of an image; None if it does not."""
    if image.mode in ("CMYK", "LAB"):
        return image.mode if kind == {"CMYK": "CMYK", "LAB": "Lab"}[image.mode] else None
    if kind == "GRAY":
        return "L" if image.mode in ("1", "L", "LA", "La") else None
    return "RGB" if kind == "RGB" else None


def _is_slow(profile: bytes) -> bool:
    """Whether a profile has lists of steps (D2B0 to D2B3): a few kilobytes can name so many that one image takes
    minutes. Hardly any profile has them."""
    count = min(int.from_bytes(profile[128:132]), len(profile) // 12)
    return any(profile.startswith(b"D2B", 132 + 12 * i) for i in range(count))


def _by_chromaticities(image: Image.Image) -> Callable[[Image.Image], Image.Image] | None:
    """From the colours that a PNG file without a profile describes; None if these are sRGB or impossible."""
    gamma, found = image.info.get("gamma"), image.info.get("chromaticity", SRGB)
    # A profile, even one that cannot be used, comes before them.
    if "icc_profile" in image.info or "srgb" in image.info or (gamma is None and found is SRGB):
        return None
    # 1 / 2.2 stands for the curve of sRGB, to the tolerance of libpng.
    gamma = 1 / 2.2 if gamma is None else gamma
    curved = abs(2.2 * gamma - 1) <= 0.05
    if curved and np.abs(np.subtract(found, SRGB)).max() < 0.01:
        return None
    levels = np.arange(256) / 255
    try:
        linear = np.where(levels <= 0.04045, levels / 12.92, ((levels + 0.055) / 1.055) ** 2.4)
        linear = (linear if curved else levels ** (1 / gamma)).astype(np.float32)
        white, new = _to_xyz(found).sum(1), _to_xyz(SRGB).sum(1)
        adapted = np.linalg.solve(CONES, ((CONES @ new) / (CONES @ white))[:, None] * CONES)
        matrix = (np.linalg.solve(_to_xyz(SRGB), adapted) @ _to_xyz(found)).astype(np.float32)
    except (np.linalg.LinAlgError, ZeroDivisionError):
        return None
    if not np.isfinite(matrix).all():
        return None

    def convert(colours: Image.Image) -> Image.Image:
        light = np.clip(linear[np.asarray(colours)] @ matrix.T, 0, 1)
        shown = np.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055)
        return Image.fromarray((255 * shown).round().astype(np.uint8))

    return convert


def _to_xyz(chromaticities: tuple[float, ...]) -> np.ndarray:
    """The matrix [3, 3] from linear red, green and blue to XYZ, in which white has Y = 1."""
    x, y = np.array(chromaticities).reshape(4, 2).T
    if not y[0]:
        raise ZeroDivisionError
    corners = np.stack([x, y, 1 - x - y])
    return corners[:, 1:] * np.linalg.solve(corners[:, 1:], corners[:, 0] / y[0])
