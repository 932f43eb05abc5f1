"""What drafts are in torch."""

from collections.abc import Callable

import torch

from ..probabilities.reference import force
from .drafting import Drafting


def draft(
    tokens: torch.LongTensor,
    positions: torch.LongTensor,
    drafting: Drafting,
    last: torch.LongTensor | None,
    uniform: torch.FloatTensor,
) -> tuple[torch.LongTensor, torch.FloatTensor]:
    """Drafts [B, W] at `positions` [B, W], and the distributions [B, 1 or W, V] that they are sampled from; the other
    arguments are those of `slide_window`."""
    start, start_sums, forced, neighbour, jumps, context = drafting
    if neighbour is None:
        drafts, first = torch.searchsorted(start_sums, uniform.contiguous(), right=True), start[:, None]
    else:
        assert last is not None
        drafts = _copies(tokens, positions, neighbour, jumps, context, last[:, None])
        first = start.new_zeros(*drafts.shape, start.shape[1]).scatter_(2, drafts[..., None], 1)
    if forced is not None:
        first = force(first.expand(*positions.shape, -1), forced, positions)
        given = forced.gather(1, positions.clamp(max=forced.shape[1] - 1))
        drafts = torch.where(given < 0, drafts, given)
    return drafts, first


def _copies(
    tokens: torch.LongTensor,
    positions: torch.LongTensor,
    neighbour: torch.LongTensor,
    jumps: int,
    context: torch.LongTensor | None,
    last: torch.LongTensor,
) -> torch.LongTensor:
    size = neighbour.shape[1] - 1
    rank = neighbour.gather(1, positions.clamp(max=size))
    for _ in range(jumps):
        rank = torch.where(rank > last, neighbour.gather(1, rank), rank)
    copied = tokens.gather(1, torch.minimum(rank, last))
    if context is not None:
        copied = torch.where(rank == size, context.gather(1, positions % context.shape[1]), copied)
    return copied


def into(out: torch.Tensor, operator: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> None:
    """Write `operator(*inputs)` to `out`. In a compiled step `out` cannot be passed as an argument, since it may be a
    view of a part of a tensor."""
    if torch.compiler.is_compiling():
        out.copy_(operator(*inputs))
    else:
        operator(*inputs, out=out)
