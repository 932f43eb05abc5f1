"""Icons as pictures: black on white, 64 pixels wide and high, in grey."""

import io
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import resvg_py
from PIL import Image
from tqdm import tqdm

from .choose import Icon
from .source import read_sets


SIZE = 64
# The view box is so many times as large as an icon, which leaves a margin.
ROOM = 1.08
# The most ink that a picture may have.
MOST_INK = 0.75


def to_svg(icon: dict, icon_set: dict) -> str:
    """The SVG file of an icon, whose view box is its own or that of its set."""
    width, height = (icon.get(key, icon_set.get(key, 16)) for key in ("width", "height"))
    left, top = (icon.get(key, icon_set.get(key, 0)) for key in ("left", "top"))
    side = max(width, height) * ROOM
    view = f"{left - (side - width) / 2} {top - (side - height) / 2} {side} {side}"
    paper = f'<rect x="{left - side}" y="{top - side}" width="{3 * side}" height="{3 * side}" fill="white"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{SIZE}" height="{SIZE}" viewBox="{view}">'
        f'{paper}<g color="#000">{icon["body"]}</g></svg>'
    )


def read_shapes(package: Path, icons: Iterable[Icon]) -> dict[tuple[str, str], str]:
    """The SVG files of icons by set and name."""
    wanted: defaultdict[str, list[str]] = defaultdict(list)
    for icon in icons:
        wanted[icon.set].append(icon.name)
    return {
        (prefix, name): to_svg(icon_set["icons"][name], icon_set)
        for prefix, icon_set in read_sets(package)
        for name in wanted.get(prefix, ())
    }


def to_png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def draw(package: Path, icons: list[Icon], left_out: Counter[str]) -> tuple[list[Icon], np.ndarray]:
    """The pictures of icons, uint8 [N, 64, 64], and the icons that they are of. Of equal pictures the first is kept;
    `left_out` gets the count of the others."""
    shapes = read_shapes(package, icons)
    drawn: dict[bytes, Icon] = {}
    for icon in tqdm(icons, desc="drawing", unit="icon"):
        png = resvg_py.svg_to_bytes(svg_string=shapes[icon.set, icon.name], skip_system_fonts=True)
        pixels = np.asarray(Image.open(io.BytesIO(bytes(png))).convert("L"))
        key = pixels.tobytes()
        if 1 - pixels.mean() / 255 > MOST_INK:
            left_out[f"with more than {MOST_INK:.0%} ink"] += 1
        elif key in drawn:
            left_out["with a picture that another one has"] += 1
        else:
            drawn[key] = icon
    return list(drawn.values()), np.frombuffer(b"".join(drawn), np.uint8).reshape(-1, SIZE, SIZE)
