"""An Infinity transformer with the conditions of one call, as a `ScaleModel`."""

from collections.abc import Hashable, Mapping, Sequence
from typing import ClassVar, Literal, Self

import torch
from torch import nn

from ...models.bound import BoundScaleModel
from ...models.cache import GrowingCache
from ...models.conditions import Conditions, spread
from ...models.modulated_blocks import block_causal_mask, levels_of
from ...models.pruning import fed_cells, pruning_of
from .schedules import Schedule
from .transformer_infinity import rotary_table


class InfinityScaleModel(BoundScaleModel):
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

    guidance_schedule: ClassVar[Literal["linear", "constant"]] = "constant"
    refiner = None
    vocab_size = 2

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
        super().__init__(transformer, Conditions(condition, 1 + guided))
        self.transformer, self.vq, self.schedule = transformer, vq, schedule
        self.scales: tuple[tuple[int, ...], ...] = schedule.scales
        self.cells = tuple(rows * columns for rows, columns in schedule.scales)
        self.scale_sizes: tuple[int, ...] = tuple(count * transformer.config.bits for count in self.cells)
        self.num_tokens = sum(self.scale_sizes)
        self._mixed_layer, self._numbers = mixed_layer, guidance
        self._guidance = torch.tensor(guidance, device=self.device, dtype=torch.float32)
        self._levels = levels_of(self.cells, self.device)
        self._rotary = rotary_table(schedule, transformer.head_dim, self.device)

    @property
    def put_key(self) -> Hashable:
        """See `ScaleModel.put`."""
        return super().put_key, self.schedule, self._mixed_layer

    def take(self, images: torch.LongTensor) -> Self:
        """See `ScaleModel.take`."""
        other = super().take(images)
        other._guidance = self._guidance.clone()
        return other

    def put(self, images: torch.LongTensor, other: Self) -> bool:
        """See `ScaleModel.put`."""
        self._numbers = other._numbers
        self._guidance.copy_(other._guidance)
        return super().put(images, other)

    def _fed(self, scale: int) -> slice:
        first = sum(self.cells[:scale])
        return slice(first, first + self.cells[scale])

    def _mix(self, scale: int, branches: int) -> tuple[int, float | torch.Tensor] | None:
        if self._mixed_layer is None or branches == 1:
            return None
        # A compiled or captured step serves images with other guidance too.
        eager = self.device.type == "cpu" and not torch.compiler.is_compiling()
        return self._mixed_layer, (self._numbers if eager else self._guidance)[scale]

    def _inputs(self, scale: int, latents: torch.Tensor, branches: int) -> torch.Tensor:
        return self.vq.scale_input(self.schedule.scales[scale], latents).repeat(branches, 1, 1)

    def prefill(
        self, batch_size: int, latents: Sequence[torch.Tensor] = (), *, pruned: Mapping[int, float] | None = None
    ) -> tuple[GrowingCache, torch.FloatTensor]:
        """A cache with the condition and the scales 0 .. len(latents) in it, and the logits [G, B, n, 2] of the last
        of them; see `ScaleModel.prefill`."""
        config, scale = self.transformer.config, len(latents)
        # With latents, images of equal conditions differ; so do the halves of rows that are mixed.
        mix = self._mix(scale, self.branches)
        fed = self._fed(scale)
        cache, condition, copies = self.open_prefill(
            GrowingCache,
            batch_size,
            config.num_layers,
            config.num_attention_heads,
            # No later scale reads the last one.
            slots=sum(fed_cells(self.cells, pruned)[:-1]),
            filled=fed.stop,
            shared=not latents and mix is None,
        )
        levels, inputs = self._levels[: fed.stop], None
        if latents:
            inputs = torch.cat([self._inputs(k, latent, self.branches) for k, latent in enumerate(latents, 1)], dim=1)
        logits = self.transformer(
            inputs,
            levels=levels,
            rotary=self._rotary[: fed.stop],
            mask=block_causal_mask(levels, None) if latents else None,
            condition=condition,
            cache=cache,
            first_query=fed.start,
            mix=mix,
        )
        if mix is None:
            (logits,) = spread(cache, copies, logits)
        if pruned:
            # The residual stream is in float32.
            cache.prune(fed_cells(self.cells, pruned), min(pruned) - 1, config.hidden_size, torch.float32)
        return cache, logits.flatten(1, 2).unflatten(0, (-1, batch_size))

    def forward(
        self, scale: int, latents: torch.Tensor, cache: GrowingCache, *, guided: bool = True
    ) -> torch.FloatTensor:
        """Logits [G, B, n, 2] of `scale`; see `ScaleModel.forward`."""
        fed, branches = self._fed(scale), self.branches if guided else 1
        logits = self.transformer(
            self._inputs(scale, latents, branches),
            levels=self._levels[fed],
            rotary=self._rotary[fed],
            cache=cache,
            first=fed.start,
            mix=self._mix(scale, branches),
            pruning=pruning_of(scale, cache, self.scales),
        )
        return logits.flatten(1, 2).unflatten(0, (-1, len(latents)))

    def vectors(self, scale: int, tokens: torch.LongTensor) -> torch.Tensor:
        """See `ScaleModel.vectors`."""
        rows, columns = self.schedule.scales[scale]
        return self.vq.vectors(tokens.unflatten(1, (rows, columns, -1)))

    def accumulate(self, scale: int, latents: torch.Tensor | None, added: torch.Tensor) -> torch.Tensor:
        """See `ScaleModel.accumulate`."""
        if latents is None:
            latents = self.vq.empty_latents(len(added), self.schedule.scales[-1], added.device)
        return self.vq.accumulate(latents, added)
