"""The reference of a window of drafts in torch."""

from collections.abc import Callable

import torch

from ..cursor.reference import advance
from ..noise.reference import uniforms
from ..probabilities.reference import force
from .drafting import Drafting


def open_window(
    positions: torch.LongTensor, tokens: torch.LongTensor, window: int, block: int, size: int
) -> tuple[torch.LongTensor, torch.BoolTensor, torch.LongTensor, torch.LongTensor, torch.LongTensor]:
    # The slots move on before a step is over.
    positions = positions[:, :window].clone()
    ended, before = positions >= size, positions - block
    drafts, previous = tokens.gather(1, positions), tokens.gather(1, before)
    return positions, ended, drafts, previous, before.masked_fill_(ended, -1)


def close_window(
    positions: torch.LongTensor,
    kept: torch.BoolTensor,
    verified: torch.LongTensor,
    redrafted: torch.LongTensor | None,
    tokens: torch.LongTensor,
    cursor: torch.LongTensor,
    finished: torch.BoolTensor,
    steps: torch.LongTensor,
    accepted: torch.LongTensor,
    block: int,
    size: int,
) -> torch.LongTensor:
    last = cursor[:, None] + (positions.shape[1] - 1)
    decided = torch.where(kept, last, positions).amin(1)
    end = (decided + 1).clamp_(max=size)
    end = end if block == 1 else end + -end % block
    if redrafted is not None:
        verified = torch.where(positions < end[:, None], verified, redrafted)
    tokens.scatter_(1, positions, verified)
    advance(end, cursor, finished, steps, accepted, size)
    return end


def slide_window(
    positions: torch.LongTensor,
    fresh: torch.BoolTensor,
    tokens: torch.LongTensor,
    q: torch.FloatTensor,
    p: torch.FloatTensor | None,
    end: torch.LongTensor,
    drafting: Drafting,
    last: torch.LongTensor | None,
    uniform: torch.FloatTensor | None,
    seeds: torch.LongTensor,
    steps: torch.LongTensor,
    purpose: int,
    window: int,
    size: int,
) -> None:
    positions, entered, q = positions[:, :window], fresh[:, :window], q[:, :window]
    into(entered, torch.lt, positions, end[:, None])
    positions.add_(entered, alpha=window)
    if uniform is None:
        uniform = uniforms(seeds, positions, steps, purpose, 1)[..., 0]
    drafts, first = draft(tokens, positions, drafting, last, uniform)
    tokens.scatter_(1, positions, torch.where(entered, drafts, tokens.gather(1, positions)))
    into(q, torch.where, entered[..., None], first, q if p is None else p)


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
