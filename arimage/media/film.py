"""Films of one decoding, and of several side by side at their true speed."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from ..pipelines.output import passes_text
from .trace import FAINT, INK, PAPER, write_animation
from .writing import own_path


# How long a film takes without its last frame, in milliseconds, and how long the last frame is shown.
LASTS, RESTS = 8000, 3000
# A race has a frame per TICK seconds, at most FRAMES, and takes at least SHORTEST seconds.
TICK, FRAMES, SHORTEST = 0.05, 120, 2.0
CLOCK, FOOT = 64, 30


@dataclass(frozen=True)
class Film:
    """How an image was generated.

    Attributes:
        frames: images of some or all forward passes, then the finished image, as in `arimage generate --trace`.
        seconds: seconds from the prefill to each frame. An accelerator may still be computing a frame that is counted.
        passes: number of forward passes.
    """

    frames: list[Image.Image]
    seconds: list[float]
    passes: int


def write_film(film: Film, name: str, folder: str) -> Path:
    """Write a WebP of about eight seconds with one frame per forward pass, in a new folder in `folder`."""
    duration = min(400, max(40, LASTS // len(film.frames)))
    path = own_path(name, ".webp", folder)
    write_animation(film.frames, [duration] * (len(film.frames) - 1) + [RESTS], path)
    return path


def write_race(films: Sequence[Film], name: str, folder: str, columns: int = 4) -> Path:
    """Write a WebP of several films next to each other, at most `columns` in a row. All start at once and run at their
    true speed, or equally slowed down if they would be over too soon."""
    longest = max(film.seconds[-1] for film in films)
    slower = max(1, math.ceil(SHORTEST / longest))
    tick = max(TICK, longest * slower / FRAMES)
    ticks = math.ceil(longest * slower / tick) + 1
    columns = min(columns, 2 if len(films) in (2, 4) else len(films))
    frames = [_race_frame(films, number * tick / slower, slower, columns) for number in range(ticks)]
    path = own_path(name, ".webp", folder)
    write_animation(frames, [round(1000 * tick)] * (ticks - 1) + [RESTS], path)
    return path


def _race_frame(films: Sequence[Film], now: float, slower: int, columns: int) -> Image.Image:
    """One frame: the progress of every film `now` seconds after the start."""
    width, height = (max(sides) for sides in zip(*(film.frames[0].size for film in films), strict=True))
    rows = math.ceil(len(films) / columns)
    canvas = Image.new("RGB", (columns * width, rows * (CLOCK + height) + FOOT), PAPER)
    pen = ImageDraw.Draw(canvas)
    for place, film in enumerate(films):
        left, top = place % columns * width, place // columns * (CLOCK + height)
        done = now >= film.seconds[-1]
        pen.text((left + 10, top + 8), f"{min(now, film.seconds[-1]):.2f} s", INK if done else FAINT, _font(34))
        passes = passes_text(film.passes) if done else ""
        pen.text((left + width - 12, top + 44), passes, FAINT, _font(20), anchor="rs")
        # Before the first forward pass there is nothing to see.
        seen = bisect_right(film.seconds, now)
        if seen:
            canvas.paste(film.frames[seen - 1], (left, top + CLOCK))
    speed = "at true speed" if slower == 1 else f"{slower} times slower"
    pen.text((10, canvas.height - FOOT + 4), f"Measured one after another, shown together {speed}", FAINT, _font(18))
    return canvas


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
