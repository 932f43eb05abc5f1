"""The sizes that InfinityStar (https://arxiv.org/abs/2511.04675) generates, and the passes of a film. No heavy
imports."""

from typing import Literal, NamedTuple


PixelClass = Literal["0.06M", "0.25M", "0.40M", "0.90M"]
Grid = tuple[int, int]

# How many of the 15 grids the films of a pixel class have. The published models are those of 0.40M (480p) and 0.90M
# (720p).
COUNTS: dict[str, int] = {"0.06M": 11, "0.25M": 13, "0.40M": 14, "0.90M": 15}
# The sides of the square grids, and the ratios of height to width that the others have, the default first. Upright
# ones are swapped.
_SIDES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 40, 60)
_RATIOS = (9 / 16, 1.0, 100 / 116, 3 / 4, 2 / 3, 1 / 2, 2 / 5, 1 / 3)
# Latent frames per second, and of a clip after the first frame.
PER_SECOND, PER_CLIP = 4, 20
# Of the published models: how many passes there are over each of the last grids of a clip; three over all others.
_LAST_REPETITIONS = {"0.40M": (2, 1), "0.90M": (2, 1, 1)}


class Repetitions(NamedTuple):
    """What a model was trained with: how many of its grids have few bits, and how many passes there are over each grid
    of the first frame and of a clip."""

    semantic_scales: int
    image_scale_repetition: tuple[int, ...]
    video_scale_repetition: tuple[int, ...]


def repetitions_of(
    pixels: str,
    semantic_scales: int | None = None,
    image_scale_repetition: tuple[int, ...] | None = None,
    video_scale_repetition: tuple[int, ...] | None = None,
) -> Repetitions:
    """The given numbers; None are those of the published model of a pixel class.

    Raises:
        ValueError: if none was published and a number is missing, or there is not one repetition per grid.
    """
    count = COUNTS[pixels]
    if pixels in _LAST_REPETITIONS:
        last = _LAST_REPETITIONS[pixels]
        semantic_scales = count - 3 if semantic_scales is None else semantic_scales
        image_scale_repetition = image_scale_repetition or (3,) * count
        video_scale_repetition = video_scale_repetition or (3,) * (count - len(last)) + last
    if semantic_scales is None or image_scale_repetition is None or video_scale_repetition is None:
        raise ValueError(
            f"no model of {pixels} pixels is published: give semantic_scales, image_scale_repetition and "
            "video_scale_repetition"
        )
    for name, repetition in (("image", image_scale_repetition), ("video", video_scale_repetition)):
        if len(repetition) != count:
            raise ValueError(
                f"{name}_scale_repetition holds {len(repetition)} numbers: give one for each of the {count} grids of "
                f"{pixels} pixels"
            )
    return Repetitions(semantic_scales, tuple(image_scale_repetition), tuple(video_scale_repetition))


class Pass(NamedTuple):
    """One forward pass over a clip.

    Attributes:
        clip: 0 for the first frame, which is an image, then 1, 2.
        grid: which of the grids it has, from coarse to fine.
        first: the first of its latent frames.
        shape: its latent frames, rows and columns.
        bits: of each cell.
        coarse: whether its grid is one of those with few bits.
        last: whether it is the last of its clip, which the next clip reads.
    """

    clip: int
    grid: int
    first: int
    shape: tuple[int, int, int]
    bits: int
    coarse: bool
    last: bool


def _ratios() -> list[tuple[Grid, ...]]:
    ratios = []
    for ratio in _RATIOS:
        wide = tuple((round(side * ratio**0.5), round(side / ratio**0.5)) for side in _SIDES)
        ratios += dict.fromkeys([wide, tuple((columns, rows) for rows, columns in wide)])
    return ratios


# The grids (rows, columns) of a size, by pixel class and the finest of them. The default is the first of each class.
SCHEDULES: dict[tuple[str, Grid], tuple[Grid, ...]] = {
    (pixels, grids[count - 1]): grids[:count] for pixels, count in COUNTS.items() for grids in _ratios()
}


def clip_lengths(latent_frames: int) -> list[int]:
    """The latent frames of each clip of a film: 1, then up to 20 each.

    Raises:
        ValueError: if they are neither the first frame alone, nor whole seconds up to one clip, nor whole clips.
    """
    rest = latent_frames - 1
    if rest < 0 or rest % (PER_SECOND if rest <= PER_CLIP else PER_CLIP):
        raise ValueError(
            f"a film has {latent_frames} latent frames: give 1, 1 and whole seconds of {PER_SECOND} up to {PER_CLIP}, "
            f"or 1 and a multiple of {PER_CLIP}"
        )
    return [1] + ([rest] if 0 < rest <= PER_CLIP else [PER_CLIP] * (rest // PER_CLIP))


def passes(
    grids: tuple[Grid, ...],
    latent_frames: int,
    bits: tuple[int, int],
    repetitions: Repetitions,
) -> tuple[Pass, ...]:
    """All passes of a film, in order.

    Args:
        grids: see `SCHEDULES`.
        latent_frames: of the film.
        bits: of a cell of coarse grids, and of the others.
    """
    found: list[Pass] = []
    first = 0
    for clip, frames in enumerate(clip_lengths(latent_frames)):
        counts = repetitions.video_scale_repetition if clip else repetitions.image_scale_repetition
        for grid, (size, count) in enumerate(zip(grids, counts, strict=True)):
            coarse = grid < repetitions.semantic_scales
            own = Pass(clip, grid, first, (frames, *size), bits[not coarse], coarse, last=False)
            found += [own] * count
        found[-1] = found[-1]._replace(last=True)
        first += frames
    return tuple(found)
