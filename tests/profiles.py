"""Colour profiles, small ones written by hand, and what a viewer shows of an image that has one."""

import io
import struct
from types import MappingProxyType

import numpy as np
from PIL import ImageCms


def _fixed(*numbers):
    return b"".join(struct.pack(">i", round(number * 65536)) for number in numbers)


def _profile(space, tags, pcs=b"XYZ ", device=b"mntr"):
    tags = {b"wtpt": b"XYZ \0\0\0\0" + _fixed(0.9642, 1, 0.8249), b"cprt": b"text\0\0\0\0none\0\0\0\0", **tags}
    table, data = struct.pack(">I", len(tags)), b""
    for tag, value in tags.items():
        table += tag + struct.pack(">II", 132 + 12 * len(tags) + len(data), len(value))
        data += value + b"\0" * (-len(value) % 4)
    head = struct.pack(">I4sI4s4s4s", 128 + len(table) + len(data), b"none", 0x02400000, device, space, pcs)
    head += b"\x07\xe0\0\1\0\1\0\0\0\0\0\0acsp" + b"\0" * 28 + _fixed(0.9642, 1, 0.8249) + b"\0" * 48
    return head + table + data


def gamma(value):
    return b"curv\0\0\0\0" + struct.pack(">IH", 1, round(value * 256)) + b"\0\0"


def _points(values):
    levels = (np.asarray(values) * 65535).round().astype(">u2")
    return b"curv\0\0\0\0" + struct.pack(">I", len(levels)) + levels.tobytes()


def matrix(red, green, blue, curve, tags=MappingProxyType({})):
    primaries = {b"rXYZ": red, b"gXYZ": green, b"bXYZ": blue}
    primaries = {tag: b"XYZ \0\0\0\0" + _fixed(*xyz) for tag, xyz in primaries.items()}
    return _profile(b"RGB ", primaries | dict.fromkeys((b"rTRC", b"gTRC", b"bTRC"), curve) | tags)


WIDE_PRIMARIES = (0.5151, 0.2412, -0.0011), (0.2920, 0.6922, 0.0419), (0.1571, 0.0666, 0.7841)
SRGB_PRIMARIES = (0.4361, 0.2225, 0.0139), (0.3851, 0.7169, 0.0971), (0.1431, 0.0606, 0.7141)
_LEVELS = np.linspace(0, 1, 1024)
_CURVE = np.where(_LEVELS <= 0.04045, _LEVELS / 12.92, ((_LEVELS + 0.055) / 1.055) ** 2.4)


def steps(count):
    """The tag D2B0: a list of equal steps, stored once."""
    place = 16 + 8 * count
    matrix = b"matf\0\0\0\0" + struct.pack(">HH12f", 3, 3, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0)
    return b"mpet\0\0\0\0" + struct.pack(">HHI", 3, 3, count) + struct.pack(">II", place, len(matrix)) * count + matrix


def _ink():
    """CMYK to Lab by a table of the corners: cyan and black darken."""
    ramp = bytes(range(256))
    nodes = [
        (255 - 90 * c - 160 * k * (1 - c), 128 - 30 * c, 128 - 40 * c + 30 * y)
        for c, _, y, k in np.ndindex(2, 2, 2, 2)
    ]
    table = b"".join(bytes(int(np.clip(value, 0, 255)) for value in node) for node in nodes)
    matrix = _fixed(1, 0, 0, 0, 1, 0, 0, 0, 1)
    return b"mft1\0\0\0\0" + bytes([4, 3, 2, 0]) + matrix + ramp * 4 + table + ramp * 3


# Primaries of Display P3; sRGB with a table of its curve, as in the files of cameras; a scanner's grey; inks.
WIDE = matrix(*WIDE_PRIMARIES, gamma(2.2))
GREY = _profile(b"GRAY", {b"kTRC": gamma(1.0)})
INKS = _profile(b"CMYK", {b"A2B0": _ink()}, b"Lab ", b"prtr")
# It names a hundred thousand steps in 800 kB.
SLOW = matrix(*WIDE_PRIMARIES, gamma(2.2), {b"D2B0": steps(100_000)})


def as_shown(image, profile):
    """What a viewer shows on an sRGB screen of an image in mode RGB, L or CMYK."""
    profiles = ImageCms.ImageCmsProfile(io.BytesIO(profile)), ImageCms.createProfile("sRGB")
    shown = ImageCms.profileToProfile(image, *profiles, outputMode="RGB")
    shown.info = {}
    return shown
