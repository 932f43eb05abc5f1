"""The network that judges which concept an icon shows, and its verdicts."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from diffusers import ConfigMixin
from diffusers.configuration_utils import register_to_config
from torch import nn

from arimage.models.mixin import ModelMixin

from .words import STYLES, word_tokenizer


# Concepts whose figures are also given alone: those with the most designs in the training set.
COMMON = 300


class Residual(nn.Module):
    """Two convolutions next to a shortcut. A block that changes the width halves the sides."""

    def __init__(self, width: int, out: int):
        super().__init__()
        stride = 1 if width == out else 2
        self.first = nn.Conv2d(width, out, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(out)
        self.second = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(out)
        self.shortcut = nn.Identity()
        if width != out:
            self.shortcut = nn.Sequential(nn.AvgPool2d(2), nn.Conv2d(width, out, 1, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.second_norm(self.second(F.relu(self.first_norm(self.first(x)))))
        return F.relu(found + self.shortcut(x))


class IconJudge(ModelMixin, ConfigMixin):
    """A ResNet (https://arxiv.org/abs/1512.03385) that says which concept an icon shows.

    Args:
        concepts (`list[str]`): their names, those with the most designs first.
        widths (`list[int]`): of the first convolution and of each block.
        dropout (`float`): of the features, in training.
    """

    @register_to_config
    def __init__(
        self, concepts: list[str], widths: tuple[int, ...] = (32, 64, 64, 128, 128, 192), dropout: float = 0.1
    ):
        super().__init__()
        self.stem = nn.Conv2d(1, widths[0], 5, 2, padding=2, bias=False)
        self.stem_norm = nn.BatchNorm2d(widths[0])
        self.blocks = nn.Sequential(*(Residual(*pair) for pair in zip(widths, widths[1:], strict=False)))
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(widths[-1], len(concepts))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Grey pixels [B, 64, 64] from 0 to 255 to logits [B, concepts]."""
        ink = (1 - pixels[:, None] / 255).contiguous(memory_format=torch.channels_last)
        found = self.blocks(F.relu(self.stem_norm(self.stem(ink))))
        return self.head(self.drop(found.mean((2, 3))))


def concepts_of(prompts: Sequence[str], concepts: Sequence[str]) -> list[int]:
    """The number of the concept that each prompt names, with or without words of style before it.

    Raises:
        ValueError: if a prompt names none.
    """
    words = word_tokenizer(concepts).tokenize
    number = {tuple(words(name)): place for place, name in reversed([*enumerate(concepts)])}
    found = []
    for prompt in prompts:
        asked = words(prompt)
        # Words of style come first; some are in names, too.
        while tuple(asked) not in number and asked and asked[0] in STYLES:
            asked = asked[1:]
        if tuple(asked) not in number:
            raise ValueError(f"the prompt {prompt!r} names no icon that the judge knows: use the names of icons")
        found.append(number[tuple(asked)])
    return found


@torch.no_grad()
def verdicts(model: IconJudge, pixels: torch.Tensor, concepts: Sequence[int]) -> torch.Tensor:
    """Whether the five likeliest concepts of pictures [N, 64, 64], from 0 to 255, the likeliest first, are those that
    they should show: bool [N, 5], or fewer if there are fewer concepts."""
    most = min(5, len(model.config.concepts))
    parts = [model(part.to(model.device).float()).topk(most).indices.cpu() for part in pixels.split(256)]
    return torch.cat(parts) == torch.tensor(concepts)[:, None]
