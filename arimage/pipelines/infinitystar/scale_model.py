"""An InfinityStar transformer with the conditions of one call, as a `ScaleModel`."""

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Self

import torch
from torch import nn

from ...models.conditions import Conditions
from ...models.pruning import pruning_of
from ...models.scale_model import BoundScaleModel
from .cache import ClipCache
from .guidance import projected_guidance
from .pyramid import bit_vectors, enlarge, frames_of, reduce
from .schedules import Grid, Pass
from .transformer_infinitystar import cell_positions, text_positions


class InfinityStarScaleModel(BoundScaleModel):
    """An `InfinityStarTransformer` with the conditions of one call, as a `ScaleModel` (see
    `arimage.decoding.contract.models`). Scales are passes, and a bit is a token of a vocabulary of 2; the tokens of
    one pass are its cells frame by frame and row by row, bit by bit.

    Of given passes, only those are fed that later clips read.

    Args:
        transformer: the `InfinityStarTransformer`, or what `torch.compile` made of it. Every forward pass calls it.
        condition: `prompt_embeds` [rows, P, D], right-padded, `prompt_attention_mask` [rows, P] and `unconditional`
            [rows], one row per film; under guidance followed by the rows without it.
        film: all passes of the films.
        finest: the finest grid.
        guided: whether `condition` has both kinds of rows.
        padded: whether some of its rows have padding.
        threshold: see `projected_guidance`; None guides as `Sampling` does.
        given: the number of passes whose bits are given.
        start: the sum of the given passes that are not fed, float32 [B, C, T, H, W]; None without given passes.
    """

    def __init__(
        self,
        transformer: nn.Module,
        condition: dict[str, torch.Tensor],
        film: Sequence[Pass],
        finest: Grid,
        *,
        guided: bool = False,
        padded: bool = False,
        threshold: float | None = None,
        given: int = 0,
        start: torch.Tensor | None = None,
    ):
        self.film, self.fed = tuple(film), fed_passes(film, given)
        own = [film[number] for number in self.fed]
        conditions = Conditions(condition, 1 + guided, condition["prompt_attention_mask"].bool())
        super().__init__(transformer, conditions, [one.shape for one in own], [one.bits for one in own])
        self._finest, self._threshold, self._start, self._padded = finest, threshold, start, padded
        self.last_clip = next(scale for scale, one in enumerate(own) if one.clip == own[-1].clip)
        # The cells of each clip that the next one reads.
        self._kept = [math.prod(one.shape) for one in film if one.last][:-1]

    @property
    def put_key(self) -> Hashable:
        return super().put_key, self.film, self.fed, self._threshold, self._padded

    @property
    def costs(self) -> tuple[float, ...]:
        """See `ScaleModel`; products and sums of the layers for one film, per layer."""
        config = self.transformer.config
        width, keys = config.hidden_size, config.num_key_value_heads * self.transformer.head_dim
        per_cell = 2 * width * (width + keys) + 3 * width * config.intermediate_size
        seen = [self._seen(self.film[number]) for number in self.fed]
        return tuple(
            count * (per_cell + 2 * width * (others + count)) for count, others in zip(self.cells, seen, strict=True)
        )

    def _seen(self, one: Pass) -> int:
        """How many keys the cells of one pass see besides their own: the text, and the last pass over the clip
        before."""
        return self.conditions.prefix_length + (self._kept[one.clip - 1] if one.clip else 0)

    def take(self, images: torch.LongTensor) -> Self:
        other = super().take(images)
        if self._start is not None:
            other._start = self._start[images]
        return other

    def put(self, images: torch.LongTensor, other: Self) -> bool:
        if self._start is not None:
            self._start.index_copy_(0, images, other._start)
        return super().put(images, other)

    def prefill(
        self, batch_size: int, latents: Sequence[torch.Tensor] = (), *, pruned: Mapping[int, float] | None = None
    ) -> tuple[ClipCache, torch.FloatTensor]:
        """A cache with the text and the scales 0 .. len(latents) in it, and the logits [G, B, n, 2] of the last of
        them; see `ScaleModel.prefill`. Every scale is fed by a forward pass of its own."""
        cache, condition, copies = self.open_prefill(ClipCache, batch_size, slots=max(self._kept, default=0))
        seen, count = condition["prompt_attention_mask"].bool(), self.conditions.prefix_length
        cache.write_next_at(0, 0, count)
        self.transformer(
            condition["prompt_embeds"],
            text_positions(count, self.device),
            cache,
            text=True,
            unconditional=condition.get("unconditional"),
            seen=seen if self._padded else None,
        )
        if len(seen) < len(copies):
            cache.take_rows(torch.tensor(copies, device=self.device))
        self.prune(cache, pruned, self.transformer.dtype)
        before = [self._begin(batch_size), *latents]
        logits = [self.forward(scale, latent, cache) for scale, latent in enumerate(before)]
        return cache, logits[-1]

    def forward(
        self, scale: int, latents: torch.Tensor, cache: ClipCache, *, guided: bool = True
    ) -> torch.FloatTensor:
        """Logits [G, B, n, 2] of `scale`; see `ScaleModel.forward`."""
        number, branches = self.fed[scale], self.branches if guided else 1
        one = self.film[number]
        inputs = reduce(frames_of(one, latents), one.shape[1:]).movedim(1, -1).flatten(1, 3).repeat(branches, 1, 1)
        text, seen = self.conditions.prefix_length, self._seen(one)
        pruning = pruning_of(scale, cache, self.scales)
        own = self.cells[scale] if pruning is None or pruning.kept is None else pruning.kept
        cache.write_next_at(text if one.last and one.clip < self.film[-1].clip else None, seen, own)
        visible = self.conditions.seen[: len(inputs)] if self._padded else None
        positions = cell_positions(number, one, self._finest, self.device)
        logits = self.transformer(inputs, positions, cache, coarse=one.coarse, seen=visible, pruning=pruning)
        return logits.flatten(1, 2).unflatten(0, (-1, len(latents)))

    def guide(
        self, logits: torch.Tensor, guidance_scale: float | torch.Tensor, temperature: float | torch.Tensor
    ) -> torch.Tensor | None:
        if self._threshold is None or len(logits) == 1:
            return None
        return projected_guidance(logits, guidance_scale, temperature, self._threshold)

    def vectors(self, scale: int, tokens: torch.LongTensor) -> torch.Tensor:
        """See `ScaleModel.vectors`; at the size of latents, [B, C, t, H, W]."""
        bits = tokens.unflatten(1, (*self.scales[scale], -1))
        return enlarge(bit_vectors(bits), (self.transformer.config.latent_channels, *self._finest))

    def accumulate(self, scale: int, latents: torch.Tensor | None, added: torch.Tensor) -> torch.Tensor:
        """See `ScaleModel.accumulate`. Latents are those of the whole film."""
        latents = self._begin(len(added)) if latents is None else latents.clone()
        frames_of(self.film[self.fed[scale]], latents).add_(added)
        return latents

    def _begin(self, count: int) -> torch.FloatTensor:
        return self.empty(count) if self._start is None else self._start.clone()

    def empty(self, count: int) -> torch.FloatTensor:
        """The latents [count, C, T, H, W] of films before the first pass."""
        last = self.film[-1]
        shape = self.transformer.config.latent_channels, last.first + last.shape[0], *self._finest
        return torch.zeros(count, *shape, dtype=torch.float32, device=self.device)


def fed_passes(film: Sequence[Pass], given: int) -> tuple[int, ...]:
    """The passes that are fed if the first ones are `given`: of these the last over each clip, which the next clip
    reads, and all others."""
    return tuple(number for number, one in enumerate(film) if number >= given or one.last)
