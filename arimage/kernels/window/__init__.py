"""A window of drafts ahead of the cursor of every image: what a step feeds, what it decides, and the drafts after
it, each in one launch.

The drafts lie in W slots in any order. When a draft is decided, its slot moves on to the position W further.
"""

import torch

from ..cursor import advance
from ..noise import uniforms
from ..operation import operation
from .drafting import Drafting
from .reference import draft, into


@operation()
def open_window(
    positions: torch.LongTensor, tokens: torch.LongTensor, window: int, block: int, size: int
) -> tuple[torch.LongTensor, torch.BoolTensor, torch.LongTensor, torch.LongTensor, torch.LongTensor]:
    """What the next step feeds to evaluate the drafts in the first `window` slots: the tokens `block` before them.

    Args:
        positions: int64 [B, S], the position of the draft in each slot.
        tokens: int64 [B, N + S].
        size: N, the tokens of an image.

    Returns:
        Of each slot [B, W]: the position, whether it is after the end of the image, the draft, the token that is fed,
        and the position of this token, -1 after the end.
    """
    # The slots move on before a step is over.
    positions = positions[:, :window].clone()
    ended, before = positions >= size, positions - block
    drafts, previous = tokens.gather(1, positions), tokens.gather(1, before)
    return positions, ended, drafts, previous, before.masked_fill_(ended, -1)


@operation(
    writes=("tokens", "cursor", "finished", "steps", "accepted"), whole=("positions", "kept", "verified", "redrafted")
)
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
    """Decide the drafts up to and including the first that is not kept, and `cursor.advance` by them. With a `block`,
    it is the whole block of that draft, since the other tokens of the block do not depend on it.

    Args:
        positions: int64 [B, W], in any order, those of the W positions from the cursor on.
        kept: bool [B, W].
        verified, redrafted: int64 [B, W], the tokens that are written to `tokens` [B, N + S] where the step decides,
            and where it does not; without `redrafted`, `verified` everywhere.
        cursor, finished, steps, accepted: of the images, see `advance`.
        size: N.

    Returns:
        The position after the decided ones, [B].
    """
    last = cursor[:, None] + (positions.shape[1] - 1)
    decided = torch.where(kept, last, positions).amin(1)
    end = (decided + 1).clamp_(max=size)
    end = end if block == 1 else end + -end % block
    if redrafted is not None:
        verified = torch.where(positions < end[:, None], verified, redrafted)
    tokens.scatter_(1, positions, verified)
    advance(end, cursor, finished, steps, accepted, size)
    return end


@operation(
    writes=("positions", "fresh", "tokens", "q"), whole=("p", "end", "start", "start_sums", "forced", "context")
)
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
    neighbour: torch.LongTensor | None,
    jumps: int,
    context: torch.LongTensor | None,
    last: torch.LongTensor | None,
    uniform: torch.FloatTensor | None,
    seeds: torch.LongTensor,
    steps: torch.LongTensor,
    purpose: int,
    window: int,
    size: int,
) -> None:
    """Move the slots of decided drafts on, and draft their new positions, in place.

    Args:
        positions: int64 [B, S], the position of the draft in each slot. Those of the first `window` slots that lie
            before `end` [B] are decided.
        fresh: bool [B, S], which becomes whether the slot has moved on.
        tokens: int64 [B, N + S], where the drafts are written.
        q: float32 [B, S, V], the distribution that the draft in each slot was sampled from.
        p: float32 [B, W, V], those of the slots that have not moved on; None leaves them as they are.
        start, start_sums, forced, neighbour, jumps, context: see `Drafting`.
        last: int64 [B], the last position of the window before it moves, for drafts of a neighbour. Its token is
            copied where there is nothing else to copy.
        uniform: float32 [B, W] in [0, 1), the number that the draft in each slot is sampled by. None generates them
            from `seeds` [B], the new positions, `steps` [B] and `purpose`.
        size: N.
    """
    positions, entered, q = positions[:, :window], fresh[:, :window], q[:, :window]
    into(entered, torch.lt, positions, end[:, None])
    positions.add_(entered, alpha=window)
    if uniform is None:
        uniform = uniforms(seeds, positions, steps, purpose, 1)[..., 0]
    drafting = Drafting(start, start_sums, forced, neighbour, jumps, context)
    drafts, first = draft(tokens, positions, drafting, last, uniform)
    tokens.scatter_(1, positions, torch.where(entered, drafts, tokens.gather(1, positions)))
    into(q, torch.where, entered[..., None], first, q if p is None else p)
