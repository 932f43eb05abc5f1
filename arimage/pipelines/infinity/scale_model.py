"""An Infinity transformer with the conditions of one call, as a `ScaleModel`."""

from collections.abc import Hashable
from typing import Self

import torch
from torch import nn

from ...models.conditions import Conditions
from ...models.scale_model import GrowingScaleModel
from .schedules import Schedule
from .transformer_infinity import rotary_table


class InfinityScaleModel(GrowingScaleModel):
    """An `InfinityTransformer` with the conditions of one call, as a `ScaleModel` (see
    `arimage.decoding.contract.models`). A bit is a token of a vocabulary of 2; the tokens of a map are its cells row
    by row, bit by bit.

    Args:
        transformer: the `InfinityTransformer`, or what `torch.compile` made of it. Every forward pass calls it.
        vq: the `InfinityVQModel` that adds up the maps.
        condition: arguments of `InfinityTransformer.embed_condition`, one row per image; under guidance followed by
            the rows without it.
        schedule: the maps of the images.
        guided: whether `condition` has both kinds of rows.
        mixed_layer: the layer after which hidden states are guided in place of logits.
        guidance: the guidance scale of each map, for `mixed_layer`.
    """

    # No later scale reads it.
    keeps_last = False

    def __init__(
        self,
        transformer: nn.Module,
        vq: nn.Module,
        condition: dict[str, torch.Tensor],
        schedule: Schedule,
        *,
        guided: bool = False,
        mixed_layer: int | None = None,
        guidance: tuple[float, ...] = (),
    ):
        per_cell = [transformer.config.bits] * len(schedule.scales)
        conditions = Conditions(condition, 1 + guided)
        rotary = rotary_table(schedule, transformer.head_dim, conditions.seen.device)
        super().__init__(vq, transformer, conditions, schedule.scales, per_cell, rotary=rotary)
        self.schedule, self._mixed_layer, self._numbers = schedule, mixed_layer, guidance
        self._guidance = torch.tensor(guidance, device=self.device, dtype=torch.float32)

    @property
    def put_key(self) -> Hashable:
        return super().put_key, self.schedule, self._mixed_layer

    def take(self, images: torch.LongTensor) -> Self:
        other = super().take(images)
        other._guidance = self._guidance.clone()
        return other

    def put(self, images: torch.LongTensor, other: Self) -> bool:
        self._numbers = other._numbers
        self._guidance.copy_(other._guidance)
        return super().put(images, other)

    def mix(self, scale: int, branches: int) -> tuple[int, float | torch.Tensor] | None:
        if self._mixed_layer is None or branches == 1:
            return None
        # A compiled or captured step serves images with other guidance too.
        eager = self.device.type == "cpu" and not torch.compiler.is_compiling()
        return self._mixed_layer, (self._numbers if eager else self._guidance)[scale]

    def vectors(self, scale: int, tokens: torch.LongTensor) -> torch.Tensor:
        """See `ScaleModel.vectors`."""
        rows, columns = self.schedule.scales[scale]
        return self.vq.vectors(tokens.unflatten(1, (rows, columns, -1)))

    def accumulate(self, scale: int, latents: torch.Tensor | None, added: torch.Tensor) -> torch.Tensor:
        """See `ScaleModel.accumulate`."""
        if latents is None:
            latents = self.vq.empty_latents(len(added), self.schedule.scales[-1], added.device)
        return self.vq.accumulate(latents, added)
