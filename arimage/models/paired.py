"""Token models whose tokens, and queries for the tokens of other places, go through the same layers in one forward
pass."""

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import nn

from .bound import PrefixModel
from .cache import SlotCache
from .conditions import check_image


class PairedCache(SlotCache):
    """A `SlotCache` with two entries per slot: 2 s for the token of rank s, and 2 s + 1 for the query of rank s + 1.
    The entries of an image hold the sequence x_0, q_1, x_1, q_2, ..., and q_0 belongs to the prompt."""

    def lay_out(self, prompt: int, slots: int, scratch: int, owners: torch.LongTensor) -> None:
        super().lay_out(prompt, 2 * slots, 2 * scratch, owners)
        self.attended_slots = slots

    @property
    def attended_slots(self) -> int:
        """How many entries of the image forward passes attend to. Set it to a number of slots."""
        return self._attended_slots

    @attended_slots.setter
    def attended_slots(self, slots: int) -> None:
        self._attended_slots = 2 * slots

    def move(self, source: torch.LongTensor, target: torch.LongTensor) -> None:
        super().move(both_entries(source), both_entries(target))


def both_entries(slots: torch.LongTensor) -> torch.LongTensor:
    """The entries [B, 2 Q] of slots [B, Q] in a `PairedCache`: tokens first, then queries. -1 stays nowhere."""
    return torch.cat([torch.where(slots < 0, -1, 2 * slots + query) for query in (0, 1)], dim=1)


class PairedModel(PrefixModel):
    """Base of the `GroupModel`s (see `arimage.decoding.contract.models`) whose transformer takes tokens, then queries.

    The transformer is called with a prefix or tokens, with `at` and `query_at` from `encode`, and with one mask for
    tokens and queries. It returns the logits of the queries.

    Args:
        transformer, condition, layout, settings: see `PrefixModel`. The layout is (rows, columns) in any order.

    Raises:
        ValueError: if the layout has three dimensions.
    """

    kind: ClassVar[Literal["tokens"]] = "tokens"
    predicts_groups = True

    # Whether later tokens see the queries before them.
    keeps_queries: bool

    def __init__(self, transformer: nn.Module, condition: dict[str, torch.Tensor], layout, **settings):
        check_image(layout, type(transformer).__name__)
        super().__init__(transformer, condition, layout, **settings)
        self.conditions.seen = F.pad(self.conditions.seen, (0, 1), value=self.keeps_queries)

    def encode(self, ranks: torch.LongTensor) -> torch.Tensor:
        """The places of ranks [B, Q] as the transformer takes them, [B, Q, ...]."""
        raise NotImplementedError

    def prefill(
        self, batch_size: int, scratch: int = 0, given: torch.LongTensor | None = None
    ) -> tuple[PairedCache, torch.FloatTensor]:
        """A cache with the condition and the tokens `given`, and the logits [G, B, V] of the rank after them;
        see `TokenModel.prefill`."""
        if given is None:
            cache, logits = self.prefill_group(batch_size, 1, scratch)
            return cache, logits[:, :, 0]
        cache, condition = self._open(batch_size, scratch, given.shape[1])
        (rows, length), count = self.conditions.seen.shape, given.shape[1]
        ranks = torch.arange(count + 1, device=self.device).expand(batch_size, -1)
        slots = torch.where(given < 0, -1, ranks[:, :-1])
        prefix = torch.arange(cache.prefix_end - length, cache.prefix_end, device=self.device).expand(rows, -1)
        fed = cache.index(both_entries(slots))
        # The first query, which belongs to the prefix, comes after the tokens.
        cache.write_next_at(torch.cat([prefix[:, :-1], fed[:, :count], prefix[:, -1:], fed[:, count:]], dim=1))
        seen = self._keys(cache, both_entries(slots), self._seen_by(cache, slots))
        own = torch.ones(length, length, dtype=torch.bool, device=self.device).tril()
        own = F.pad(own, (cache.prefix_end - length, seen.shape[-1] - cache.prefix_end)).expand(rows, -1, -1)
        logits = self.transformer(
            given.repeat(self.branches, 1),
            at=self._per_row(self.encode(ranks[:, :-1])),
            query_at=self._per_row(self.encode(ranks)),
            mask=torch.cat([own[:, :-1], seen[:, :count], own[:, -1:], seen[:, count:]], dim=1),
            condition=condition,
            cache=cache,
        )
        index = (given >= 0).sum(1)
        return cache, logits.unflatten(0, (self.branches, -1))[:, torch.arange(batch_size, device=self.device), index]

    def prefill_group(self, batch_size: int, count: int, scratch: int = 0) -> tuple[PairedCache, torch.FloatTensor]:
        """See `GroupModel.prefill_group`."""
        device = self.device
        cache, condition = self._open(batch_size, scratch, count - 1)
        rows, length = self.conditions.seen.shape
        index = torch.arange(cache.prefix_end - length, cache.prefix_end, device=device).expand(rows, -1)
        # The queries after the first, which belongs to the prefix.
        slots = torch.arange(count - 1, device=device).expand(batch_size, -1)
        later = 2 * slots + 1
        cache.write_next_at(torch.cat([index, cache.index(later)], dim=1))
        entry = torch.arange(cache.slots + cache.scratch, device=device)
        group = (entry % 2 == 1) & (entry < 2 * count - 2)
        seen = group.repeat(batch_size, length + count - 1, 1)
        seen[:, : length - 1] = False
        if self.keeps_queries:
            # A query sees the queries before it, of which the first is in the prefix.
            seen &= entry <= F.pad(later, (length, 0), value=-1)[..., None]
        image = cache.seen(F.pad(later, (length, 0)), seen).repeat(self.branches, 1, 1)
        own = torch.ones(length + count - 1, length, dtype=torch.bool, device=device).tril()
        prefix = F.pad(own, (cache.prefix_end - length, 0)).expand(rows, -1, -1)
        ranks = torch.arange(count, device=device).expand(batch_size, -1)
        logits = self.transformer(
            query_at=self._per_row(self.encode(ranks)),
            mask=torch.cat([prefix, image], dim=-1),
            condition=condition,
            cache=cache,
        )
        return cache, logits.unflatten(0, (self.branches, -1))

    def forward(
        self,
        tokens: torch.LongTensor,
        positions: torch.LongTensor,
        cache: PairedCache,
        *,
        visible: torch.BoolTensor | None = None,
        slots: torch.LongTensor | None = None,
    ) -> torch.FloatTensor:
        """Logits [G, B, Q, V] of the ranks after `positions`; see `TokenModel.forward`."""
        at_slots = positions if slots is None else torch.where(positions < 0, -1, slots)
        # Tokens and queries that stay see everything up to their own entries.
        seen = None if self.keeps_queries and visible is None else self._seen_by(cache, at_slots, visible)
        # Padding reads rank 0, and the last rank asks for itself.
        ranks = positions.clamp(min=0)
        return self._run(
            tokens, ranks, (ranks + 1).clamp(max=self.num_tokens - 1), both_entries(at_slots), seen, cache
        )

    def _open(self, batch_size: int, scratch: int, filled: int) -> tuple[PairedCache, dict[str, torch.Tensor]]:
        """An empty cache and the conditions of its rows; see `open_prefill`."""
        # Images of one prompt have prefixes of their own, which end with the first query of an image's order.
        return self.open_prefill(PairedCache, batch_size, shared=False, scratch=scratch, filled=filled)[:2]

    def _seen_by(
        self, cache: PairedCache, slots: torch.LongTensor, visible: torch.BoolTensor | None = None
    ) -> torch.BoolTensor:
        """The entries that the tokens at `slots` [B, Q], -1 = nowhere, and the queries after them see, bool
        [B, 2 Q, entries]; see `TokenModel.forward`."""
        entry = torch.arange(cache.slots + cache.scratch, device=self.device)
        if visible is None:
            known = entry // 2 <= slots[..., None]
        else:
            known = visible.repeat_interleave(2, dim=-1)
        asks, own = entry % 2 == 1, entry == 2 * slots[..., None] + 1
        if self.keeps_queries:
            return torch.cat([known & ~own, known], dim=1)
        return torch.cat([known & ~asks, known & ~asks | own], dim=1)

    def forward_group(
        self, tokens: torch.LongTensor, rank: int, count: int, cache: PairedCache, *, causal: bool = False
    ) -> torch.FloatTensor:
        """See `GroupModel.forward_group`."""
        batch, fed = tokens.shape
        entry, last = torch.arange(cache.slots + cache.scratch, device=self.device), rank + fed - 1
        ranks = (rank + torch.arange(fed + count, device=self.device)).expand(batch, -1)
        known, asked = ranks.split([fed, count], dim=1)
        asks, group = entry % 2 == 1, (entry > 2 * last) & (entry < 2 * (last + count))
        if self.keeps_queries:
            # The queries of the fed tokens come again, each after the token before it.
            asked = ranks[:, 1:]
        entries = torch.cat([2 * known, 2 * asked - 1], dim=1)
        if self.keeps_queries:
            seen = (entry <= entries[..., None]) & ((entry <= 2 * last) | asks)
        else:
            limit = known if causal else torch.full_like(known, last)
            before = (entry <= 2 * limit[..., None]) & ~asks
            seen = torch.cat([before, before[:, -1:].expand(-1, count, -1) | (group & asks)], dim=1)
        return self._run(tokens, known, asked, entries, seen, cache)[:, :, -count:]

    def _run(self, tokens, ranks, asked, entries, seen, cache) -> torch.FloatTensor:
        """Feed `tokens` [B, T] of `ranks` and queries for the ranks `asked` [B, Q]; return the logits [G, B, Q, V] of
        the queries. They go to `entries` [B, T + Q], -1 = nowhere, and see those in `seen` [B, T + Q, entries], by
        default those up to their own."""
        if seen is None:
            seen = torch.arange(cache.slots + cache.scratch, device=self.device) <= entries[..., None]
        cache.write_slots(entries)
        logits = self.transformer(
            tokens.repeat(self.branches, 1),
            at=self._per_row(self.encode(ranks)),
            query_at=self._per_row(self.encode(asked)),
            mask=self._keys(cache, entries, seen),
            cache=cache,
        )
        return logits.unflatten(0, (self.branches, -1))

    def _keys(self, cache: PairedCache, entries: torch.LongTensor, seen: torch.BoolTensor) -> torch.BoolTensor:
        """The keys that fed positions see, [rows, Q, K]: they go to `entries` [B, Q], -1 = nowhere, and see the prefix
        and the entries in `seen` [B, Q, entries]."""
        image = cache.seen(entries.remainder(len(cache.index_of)), seen)
        return self.conditions.visible_keys(cache.prefix_end, image)

    def _per_row(self, values: torch.Tensor) -> torch.Tensor:
        return values.repeat(self.branches, *[1] * (values.ndim - 1))


def teacher_forcing_mask(group_sizes: list[int], keeps_queries: bool, device: torch.device) -> torch.BoolTensor:
    """What a condition, N - 1 tokens and N queries see of each other, bool [2 N, 2 N], for tokens that are generated
    in groups of these sizes."""
    group = torch.arange(len(group_sizes), device=device).repeat_interleave(torch.tensor(group_sizes, device=device))
    fed, count = group[:-1], len(group)
    mask = torch.zeros(2 * count, 2 * count, dtype=torch.bool, device=device)
    mask[:, 0] = True
    mask[1:count, 1:count] = fed <= fed[:, None]
    mask[count:, 1:count] = fed < group[:, None]
    mask[count:, count:] = group <= group[:, None] if keeps_queries else group == group[:, None]
    if keeps_queries:
        mask[1:count, count:] = group <= fed[:, None]
    return mask
