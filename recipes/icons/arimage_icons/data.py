"""What a packed file holds, on the device that trains."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from arimage import PatchVQModel

from .words import LENGTH, has_sides


def with_styles(caption: str, styles: list[str]) -> str:
    return " ".join([*styles, caption])


@dataclass(frozen=True)
class Icons:
    """Pictures uint8 [N, H, W], the token ids [N, 2, P] of their captions without and with words of style, and whether
    their mirror images show the same."""

    pixels: torch.Tensor
    text: torch.Tensor
    may_mirror: torch.Tensor

    @classmethod
    def of(
        cls, pixels: np.ndarray, captions: list[tuple[str, list[str]]], tokenizer: PreTrainedTokenizerFast, device: str
    ) -> Self:
        both = [text for caption, styles in captions for text in (caption, with_styles(caption, styles))]
        given = {"padding": "max_length", "max_length": LENGTH, "truncation": True, "return_tensors": "pt"}
        ids = tokenizer(both, **given).input_ids.view(-1, 2, LENGTH)
        mirror = torch.tensor([not has_sides(caption) for caption, _ in captions])
        return cls(torch.from_numpy(pixels).to(device), ids.to(device), mirror.to(device))

    def __len__(self) -> int:
        return len(self.pixels)


def load_packed(path: Path) -> tuple[dict[str, np.ndarray], dict[str, list], PatchVQModel]:
    """The pictures and the captions of each split of a file that `arimage_icons.pack` wrote, and its tokenizer."""
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    captions = json.loads(arrays.pop("captions").tobytes())
    codebook = torch.from_numpy(arrays.pop("codebook"))
    vq = PatchVQModel(int(codebook.shape[1] ** 0.5), len(codebook), channels=1)
    vq.codebook.weight.data.copy_(codebook)
    return arrays, captions, vq.eval()
