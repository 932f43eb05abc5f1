"""The sampling distribution in Triton: one program per position finds the cut of its row bit by bit, without
sorting."""

import torch
import triton
import triton.language as tl
from torch import library


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
def _load(row_ptr, tokens, vocab_size, largest, smallest, weighted: tl.constexpr):
    """Keys of tokens, 0 outside of the row, and their weights, or ones, where the key is at least `smallest`."""
    values = tl.load(row_ptr + tokens, mask=tokens < vocab_size, other=0.0)
    keys = tl.where(tokens < vocab_size, _keys(values), 0)
    weights = tl.exp(values - largest) if weighted else tl.full(values.shape, 1.0, tl.float32)
    return keys, tl.where((keys >= smallest) & (keys > 0), weights, 0.0)


@triton.jit
def _threshold(row_ptr, vocab_size, target, largest, smallest, weighted: tl.constexpr, block: tl.constexpr):
    """The largest key such that the weights of the keys at least as large sum to more than `target`, two bits per
    sweep."""
    found = tl.full([], 0, tl.uint32)
    step = tl.full([], 1 << 30, tl.uint32)
    for _ in range(16):
        sum1 = tl.full([block], 0.0, tl.float32)
        sum2 = tl.full([block], 0.0, tl.float32)
        sum3 = tl.full([block], 0.0, tl.float32)
        for start in range(0, vocab_size, block):
            tokens = start + tl.arange(0, block)
            keys, weights = _load(row_ptr, tokens, vocab_size, largest, smallest, weighted)
            sum1 += tl.where(keys >= found + step, weights, 0.0)
            sum2 += tl.where(keys >= found + 2 * step, weights, 0.0)
            sum3 += tl.where(keys >= found + 3 * step, weights, 0.0)
        passed = (tl.sum(sum1) > target).to(tl.uint32) + (tl.sum(sum2) > target) + (tl.sum(sum3) > target)
        found += passed * step
        step = step >> 2
    return found


@triton.jit
def probabilities_kernel(
    logits_ptr,
    allowed_ptr,
    out_ptr,
    scale,
    temperature,
    top_k,
    top_p,
    group_stride,
    queries,
    vocab_size,
    scale_strides,
    allowed_stride,
    guided: tl.constexpr,
    masked: tl.constexpr,
    cuts_k: tl.constexpr,
    cuts_p: tl.constexpr,
    by_place: tl.constexpr,
    by_row: tl.constexpr,
    block: tl.constexpr,
):
    """`by_place`: whether `scale` points to one number per position. `by_row`: whether the other settings point to one
    per row. `cuts_k` and `cuts_p` are False if no row cuts."""
    place = tl.program_id(0).to(tl.int64)
    row = place // queries
    if by_place:
        scale = tl.load(scale + row * scale_strides[0] + place % queries * scale_strides[1])
    if by_row:
        temperature = tl.load(temperature + row)
        top_k = tl.load(top_k + row).to(tl.int32)
        top_p = tl.load(top_p + row)
    logits_ptr += place * vocab_size
    out_ptr += place * vocab_size
    highest = tl.full([block], -float("inf"), tl.float32)
    nan = tl.full([block], 0, tl.int32)
    for start in range(0, vocab_size, block):
        tokens = start + tl.arange(0, block)
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
    # The output row holds the logits until the probabilities overwrite them.
    tl.debug_barrier()

    smallest = tl.full([], 0, tl.uint32)
    if cuts_k:
        if (top_k > 0) & (top_k < vocab_size):
            smallest = _threshold(out_ptr, vocab_size, top_k - 1, largest, smallest, False, block)
    total = tl.full([block], 0.0, tl.float32)
    for start in range(0, vocab_size, block):
        tokens = start + tl.arange(0, block)
        total += _load(out_ptr, tokens, vocab_size, largest, smallest, True)[1]
    kept = tl.sum(total)
    # How many of the tokens at the threshold are kept, in order.
    ties = vocab_size
    if cuts_p:
        if top_p < 1:
            target = top_p * kept
            smallest = tl.maximum(_threshold(out_ptr, vocab_size, target, largest, smallest, True, block), smallest)
            total = tl.full([block], 0.0, tl.float32)
            tied = tl.full([block], 0, tl.int32)
            for start in range(0, vocab_size, block):
                tokens = start + tl.arange(0, block)
                keys, weights = _load(out_ptr, tokens, vocab_size, largest, smallest + 1, True)
                total += weights
                tied += (keys == smallest).to(tl.int32)
            above = tl.sum(total)
            # They have equal weights: they are kept while the sum before them is small enough.
            one = tl.exp(_value(smallest) - largest)
            room = tl.floor(tl.math.div_rn(tl.maximum(target - above, 0.0), one))
            ties = tl.minimum(tl.minimum(room, vocab_size).to(tl.int32) + 1, tl.sum(tied))
            kept = above + ties * one
    kept = tl.where(broken, float("nan"), kept)
    seen = 0
    for start in range(0, vocab_size, block):
        tokens = start + tl.arange(0, block)
        keys, weights = _load(out_ptr, tokens, vocab_size, largest, smallest, True)
        if cuts_p:
            at = (keys == smallest).to(tl.int32)
            weights = tl.where((at == 0) | (seen + tl.cumsum(at) <= ties), weights, 0.0)
            seen += tl.sum(at)
        tl.store(out_ptr + tokens, tl.math.div_rn(weights, kept), mask=tokens < vocab_size)


@library.custom_op("arimage::probabilities", mutates_args=())
def _probabilities(
    logits: torch.Tensor,
    scale: float,
    temperature: float,
    top_k: int,
    top_p: float,
    scales: torch.Tensor | None,
    rows: list[torch.Tensor],
    allowed: torch.Tensor | None,
) -> torch.Tensor:
    """`scales` [B, Q] replaces `scale`. `rows`, if not empty, replaces temperature, top_k and top_p, [B] each."""
    groups, batch, queries, vocab_size = logits.shape
    probabilities = torch.empty_like(logits[0], dtype=torch.float32)
    with torch.cuda.device_of(logits):
        probabilities_kernel[(batch * queries,)](
            logits,
            None if allowed is None else allowed.view(torch.uint8),
            probabilities,
            scale if scales is None else scales,
            *(rows or (temperature, top_k, top_p)),
            batch * queries * vocab_size,
            queries,
            vocab_size,
            (0, 0) if scales is None else scales.stride(),
            vocab_size if allowed is not None and allowed.ndim == 2 else 0,
            guided=groups == 2,
            masked=allowed is not None,
            cuts_k=bool(rows) or 0 < top_k < vocab_size,
            cuts_p=bool(rows) or top_p < 1,
            by_place=scales is not None,
            by_row=bool(rows),
            block=min(4096, triton.next_power_of_2(vocab_size)),
            num_warps=8,
            # Fused multiplication and addition would round differently from the reference, and break or make ties.
            enable_fp_fusion=False,
        )
    return probabilities


@_probabilities.register_fake
def _(logits, scale, temperature, top_k, top_p, scales, rows, allowed):
    return torch.empty_like(logits[0], dtype=torch.float32)


def probabilities(
    logits: torch.Tensor,
    scale: float | torch.FloatTensor,
    temperature: float | torch.FloatTensor,
    top_k: int | torch.LongTensor,
    top_p: float | torch.FloatTensor,
    allowed: torch.BoolTensor | None,
) -> torch.FloatTensor:
    batch, queries = logits.shape[1:3]
    scales, rows = None, []
    if isinstance(scale, torch.Tensor):
        # pyright takes any tensor for a number, see `stubPath`.
        scales, scale = scale.reshape(batch, -1).expand(batch, queries), 1.0  # pyright: ignore[reportAttributeAccessIssue]
    if any(isinstance(setting, torch.Tensor) for setting in (temperature, top_k, top_p)):
        rows = [
            setting if isinstance(setting, torch.Tensor) else torch.full((batch,), setting, device=logits.device)
            for setting in (temperature, top_k, top_p)
        ]
        temperature, top_k, top_p = 1.0, 0, 1.0
    allowed = None if allowed is None else allowed.contiguous()
    return _probabilities(
        logits.contiguous(), float(scale), float(temperature), int(top_k), float(top_p), scales, rows, allowed
    )
