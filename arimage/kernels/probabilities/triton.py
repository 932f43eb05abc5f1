"""The sampling distribution in Triton: one program per position finds the cut of its row bit by bit, in registers and
without sorting."""

import torch
import triton
import triton.language as tl


# The numbers, and their weights, that fit into the registers of 16 warps.
_BLOCK = 1 << 14


@triton.jit
def _keys(values):
    """Unsigned integers in the order of float32 numbers, none of them 0."""
    # Adding zero makes the two zeros equal.
    bits = (values + 0.0).to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _value(key):
    return tl.where((key >> 31) == 1, key ^ 0x80000000, key ^ 0xFFFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _load(row_ptr, index, size, largest, smallest):
    """Keys of numbers, 0 outside of the row, and their weights, 0 where the key is less than `smallest`."""
    values = tl.load(row_ptr + index, mask=index < size, other=0.0)
    keys = tl.where(index < size, _keys(values), 0)
    return keys, tl.where(keys >= smallest, tl.exp(values - largest), 0.0)


@triton.jit
def _narrow(
    row_ptr,
    vocab_size,
    target,
    largest,
    smallest,
    count,
    weighted: tl.constexpr,
    block: tl.constexpr,
    chunk: tl.constexpr,
    pivots: tl.constexpr = 8,
):
    """Bounds [low, high) of `_threshold` such that at most `block` keys lie between them, or only equal ones; and the
    number of keys above."""
    low, high = smallest, _keys(largest) + 1
    above = 0
    sweeps = 0
    while (count - above > block) & (high - low > 1):
        # Equal steps of logits, and if that does not suffice of keys, since logits may lie close together anywhere.
        part = tl.arange(0, pivots) + 1
        top = _value(high - 1)
        by_value = _keys(top - tl.minimum(top - _value(low), 32.0) / (pivots + 1) * part)
        by_key = low + (high - low) // (pivots + 1) * part.to(tl.uint32)
        pivot = tl.where(sweeps < 4, by_value, by_key)
        pivot = tl.minimum(tl.maximum(pivot, low + 1), high - 1)
        sums = tl.full([pivots], 0.0, tl.float32)
        counts = tl.full([pivots], 0, tl.int32)
        for start in range(0, vocab_size, chunk):
            keys, weights = _load(row_ptr, start + tl.arange(0, chunk), vocab_size, largest, smallest)
            reached = keys[None, :] >= pivot[:, None]
            sums += tl.sum(tl.where(reached, weights[None, :], 0.0), axis=1)
            counts += tl.sum(reached.to(tl.int32), axis=1)
        enough = (sums if weighted else counts) > target
        low = tl.maximum(low, tl.max(tl.where(enough, pivot, 0)))
        high = tl.minimum(high, tl.min(tl.where(enough, 0xFFFFFFFF, pivot)))
        count = tl.minimum(count, tl.min(tl.where(enough, counts, vocab_size)))
        above = tl.maximum(above, tl.max(tl.where(enough, 0, counts)))
        sweeps += 1
    return low, high, above


@triton.jit
def _gather(row_ptr, gathered_ptr, vocab_size, largest, low, high, floor, block: tl.constexpr, chunk: tl.constexpr):
    """Copy the first `block` of the numbers whose keys lie in [low, high). Returns how many there are, the sum of the
    weights above, and of those among them whose keys are at least `floor`."""
    # All threads have read what was gathered before.
    tl.debug_barrier()
    size = 0
    above = tl.full([], 0.0, tl.float32)
    heavy = tl.full([], 0.0, tl.float32)
    for start in range(0, vocab_size, chunk):
        tokens = start + tl.arange(0, chunk)
        values = tl.load(row_ptr + tokens, mask=tokens < vocab_size, other=0.0)
        keys = tl.where(tokens < vocab_size, _keys(values), 0)
        inside = ((keys >= low) & (keys < high)).to(tl.int32)
        place = size + tl.cumsum(inside) - 1
        tl.store(gathered_ptr + place, values, mask=(inside == 1) & (place < block))
        size += tl.sum(inside)
        weights = tl.where(keys >= high, tl.exp(values - largest), 0.0)
        above += tl.sum(weights)
        if floor is not None:
            heavy += tl.sum(tl.where(keys >= floor, weights, 0.0))
    tl.debug_barrier()
    return size, above, heavy


@triton.jit
def _threshold(
    row_ptr,
    gathered_ptr,
    vocab_size,
    target,
    largest,
    smallest,
    floor,
    count,
    weighted: tl.constexpr,
    block: tl.constexpr,
    chunk: tl.constexpr,
):
    """The largest key such that the sum of the weights of the keys at least as large, or their number if not
    `weighted`, exceeds `target`; `smallest` if there is none. Also returns the sum of the weights of larger keys, the
    number of equal ones, and if `floor` is larger the sum of the weights of keys that are at least `floor`. At most
    `count` keys are at least `smallest`, and others have no weight."""
    low, above, heavy, more, size = smallest, 0.0, 0.0, 0, vocab_size
    if gathered_ptr is not None:
        low, high, more = _narrow(row_ptr, vocab_size, target, largest, smallest, count, weighted, block, chunk // 2)
        size, above, heavy = _gather(row_ptr, gathered_ptr, vocab_size, largest, low, high, floor, block, chunk)
        row_ptr = gathered_ptr
    keys, weights = _load(row_ptr, tl.arange(0, block), tl.minimum(size, block), largest, low)
    # Sums in another order may be rounded to more, and below to no more, than `target`.
    target = tl.maximum(target - (above if weighted else more), 0)
    found = tl.full([], 0, tl.uint32)
    step = tl.full([], 1 << 31, tl.uint32)
    for _ in range(32):
        enough = tl.sum(tl.where(keys >= found + step, weights if weighted else 1.0, 0.0)) > target
        found = tl.where(enough, found + step, found)
        step = step >> 1
    found = tl.maximum(found, low)
    above += tl.sum(tl.where(keys > found, weights, 0.0))
    if floor is not None:
        heavy += tl.sum(tl.where(keys >= floor, weights, 0.0))
    # Those that were not gathered are equal.
    tied = tl.where(size > block, size, tl.sum((keys == found).to(tl.int32)))
    return found, above, tied, heavy


# The stride 0 of an `allowed` that all rows share would be known to be aligned, and change the order of all sums.
@triton.jit(do_not_specialize=["allowed_stride", "num_tokens"])
def probabilities_kernel(
    logits_ptr,
    allowed_ptr,
    gathered_ptr,
    forced_ptr,
    positions_ptr,
    invalid_ptr,
    ended_ptr,
    out_ptr,
    scale,
    temperature,
    top_k,
    top_p,
    min_p,
    group_stride,
    queries,
    vocab_size,
    scale_strides,
    allowed_stride,
    num_tokens,
    ended_strides,
    guided: tl.constexpr,
    masked: tl.constexpr,
    cuts_k: tl.constexpr,
    cuts_p: tl.constexpr,
    cuts_min: tl.constexpr,
    by_place: tl.constexpr,
    by_row: tl.constexpr,
    block: tl.constexpr,
    chunk: tl.constexpr,
):
    """Up to `block` numbers fit into registers. The logits are read once; the row of float32 numbers in `out_ptr` once
    for each cut, once for the sum of all weights unless top-k cuts, and once for the probabilities.

    Of a longer row a cut needs more: it reads the row until at most `block` numbers are left among which the threshold
    may be (usually once or twice, after top-k hardly ever), and once more to gather those in `gathered_ptr` [block].

    `by_place`: whether `scale` points to one number per position. `by_row`: whether the other settings point to one
    per row. `cuts_k`, `cuts_p` and `cuts_min` are False if no row cuts."""
    place = tl.program_id(0).to(tl.int64)
    row = place // queries
    if by_place:
        scale = tl.load(scale + row * scale_strides[0] + place % queries * scale_strides[1])
    if by_row:
        temperature = tl.load(temperature + row)
        top_k = tl.load(top_k + row).to(tl.int32)
        top_p = tl.load(top_p + row)
        if cuts_min:
            min_p = tl.load(min_p + row)
    logits_ptr += place * vocab_size
    out_ptr += place * vocab_size
    if gathered_ptr is not None:
        gathered_ptr += place * block
    highest = tl.full([chunk], -float("inf"), tl.float32)
    nan = tl.full([chunk], 0, tl.int32)
    for start in range(0, vocab_size, chunk):
        tokens = start + tl.arange(0, chunk)
        inside = tokens < vocab_size
        logits = tl.load(logits_ptr + tokens, mask=inside, other=0.0).to(tl.float32)
        if guided:
            unconditional = tl.load(logits_ptr + group_stride + tokens, mask=inside, other=0.0).to(tl.float32)
            logits += (logits - unconditional) * (scale - 1)
        logits = tl.math.div_rn(logits, temperature)
        if masked:
            logits = tl.where(
                tl.load(allowed_ptr + row * allowed_stride + tokens, mask=inside, other=0) != 0, logits, -float("inf")
            )
        tl.store(out_ptr + tokens, logits, mask=inside)
        nan += (logits != logits).to(tl.int32)
        highest = tl.maximum(highest, tl.where(inside, logits, -float("inf")))
    largest = tl.max(highest)
    # Maxima ignore NaN.
    broken = (tl.sum(nan) > 0) | (tl.abs(largest) == float("inf"))
    if forced_ptr is not None:
        position = tl.minimum(tl.load(positions_ptr + place), num_tokens - 1)
        forced = tl.load(forced_ptr + row * num_tokens + position)
        broken = broken & (forced < 0)
    if invalid_ptr is not None:
        counts = broken
        if ended_ptr is not None:
            counts &= tl.load(ended_ptr + row * ended_strides[0] + place % queries * ended_strides[1]) == 0
        if counts:
            tl.store(invalid_ptr + row, 1)
    # The output row holds the logits until the probabilities overwrite them.
    tl.debug_barrier()

    # The key of -inf.
    smallest = tl.full([], 0x007FFFFF, tl.uint32)
    # Min-p keeps the keys at least `floor`, and `heavy` is the sum of their weights.
    floor = _keys(largest + tl.log(min_p)) if cuts_min else None
    # How many tokens are left at most, and how many of those at the threshold are kept, in order.
    count = vocab_size
    ties = vocab_size
    cut = False
    if cuts_k:
        cut = (top_k > 0) & (top_k < vocab_size)
    if cut:
        smallest, above, tied, heavy = _threshold(
            out_ptr, gathered_ptr, vocab_size, top_k - 1, largest, smallest, floor, count, False, block, chunk
        )
        kept = above + tied * tl.exp(_value(smallest) - largest)
        count = top_k - 1 + tied
    else:
        total = tl.full([chunk], 0.0, tl.float32)
        total_heavy = tl.full([chunk], 0.0, tl.float32)
        for start in range(0, vocab_size, chunk):
            keys, weights = _load(out_ptr, start + tl.arange(0, chunk), vocab_size, largest, smallest)
            total += weights
            if cuts_min:
                total_heavy += tl.where(keys >= floor, weights, 0.0)
        kept, heavy = tl.sum(total), tl.sum(total_heavy)
    if cuts_p:
        if top_p < 1:
            target = top_p * kept
            smallest, above, tied, heavy = _threshold(
                out_ptr, gathered_ptr, vocab_size, target, largest, smallest, floor, count, True, block, chunk
            )
            # They have equal weights: they are kept while the sum before them is small enough.
            one = tl.exp(_value(smallest) - largest)
            room = tl.floor(tl.math.div_rn(tl.maximum(target - above, 0.0), one))
            ties = tl.minimum(tl.minimum(room, vocab_size).to(tl.int32) + 1, tied)
            kept = above + ties * one
            # Nothing is to be counted if all of them are kept.
            ties = tl.where(ties < tied, ties, vocab_size)
    least = smallest
    if cuts_min:
        # If the floor is above the other cuts, those that tie with these lie below it.
        least = tl.maximum(smallest, floor)
        kept = tl.where(floor > smallest, heavy, kept)
    kept = tl.where(broken, float("nan"), kept)
    seen = 0
    for start in range(0, vocab_size, chunk):
        tokens = start + tl.arange(0, chunk)
        keys, weights = _load(out_ptr, tokens, vocab_size, largest, least)
        if ties < vocab_size:
            at = (keys == smallest).to(tl.int32)
            weights = tl.where((at == 0) | (seen + tl.cumsum(at) <= ties), weights, 0.0)
            seen += tl.sum(at)
        probabilities = tl.math.div_rn(weights, kept)
        if forced_ptr is not None:
            probabilities = tl.where(forced < 0, probabilities, (tokens == forced).to(tl.float32))
        tl.store(out_ptr + tokens, probabilities, mask=tokens < vocab_size)


def probabilities(
    logits, scale, temperature, top_k, top_p, min_p, scales, rows, allowed, forced, positions, invalid, ended
):
    branches, batch, queries, vocab_size = logits.shape
    probabilities = torch.empty_like(logits[0], dtype=torch.float32)
    yield probabilities
    block = min(_BLOCK, triton.next_power_of_2(vocab_size))
    num_warps = max(4, block // 1024)
    cuts_k, cuts_p = bool(rows) or 0 < top_k < vocab_size, bool(rows) or top_p < 1
    gathered = None
    if vocab_size > block and (cuts_k or cuts_p):
        gathered = torch.empty(batch * queries, block, dtype=torch.float32, device=logits.device)
    by_row = allowed is not None and allowed.ndim == 2
    allowed = None if allowed is None else allowed.view(torch.uint8)
    invalid = None if invalid is None else invalid.view(torch.uint8)
    ended = None if ended is None else ended.expand(batch, queries).view(torch.uint8)
    tensors = logits, allowed, gathered, forced, positions, invalid, ended, probabilities
    settings = scale if scales is None else scales, *[*(rows or (temperature, top_k, top_p)), min_p][:4]
    probabilities_kernel[(batch * queries,)](
        *tensors,
        *settings,
        batch * queries * vocab_size,
        queries,
        vocab_size,
        (0, 0) if scales is None else scales.stride(),
        vocab_size if by_row else 0,
        0 if forced is None else forced.shape[1],
        (0, 0) if ended is None else ended.stride(),
        guided=branches == 2,
        masked=allowed is not None,
        cuts_k=cuts_k,
        cuts_p=cuts_p,
        cuts_min=len(rows) == 4 or min_p > 0,
        by_place=scales is not None,
        by_row=bool(rows),
        block=block,
        chunk=min(256 * num_warps, block),
        num_warps=num_warps,
        # Fused multiplication and addition would round differently from the reference, and break or make ties.
        enable_fp_fusion=False,
    )
