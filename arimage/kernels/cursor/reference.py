"""The reference of the begin and the end of a step in torch."""

import torch


def open_step(
    cursor: torch.LongTensor, finished: torch.BoolTensor, tokens: torch.LongTensor, block: int
) -> tuple[torch.LongTensor, torch.LongTensor, torch.LongTensor]:
    positions = cursor[:, None] + torch.arange(block, device=cursor.device)
    before = positions - block
    previous = tokens.gather(1, before)
    return positions, previous, before.masked_fill_(finished[:, None], -1)


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
    tokens.scatter_(1, positions, sampled)
    advance((cursor + positions.shape[1]).clamp_(max=size), cursor, finished, steps, accepted, size)


def advance(
    end: torch.LongTensor,
    cursor: torch.LongTensor,
    finished: torch.BoolTensor,
    steps: torch.LongTensor,
    accepted: torch.LongTensor,
    size: int,
) -> None:
    accepted.scatter_(0, steps[None], (end - cursor)[None])
    steps += ~finished
    cursor.copy_(end)
    torch.ge(cursor, size, out=finished)
