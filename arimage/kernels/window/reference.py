"""The reference of a window of drafts in torch."""

from collections.abc import Callable

import torch

from ..cursor.reference import advance
from ..noise.reference import uniforms


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
    start: torch.FloatTensor,
    start_sums: torch.FloatTensor,
    forced: torch.LongTensor | None,
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
    numbers = uniforms(seeds, positions, steps, purpose, 1)[..., 0] if uniform is None else uniform
    drafts, first = torch.searchsorted(start_sums, numbers.contiguous(), right=True), start[:, None]
    if forced is not None:
        known = forced.gather(1, positions.clamp(max=size - 1))
        drafts = torch.where(known < 0, drafts, known)
        one_hot = torch.arange(start.shape[1], device=start.device) == known[..., None]
        first = torch.where(known[..., None] < 0, first, one_hot.to(start.dtype))
    tokens.scatter_(1, positions, torch.where(entered, drafts, tokens.gather(1, positions)))
    into(q, torch.where, entered[..., None], first, q if p is None else p)


def into(out: torch.Tensor, operator: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> None:
    """Write `operator(*inputs)` to `out`. In a compiled step `out` cannot be passed as an argument, since it may be a
    view of a part of a tensor."""
    if torch.compiler.is_compiling():
        out.copy_(operator(*inputs))
    else:
        operator(*inputs, out=out)
