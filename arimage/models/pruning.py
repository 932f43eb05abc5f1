"""Cached token pruning (FastVAR, https://arxiv.org/abs/2503.23367) in next-scale transformers: only some cells of the
late scales are fed."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .cache import ScaleCache


class Pruning(NamedTuple):
    """Which cells of a scale are fed.

    Attributes:
        kept: how many; None for all, which write `change` for the next scales.
        first, stop: how many cells are fed before these, and how many together with them.
        shape: the shape of the map.
        source: that of the last map of which all cells are fed.
        change: what the layers add to the hidden states of its cells, [rows, cells, C].
    """

    kept: int | None
    first: int
    stop: int
    shape: tuple[int, ...]
    source: tuple[int, ...]
    change: torch.Tensor

    def choose(self, hidden: torch.Tensor) -> torch.LongTensor | None:
        """The cells [rows, kept] that are fed: those whose hidden states before the layers, [rows, n, C], differ most
        from the mean of their map. None for all."""
        if self.kept is None:
            return None
        states = hidden.float()
        return (states - states.mean(1, keepdim=True)).square().sum(-1).topk(self.kept).indices

    def restore(self, hidden: torch.Tensor, passed: torch.Tensor, cells: torch.LongTensor | None) -> torch.Tensor:
        """The hidden states [rows, n, C] of all cells after the layers, given those before them, `hidden`, and those
        of the `cells` that `passed` through them. The others change by as much as their place in `source`."""
        # The layers may mix the rows without a condition into the others.
        hidden, change = hidden[: len(passed)], self.change[: len(passed)]
        if cells is None:
            change.copy_(passed - hidden)
            return passed
        change = F.interpolate(change.mT.unflatten(2, self.source), self.shape, mode="area").flatten(2).mT
        # Under autocast the hidden states are not in the dtype of the weights, which `change` has.
        restored = (hidden + change).to(passed.dtype)
        return restored.scatter(1, _columns(cells, passed)[: len(passed)], passed)


def fed_cells(counts: Sequence[int], pruned: Mapping[int, float] | None) -> list[int]:
    """How many of the `counts` of cells of each scale are fed, given the shares of `ScaleModel.prefill`."""
    shares = pruned or {}
    return [max(round(count * (1 - shares.get(scale, 0))), 1) for scale, count in enumerate(counts)]


def pruning_of(scale: int, cache: ScaleCache, shapes: Sequence[tuple[int, ...]]) -> Pruning | None:
    """Which cells of `scale` are fed, of maps with these `shapes`; None for all, whose change no later scale needs."""
    if not cache.fed_cells or scale < cache.whole:
        return None
    first, count = sum(cache.fed_cells[:scale]), cache.fed_cells[scale]
    kept = count if scale > cache.whole else None
    return Pruning(kept, first, first + count, shapes[scale], shapes[cache.whole], cache.change)


def only(hidden: torch.Tensor, cells: torch.LongTensor | None) -> torch.Tensor:
    """The hidden states [rows, kept, C] of `cells` [rows, kept]; those of all cells if it is None."""
    return hidden if cells is None else hidden.gather(1, _columns(cells, hidden))


def _columns(cells: torch.LongTensor, hidden: torch.Tensor) -> torch.LongTensor:
    return cells[..., None].expand(-1, -1, hidden.shape[-1])
