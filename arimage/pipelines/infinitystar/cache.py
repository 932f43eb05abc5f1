"""The cache of InfinityStar's films."""

import torch

from ...kernels.step import MOST_ROWS
from ...models.cache import ScaleCache
from ...models.step import StepPlaces


class ClipCache(ScaleCache):
    """The text, and the last pass over the clip before: all that cells see besides those of their own pass. Before
    them is room for the few cells of a step by the kernels of `arimage.kernels.step`.

    Args:
        prefix_length: the tokens of the text.
        slots: the cells of the largest pass that is kept.
        filled: as in `GrowingCache`.
        branches: as in `SlotCache`.

    Attributes:
        seen: how many keys the next forward pass attends to besides its own.
        first: where it writes its own after the room, over those of an earlier clip; None if no later clip reads
            them.
    """

    seen: int
    first: int | None

    def __init__(self, *sizes: int, prefix_length: int, slots: int, filled: int | None = None, **settings):
        end = MOST_ROWS + prefix_length
        self.size = end + slots
        super().__init__(*sizes, size=self.size if filled is None else end, prefix_end=end, **settings)
        self.index_of = torch.arange(end, self.size + 1, device=self.stacks[0].device)

    def write_next_at(self, first: int | None, seen: int, count: int) -> None:
        """Set `first` and `seen` for the next forward pass, which feeds `count` tokens."""
        self.first, self.seen, self.attended = first, seen, seen + count
        if first or MOST_ROWS + seen > self.allocated:
            self.allocate()

    def places(self, rows: int, count: int, rotary: torch.Tensor, seen: torch.BoolTensor | None) -> StepPlaces:
        """Where the `count` fed cells of each of the first `rows` are in a step. They see each other as if they were a
        part of the text, whose visible tokens are `seen` [rows, P]. `rotary` is [rows or 1, count, head_dim / 2,
        2]."""
        device, table = rotary.device, rotary.flatten(0, 1)
        visible = torch.ones(rows, self.prefix_end, dtype=torch.bool, device=device)
        visible[:, count:MOST_ROWS] = False
        if seen is not None:
            visible[:, MOST_ROWS:] = seen
        return StepPlaces(
            table=table,
            positions=torch.arange(len(table), device=device),
            index=torch.arange(count, device=device),
            seen=visible,
            prefix_end=self.prefix_end,
            first=self.prefix_end,
            slots=torch.full((count,), MOST_ROWS + self.seen - self.prefix_end - 1, device=device),
        )

    def open(self, layer: int, rows: int) -> tuple[torch.Tensor, ...]:
        """Room for the keys and values that the first `rows` attend to in a layer, [rows, heads, attended, head_dim]
        each, which begin with the first `seen` of the cache, and those of the cache."""
        past = [cached[:rows, :, MOST_ROWS:] for cached in self.of_layer(layer)]
        return *(each.new_empty(*each.shape[:2], self.attended, each.shape[3]) for each in past), *past

    def keep(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Keep the keys and values that a forward pass wrote, if a later one reads them."""
        if self.first is not None:
            for cached, states in zip(self.of_layer(layer), (keys, values), strict=True):
                own = states[:, :, self.seen :]
                cached[: len(own), :, MOST_ROWS + self.first :][:, :, : own.shape[2]] = own

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `SlottedCache.write`. `keys` and `values` may be those of the first rows only."""
        attended = []
        for cached, states in zip(self.of_layer(layer), (keys, values), strict=True):
            # See `SlottedCache.write`.
            cached, states = cached[: len(states), :, MOST_ROWS:], states.detach().to(cached.dtype)
            # A copy, since the pass may overwrite what it sees.
            attended.append(torch.cat([cached[:, :, : self.seen], states], dim=2))
            if self.first is not None:
                cached[:, :, self.first : self.first + states.shape[2]] = states
        return attended[0], attended[1]
