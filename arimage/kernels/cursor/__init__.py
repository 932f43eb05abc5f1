"""The begin and the end of a step of images that are generated in order, each in one launch."""

import torch

from ..operation import operation


@operation()
def open_step(
    cursor: torch.LongTensor, finished: torch.BoolTensor, tokens: torch.LongTensor, block: int
) -> tuple[torch.LongTensor, torch.LongTensor, torch.LongTensor]:
    """What the next step of every image feeds: the `block` tokens before its cursor.

    Args:
        cursor: int64 [B], the first position that is not decided, >= `block`.
        finished: bool [B].
        tokens: int64 [B, S].

    Returns:
        The positions [B, block] from the cursor on, the tokens [B, block] that lie `block` before them, and the
        positions of these, -1 in finished images.
    """
    positions = cursor[:, None] + torch.arange(block, device=cursor.device)
    before = positions - block
    previous = tokens.gather(1, before)
    return positions, previous, before.masked_fill_(finished[:, None], -1)


@operation(writes=("tokens", "cursor", "finished", "steps", "accepted"), whole=("positions", "sampled"))
def close_step(
    positions: torch.LongTensor,
    sampled: torch.LongTensor,
    tokens: torch.LongTensor,
    cursor: torch.LongTensor,
    finished: torch.BoolTensor,
    steps: torch.LongTensor,
    accepted: torch.LongTensor,
    size: int,
) -> None:
    """Write the tokens `sampled` [B, Q] at `positions` [B, Q] of `tokens` [B, S], and `advance` by Q positions, at
    most to the end of the image."""
    tokens.scatter_(1, positions, sampled)
    advance((cursor + positions.shape[1]).clamp_(max=size), cursor, finished, steps, accepted, size)


@operation(writes=("cursor", "finished", "steps", "accepted"), whole=("end",))
def advance(
    end: torch.LongTensor,
    cursor: torch.LongTensor,
    finished: torch.BoolTensor,
    steps: torch.LongTensor,
    accepted: torch.LongTensor,
    size: int,
) -> None:
    """Count a step that decided the tokens before `end`, in place.

    Args:
        end: int64 [B], from the cursor on to `size`, the tokens of an image.
        cursor: int64 [B], which becomes `end`.
        finished: bool [B], whether the cursor is at the end of the image.
        steps: int64 [B], the number of steps of each image, which finished ones no longer count.
        accepted: int64 [size + 1, B], by step and image the number of tokens that it decided.
    """
    accepted.scatter_(0, steps[None], (end - cursor)[None])
    steps += ~finished
    cursor.copy_(end)
    torch.ge(cursor, size, out=finished)
