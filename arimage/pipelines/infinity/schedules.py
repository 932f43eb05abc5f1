"""The sizes that Infinity (https://arxiv.org/abs/2412.04431) generates, and the maps of each. No heavy imports."""

from typing import Literal, NamedTuple


PixelClass = Literal["0.06M", "0.25M", "0.60M", "1M"]
Grid = tuple[int, int]

# How many of the 13 maps the images of a pixel class have. No published model was trained at 0.60M.
COUNTS: dict[str, int] = {"0.06M": 7, "0.25M": 10, "0.60M": 12, "1M": 13}
# Rows x columns of all maps. The seven ratios below the first are also there with rows and columns swapped.
_UPRIGHT = (
    "1x1 2x2 4x4 6x6 8x8 12x12 16x16 20x20 24x24 32x32 40x40 48x48 64x64",
    "1x1 2x2 3x3 5x4 10x8 15x12 20x16 25x20 30x24 35x28 45x36 55x44 70x56",
    "1x1 2x2 4x3 8x6 12x9 16x12 20x15 24x18 28x21 36x27 48x36 60x45 72x54",
    "1x1 2x2 3x2 6x4 9x6 15x10 21x14 27x18 33x22 39x26 48x32 63x42 78x52",
    "1x1 2x2 3x3 7x4 11x6 14x8 21x12 28x16 35x20 42x24 56x32 70x40 84x48",
    "1x1 2x2 4x2 6x3 10x5 16x8 22x11 30x15 38x19 46x23 60x30 74x37 90x45",
    "1x1 2x2 5x2 10x4 15x6 20x8 25x10 30x12 40x16 50x20 65x26 80x32 100x40",
    "1x1 2x2 6x2 9x3 15x5 21x7 27x9 36x12 45x15 54x18 72x24 90x30 111x37",
)


class Schedule(NamedTuple):
    """The maps of an image.

    Attributes:
        pixels: the pixel class.
        scales: rows and columns of each map, from coarse to fine.
        whole: the finest map of the largest images of the same ratio, onto which positions are stretched.
    """

    pixels: str
    scales: tuple[Grid, ...]
    whole: Grid


def _ratios() -> list[tuple[Grid, ...]]:
    ratios = []
    for line in _UPRIGHT:
        upright = tuple((int(rows), int(columns)) for rows, columns in (grid.split("x") for grid in line.split()))
        ratios += dict.fromkeys([upright, tuple((columns, rows) for rows, columns in upright)])
    return ratios


# By the finest map. The square is the first of each pixel class.
SCHEDULES = {
    grids[count - 1]: Schedule(pixels, grids[:count], grids[-1])
    for pixels, count in COUNTS.items()
    for grids in _ratios()
}
