"""The start of a step in Triton: a program takes a row."""

import torch
import triton
import triton.language as tl

from ..programs import WARPS


@triton.jit(do_not_specialize=["count", "nowhere"])
def embedding_kernel(
    token_ptr,
    position_ptr,
    slot_ptr,
    places_ptr,
    weight_ptr,
    hidden_ptr,
    last_ptr,
    index_ptr,
    count,
    nowhere,
    width: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0)
    item = row % count
    token = tl.load(token_ptr + item)
    channel = tl.arange(0, block)
    inside = channel < width
    known = inside & (token >= 0)
    embedded = tl.load(weight_ptr + token * width + channel, mask=known, other=0.0)
    tl.store(hidden_ptr + row * width + channel, embedded, mask=inside)
    if row < count:
        slot = tl.load(position_ptr + item)
        if slot_ptr is not None:
            slot = tl.where(slot < 0, slot, tl.load(slot_ptr + item))
        tl.store(last_ptr + item, tl.maximum(slot, 0))
        tl.store(index_ptr + item, tl.load(places_ptr + tl.where(slot < 0, nowhere, slot)))


def embedding(tokens, positions, slots, places, weight, branches):
    count, width = tokens.numel(), weight.shape[1]
    hidden = torch.empty(branches * count, width, dtype=weight.dtype, device=weight.device)
    last, index = (torch.empty(count, dtype=torch.long, device=weight.device) for _ in range(2))
    yield hidden, last, index
    fed, found = (tokens, positions, slots, places), (hidden, last, index)
    options = {"width": width, "block": triton.next_power_of_2(width), "num_warps": WARPS}
    embedding_kernel[(branches * count,)](*fed, weight, *found, count, len(places) - 1, **options)
