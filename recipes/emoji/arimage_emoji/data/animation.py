"""Clips of moving emoji, made from the sprites of a data set, with captions that say how they move."""

import hashlib
import math
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field

from arimage.settings.schema import COMPLETE, Count, Seed

from ..known import KnownCaptions
from ..metrics.motions import CAST, COMBINATIONS, phrases
from ..training.captioned import ImageCaptions
from ..training.sentences import with_article
from .scenes import GROUNDS, on_ground
from .wording import plain_words


# Every so many pairs of an object and its motions, one is held out.
HELD_OUT = 10
# The size of a sprite as a share of the frame, its least and greatest, and how far it moves from the centre, where 1
# is the border.
SIZE, LEAST, GREATEST, REACH = 0.6, 0.35, 0.75, 0.37
# More words for what videos are asked for.
WORDS = {"slightly smiling face": "face"}


@dataclass(frozen=True)
class ClipSettings:
    """`frames` of every clip; each object in each of its motions is one clip on white, and `grounds` clips in a
    hundred more on coloured backgrounds. Of the held-out clips one in `heldout_stride` is measured."""

    frames: Annotated[int, Field(strict=True, ge=2, le=100)] = 8
    grounds: Annotated[int, Field(strict=True, ge=0, le=100)] = 15
    heldout_stride: Count = 4
    seed: Seed = 0
    __pydantic_config__ = COMPLETE


def poses(motions: tuple[str, ...], frames: int) -> torch.Tensor:
    """Where a sprite is in each frame [frames, 4]: right and down from the centre, where 1 is the border, its size as
    a share of the frame, and its angle clockwise in radians."""
    place = torch.tensor([0.0, 0.0, SIZE, 0.0]).repeat(frames, 1)
    time = torch.linspace(0, 1, frames)
    moved = {
        "right": (0, REACH * (2 * time - 1)),
        "left": (0, REACH * (1 - 2 * time)),
        "up": (1, REACH * (1 - 2 * time)),
        "down": (1, REACH * (2 * time - 1)),
        "growing": (2, LEAST + (GREATEST - LEAST) * time),
        "shrinking": (2, GREATEST + (LEAST - GREATEST) * time),
        # Once around, so that the last frame leads to the first.
        "spinning": (3, 2 * math.pi * torch.arange(frames) / frames),
        "bouncing": (1, REACH * (1 - 2 * (2 * math.pi * torch.arange(frames) / frames).sin().abs())),
    }
    for motion in motions:
        axis, values = moved[motion]
        place[:, axis] = values
    return place


def animate(image: torch.Tensor, alpha: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A sprite uint8 [3, S, S] on white and its alpha [1, S, S] at each of the `poses` [T, 4]: frames [T, 3, S, S] on
    white, and their alphas [T, 1, S, S]."""
    right, down, size, angle = places.unbind(1)
    cos, sin = angle.cos() / size, angle.sin() / size
    # From places in the frame to places in the sprite.
    matrix = torch.stack([cos, sin, -sin, cos], dim=1).view(-1, 2, 2)
    shift = -matrix @ torch.stack([right, down], dim=1)[..., None]
    side = image.shape[-1]
    # Twice as large, then averaged, so that small sprites have smooth edges.
    grid = F.affine_grid(torch.cat([matrix, shift], dim=2), [len(places), 4, 2 * side, 2 * side], align_corners=False)
    ink = torch.cat([255 - image, alpha]).float().expand(len(places), -1, -1, -1)
    ink = F.avg_pool2d(F.grid_sample(ink, grid, align_corners=False), 2).round().clamp(0, 255).byte()
    return 255 - ink[:, :3], ink[:, 3:]


def is_held_out(name: str, motions: tuple[str, ...]) -> bool:
    """Whether clips of this emoji with these motions are held out."""
    digest = hashlib.sha1(f"{name}: {'+'.join(motions)}".encode()).hexdigest()
    return int(digest, 16) % HELD_OUT == 0


def make_clips(data: ImageCaptions, settings: ClipSettings, *, held_out: bool = False) -> ImageCaptions:
    """Clips of the objects of `CAST` in `data`, with `images` [M, T, 3, S, S] and `alpha` [M, T, 1, S, S]: those that
    are held out, on white, or the others. The same for the same arguments.

    Raises:
        ValueError: if `data` has none of them.
    """
    generator = torch.Generator().manual_seed(settings.seed)
    known = [i for i, name in enumerate(data.names) if name in CAST]
    if not known:
        raise ValueError(
            "the training set has none of the objects that clips are made of: give one with emoji by name"
        )
    pairs = [
        (i, motions) for i in known for motions in COMBINATIONS if is_held_out(data.names[i], motions) == held_out
    ]
    images, alphas, captions, names = [], [], [], []
    for i, motions in pairs[:: settings.heldout_stride if held_out else 1]:
        frames, alpha = animate(data.images[i], data.alpha[i], poses(motions, settings.frames))
        grounds: list[str | None] = [None]
        if not held_out and int(torch.randint(100, (), generator=generator)) < settings.grounds:
            grounds.append(list(GROUNDS)[int(torch.randint(len(GROUNDS), (), generator=generator))])
        for ground in grounds:
            images.append(frames if ground is None else on_ground(frames, alpha, ground))
            alphas.append(alpha)
            captions.append(captions_of_clip(data.names[i], motions, ground))
            names.append(data.names[i])
    return ImageCaptions(
        images=torch.stack(images),
        alpha=torch.stack(alphas),
        captions=captions,
        names=names,
        bases=names,
        weights=torch.ones(len(names)),
    )


def words_of(name: str) -> list[str]:
    """What people call an object, without articles."""
    return list(dict.fromkeys((name, *plain_words(name), WORDS.get(name, name))))


def captions_of_clip(name: str, motions: tuple[str, ...], ground: str | None) -> list[str]:
    """Captions of one clip, the plainest first."""
    on = "" if ground is None else f" on {with_article(ground)} background"
    things = [text + on for word in words_of(name) for text in dict.fromkeys((with_article(word), word))]
    said = phrases(motions)
    plainest = f"{with_article(plain_words(name)[0])}{on}, {said[0]}"
    return [plainest, *(f"{thing}{comma} {words}" for thing in things for words in said for comma in (",", ""))]


def known_clips(clips: ImageCaptions) -> KnownCaptions:
    """What a model knows that was trained on `clips`."""
    words = {"motion": [text for motions in COMBINATIONS for text in phrases(motions)], "ground": list(GROUNDS)}
    pictures = {name: [word for word in words_of(name) if word != name] for name in dict.fromkeys(clips.names)}
    patterns = ["{picture}, {motion}", "{picture} on a {ground} background, {motion}"]
    return KnownCaptions(pictures, words, patterns)
