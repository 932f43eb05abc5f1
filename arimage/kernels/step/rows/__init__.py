"""The start of a step of a language model: the rows of its layers, with those of the ends of image rows."""

import torch

from ...operation import operation


@operation(whole=("embedded", "tokens", "positions", "slots"))
def open_rows(
    embedded: torch.Tensor,
    tokens: torch.LongTensor | None,
    positions: torch.LongTensor,
    slots: torch.LongTensor | None,
    places: torch.LongTensor,
    first: torch.LongTensor,
    columns: int = 0,
    last: int = 0,
    room: int = 0,
    row_end: torch.Tensor | None = None,
    end_places: torch.LongTensor | None = None,
) -> tuple[torch.Tensor, torch.LongTensor, torch.LongTensor, torch.LongTensor, torch.LongTensor, torch.LongTensor]:
    """What the layers of a decoder read of the tokens [B, Q] of a step, and of up to `room` row ends of an image after
    its tokens, M = Q + room in all.

    Returns:
        hidden: the inputs of all branches [rows * M, D]; zeros for tokens that are not known yet.
        slots: [B * M], up to which slot of the image each sees.
        index: [B * M], its place in the cache.
        rotations: [rows * M], the row of the table that it is rotated by.
        ends: [B * M], how many of the image's tokens are in rows whose ends it sees.
        heads: [rows * Q], the row of `hidden` that predicts the token after each: of one that ends a row, its row end.

    Args:
        embedded: [B * Q, D].
        tokens: [B, Q], -1 for those that are not known; None if all are.
        positions, slots: [B, Q] each, see `TokenModel.forward`; padding is written nowhere, and sees slot 0.
        places: where each slot lies, nowhere last, see `SlottedCache.index_of`.
        first: [rows], the row of the table for position 0.
        columns: how many tokens the rows of an image have, if a token ends each.
        last: the position of the last token, whose row end is not fed.
        row_end: [D], its embedding.
        end_places: where the row end of each slot lies, as `places`.
    """
    batch, count = positions.shape
    branches, device = len(first) // batch, positions.device
    hidden = embedded.unflatten(0, (batch, count))
    known = torch.ones_like(positions, dtype=torch.bool) if tokens is None else tokens >= 0
    hidden = hidden * known[..., None]
    own = torch.where(positions < 0, -1, positions if slots is None else slots)
    at, seen, index = positions.clamp(min=0), own.clamp(min=0), places[own]
    ends, heads = seen, torch.arange(count, device=device).expand(batch, -1)
    if row_end is not None and end_places is not None:
        ending = (at % columns == columns - 1) & (positions >= 0) & (at < last)
        after = ending.long().argsort(dim=1, descending=True, stable=True)[:, :room]
        there, end_slots = ending.gather(1, after), own.gather(1, after)
        index = torch.cat([index, torch.where(there, end_places[end_slots], places[-1])], dim=1)
        # An unknown token carries no information, unlike its row end.
        shown = end_slots - (~known.gather(1, after)).long()
        seen = torch.cat([seen, torch.where(there, shown, 0)], dim=1)
        ends = torch.cat([ends, torch.where(there, end_slots + 1, 0)], dim=1)
        heads = torch.where(ending, count - 1 + ending.long().cumsum(1), heads)
        at = at + at // columns
        at = torch.cat([at, at.gather(1, after) + 1], dim=1)
        hidden = torch.cat([hidden, row_end.expand(batch, room, -1)], dim=1)
    rotations = first[:, None] + at.repeat(branches, 1)
    heads = heads.repeat(branches, 1) + torch.arange(len(first), device=device)[:, None] * at.shape[1]
    hidden = hidden.repeat(branches, 1, 1).flatten(0, 1)
    return hidden, seen.flatten(), index.flatten(), rotations.flatten(), ends.flatten().clone(), heads.flatten()
