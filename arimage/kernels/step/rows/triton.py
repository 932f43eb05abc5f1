"""The start of a step of a language model in Triton: a program takes a row."""

import torch
import triton
import triton.language as tl

from ..programs import WARPS


@triton.jit(do_not_specialize=["count", "batch", "nowhere", "columns", "last"])
def rows_kernel(
    embedded_ptr,
    token_ptr,
    position_ptr,
    slot_ptr,
    places_ptr,
    first_ptr,
    row_end_ptr,
    end_places_ptr,
    hidden_ptr,
    seen_ptr,
    index_ptr,
    rotation_ptr,
    ends_ptr,
    heads_ptr,
    count,
    batch,
    nowhere,
    columns,
    last,
    room: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    block_count: tl.constexpr,
):
    row = tl.program_id(0) // (count + room)
    place = tl.program_id(0) % (count + room)
    image = row % batch
    is_end = place >= count
    item, there, rank = place, False, 0
    if row_end_ptr is not None:
        each = tl.arange(0, block_count)
        position = tl.load(position_ptr + image * count + each, mask=each < count, other=-1)
        ending = (position >= 0) & (position % columns == columns - 1) & (position < last)
        ranks = tl.cumsum(ending.to(tl.int32), 0) - 1
        # The first that ends a row has the first row end, and so on; the others come after the last token.
        mine = ending & (ranks == place - count)
        there = tl.sum(mine.to(tl.int32)) > 0
        others = (
            ~ending
            & (each < count)
            & (tl.cumsum((~ending).to(tl.int32), 0) - 1 == place - count - tl.sum(ending.to(tl.int32)))
        )
        item = tl.where(is_end, tl.sum(tl.where(mine | others, each, 0)), place)
        rank = tl.sum(tl.where((each == place) & ending, ranks + 1, 0))
    position = tl.load(position_ptr + image * count + item)
    slot = position
    if slot_ptr is not None:
        slot = tl.where(position < 0, position, tl.load(slot_ptr + image * count + item))
    known = True
    if token_ptr is not None:
        known = tl.load(token_ptr + image * count + item) >= 0
    own = tl.where(slot < 0, nowhere, slot)
    at = tl.maximum(position, 0)
    channel = tl.arange(0, block)
    inside = channel < width
    source = embedded_ptr + (image * count + item).to(tl.int64) * width
    states = tl.load(source + channel, mask=inside & known & (place < count), other=0.0)
    lies = tl.load(places_ptr + own)
    seen, shown, head = tl.maximum(slot, 0), tl.maximum(slot, 0), place
    if row_end_ptr is not None:
        states = tl.where(is_end, tl.load(row_end_ptr + channel, mask=inside, other=0.0), states)
        end_lies = tl.load(end_places_ptr + own)
        lies = tl.where(is_end, tl.where(there, end_lies, tl.load(places_ptr + nowhere)), lies)
        seen = tl.where(is_end, tl.where(there, slot - tl.where(known, 0, 1), 0), seen)
        shown = tl.where(is_end, tl.where(there, slot + 1, 0), shown)
        at += at // columns + tl.where(is_end, 1, 0)
        head = tl.where(rank > 0, count + rank - 1, place)
    out = tl.program_id(0).to(tl.int64)
    tl.store(hidden_ptr + out * width + channel, states, mask=inside)
    tl.store(rotation_ptr + out, tl.load(first_ptr + row) + at)
    if place < count:
        tl.store(heads_ptr + row * count + place, row * (count + room) + head)
    if row < batch:
        tl.store(seen_ptr + out, seen)
        tl.store(index_ptr + out, lies)
        tl.store(ends_ptr + out, shown)


def open_rows(embedded, tokens, positions, slots, places, first, columns, last, room, row_end, end_places):
    (batch, count), (rows, width), device = positions.shape, (len(first), embedded.shape[1]), embedded.device
    fed = count + room
    hidden = torch.empty(rows * fed, width, dtype=embedded.dtype, device=device)
    sizes = batch * fed, batch * fed, rows * fed, batch * fed, rows * count
    found = hidden, *(torch.empty(size, dtype=torch.long, device=device) for size in sizes)
    yield found
    given = embedded, tokens, positions, slots, places, first, row_end, end_places
    options = {"room": room, "width": width, "block": triton.next_power_of_2(width), "num_warps": WARPS}
    sizes = count, batch, len(places) - 1, columns, last
    rows_kernel[(rows * fed,)](*given, *found, *sizes, **options, block_count=triton.next_power_of_2(count))
