"""What pipelines share whose images are maps of tokens, from coarse to fine."""

import itertools
from typing import Any

import torch
import torch.nn.functional as F

from ..call import GenerationCall


class ImageMaps:
    """A part of pipelines whose `encode_image` and `whole_tokens` return one map per scale, [B, h, w, ...]."""

    encode_image: Any
    whole_tokens: Any
    _execution_device: torch.device

    # With `more_smooth`, the latents are not those of the tokens.
    decoded_tensor = "latents"
    _callback_tensor_inputs = ["tokens", "decided", "work", "latents"]

    def encode_known_tokens(self, pixels: torch.Tensor, repaint: torch.BoolTensor) -> torch.LongTensor:
        """The tokens [B, N] of images [B, 3, H, W] in [-1, 1], but -1 where `repaint` [B, 1, H, W] asks to generate
        them, by the rule of VAR's authors: see `mask_image`."""
        maps = self.encode_image(pixels)
        # A cell of the finest scale is generated if any of its pixels is.
        stays = 1 - F.max_pool2d(repaint.float(), repaint.shape[-1] // maps[-1].shape[2])
        tokens = []
        for part in maps:
            keeps = F.interpolate(stays, size=part.shape[1:3], mode="bilinear")[:, 0] > 0.5
            keeps = keeps.view(*keeps.shape, *[1] * (part.ndim - 3))
            tokens.append(part if part.shape[1:3] == (1, 1) else torch.where(keeps, part, -1))
        return torch.cat([part.flatten(1) for part in tokens], dim=1)

    def decided_maps(self, call: GenerationCall, tokens: torch.LongTensor) -> list[torch.LongTensor]:
        """The maps of tokens [B, N] of a call up to the first that has one of -1, not known yet."""
        maps = self.whole_tokens(call, tokens.to(self._execution_device))
        return list(itertools.takewhile(lambda part: bool((part >= 0).all()), maps))
