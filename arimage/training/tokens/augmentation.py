"""Copies of an image that differ at random: shifted, scaled and mirrored."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field

from ...media.texts import as_words
from ...settings.schema import COMPLETE, Flag, Seed, Text, Whole
from ..processes import mixed_seed


Level = Annotated[int, Field(strict=True, ge=0, le=255)]


@dataclass(frozen=True)
class Augmentation:
    """How the copies of an image differ that are encoded in place of the image alone. The first one is the image
    itself. Of the others one in five keeps its place, and half of those that move are also scaled.

    Attributes:
        copies: of each image, itself included.
        shift: most pixels of a shift along each side; whole ones where the copy is not scaled, so that edges stay
            sharp.
        scale: most change of the size, as a share; height and width change by up to a quarter of it more, apart from
            each other.
        mirror: whether half of the copies are mirrored.
        mirror_except: words; an image is not mirrored if one of its captions, or the name of its class, has one.
        padding: what is outside of an image: "edge", its nearest pixels, or a colour (red, green, blue).
    """

    copies: Annotated[int, Field(strict=True, ge=2, le=1000)]
    shift: Whole = 0
    scale: Annotated[float, Field(strict=True, ge=0, lt=1)] = 0.0
    mirror: Flag = False
    mirror_except: tuple[Text, ...] = ()
    padding: Literal["edge"] | tuple[Level, Level, Level] = "edge"
    seed: Seed = 0
    __pydantic_config__ = COMPLETE

    def may_mirror(self, texts: Iterable[str]) -> bool:
        """Whether an image with these captions may be mirrored."""
        words = {word for text in texts for word in as_words(text)}
        return self.mirror and not words & {word.casefold() for word in self.mirror_except}

    def copies_of(self, frames: torch.Tensor, may_mirror: bool, number: int) -> torch.Tensor:
        """The copies uint8 [C, T, 3, H, W] of T frames uint8 [T, 3, H, W], all of which change alike. The same frames
        have the same copies for a `number`."""
        count, (height, width) = self.copies - 1, frames.shape[-2:]
        draw = torch.rand(count, 7, generator=torch.Generator().manual_seed(mixed_seed(self.seed, number)))
        moves, scales = draw[:, 0] < 0.8, draw[:, 1] < 0.5
        shift = (2 * draw[:, 2:4] - 1) * self.shift
        shift = torch.where(scales[:, None] & (self.scale > 0), shift, shift.round()) * moves[:, None]
        both, aspect = 2 * draw[:, 4] - 1, 2 * draw[:, 5] - 1
        size = torch.stack([both + aspect / 4, both - aspect / 4], dim=1) * self.scale
        size = 1 + size * (moves & scales)[:, None]
        mirror = (draw[:, 6] < 0.5) & may_mirror
        theta = torch.zeros(count, 2, 3)
        theta[:, 0, 0] = torch.where(mirror, -1.0, 1.0) / size[:, 0]
        theta[:, 1, 1] = 1 / size[:, 1]
        theta[:, :, 2] = 2 * shift / torch.tensor([width, height])
        outside, mode = torch.zeros(3, 1, 1), "border"
        if self.padding != "edge":
            # What is sampled is the difference from the colour outside.
            outside, mode = torch.tensor(self.padding, dtype=torch.float32)[:, None, None], "zeros"
        planes = (frames.float() - outside).flatten(0, 1).expand(count, -1, -1, -1)
        grid = F.affine_grid(theta, [count, 1, height, width], align_corners=False)
        moved = F.grid_sample(planes, grid, mode="bicubic", padding_mode=mode, align_corners=False)
        changed = (moved.unflatten(1, (-1, 3)) + outside).clamp(0, 255).round().to(torch.uint8)
        return torch.cat([frames[None], changed])
