"""Where a decoding stands."""

from dataclasses import dataclass, field
from typing import Any

import torch

from .distribution import Sampling
from .interface import ScaleModel, TokenModel


@dataclass
class DecodingState:
    """A batch of B images of N codes, some of them decided.

    Attributes:
        model, sampling, seeds: whom to ask, how to draw, and one seed an image (int64 [B]).
        cache: the model's cache of this call.
        tokens: int64 [B, N]; what is not decided is a draft or zero.
        decided: bool [B, N].
        finished: bool [B].
        forward_passes: passes of the target model over the batch, the prefill included.
        accepted: for every pass, how many codes it decided, int64 [B].
    """

    model: TokenModel | ScaleModel
    sampling: Sampling
    seeds: torch.LongTensor
    cache: Any
    tokens: torch.LongTensor
    decided: torch.BoolTensor
    finished: torch.BoolTensor
    forward_passes: int = 0
    accepted: list[torch.LongTensor] = field(default_factory=list)

    @property
    def max_passes(self) -> int:
        """After so many passes every image is finished."""
        return self.model.num_tokens

    def record(self, accepted: torch.LongTensor) -> None:
        """Count a pass that decided `accepted` [B] codes."""
        self.forward_passes += 1
        self.accepted.append(accepted)
