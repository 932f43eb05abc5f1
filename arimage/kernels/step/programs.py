"""What the kernels of a step share in Triton."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
import triton
import triton.language as tl


# Of a tile of tensor cores, and as many as a program takes without spilling registers. Further rows are for other
# programs, which read the weights again.
LEAST_ROWS, TILE_ROWS = 8, 64
# Each takes a part of the channels.
WARPS = 4
# Of channels, which a product takes at a time.
BLOCK_WIDTH = 256
# How often the number of parts, before the last time, and that of the channels of a part can be halved.
PART_HALVINGS, HALVINGS = tl.constexpr(2), tl.constexpr(8)
# Up to so many rows, every program of a product computes the norm before it, which saves a launch.
NORM_ROWS = 16
# The settings that `benchmarks/tune_step.py` found to be the fastest, by `tuned_key`.
TABLE = Path(__file__).with_name("tuned.json")
TUNED: dict[str, dict[str, int]] = json.loads(TABLE.read_text()) if TABLE.exists() else {}


@triton.jit
def channels_of_parts(block_width: tl.constexpr, parts: tl.constexpr):
    """The channels [parts, 1, block_width / parts] of a block. Every warp takes a part of them, so that warps multiply
    at the same time, and the sums of the parts are added at the end."""
    each: tl.constexpr = block_width // parts
    return (tl.arange(0, parts) * each)[:, None, None] + tl.arange(0, each)[None, None]


@triton.jit
def load_channels(ptr, at, width: tl.constexpr, block_width: tl.constexpr, inside=None):
    """Numbers at channels `at`, 0 after the last of `width` and where not `inside`."""
    mask = inside
    if width % block_width != 0:
        mask = at < width if inside is None else inside & (at < width)
    return tl.load(ptr + at, mask=mask, other=None if mask is None else 0.0)


@triton.jit
def sum_of_parts(sums):
    """The sum [N, M] of the 2, 4 or 8 parts of `sums` [parts, N, M]."""
    sums = tl.permute(sums, (1, 2, 0))
    for _ in tl.static_range(PART_HALVINGS):
        if sums.shape[2] > 2:
            left, right = sums.reshape(sums.shape[0], sums.shape[1], sums.shape[2] // 2, 2).split()
            sums = left + right
    left, right = sums.split()
    return left + right


@triton.jit
def norm_factor(squares, width: tl.constexpr, eps):
    """The factors [rows] of an RMSNorm, from sums of squares [parts, rows, channels]. Their order does not depend
    on the number of rows."""
    squares = sum_of_parts(squares)
    for _ in tl.static_range(HALVINGS):
        if squares.shape[1] > 1:
            left, right = squares.reshape(squares.shape[0], squares.shape[1] // 2, 2).split()
            squares = left + right
    return 1 / tl.sqrt_rn(squares.reshape(squares.shape[0]) / width + eps)


@triton.jit
def log_gain_of(ptr, inside):
    """The exponentials of numbers, which are at most 100."""
    return tl.exp(tl.minimum(tl.load(ptr, mask=inside, other=0.0).to(tl.float32), 4.605170185988092))


@triton.jit
def gelu_of(x):
    return 0.5 * x * (1 + tl.erf(0.7071067811865476 * x))


@triton.jit
def gained_kernel(
    x_ptr,
    gain_ptr,
    index_ptr,
    out_ptr,
    factor_ptr,
    eps,
    width: tl.constexpr,
    block_width: tl.constexpr,
    parts: tl.constexpr,
):
    row = tl.program_id(0)
    x_ptr += (row if index_ptr is None else tl.load(index_ptr + row)) * width
    squares = tl.full([parts, 1, block_width // parts], 0.0, tl.float32)
    channel = channels_of_parts(block_width, parts)
    for start in tl.static_range(0, width, block_width):
        at = start + channel
        full = load_channels(x_ptr, at, width, block_width).to(tl.float32)
        squares = tl.fma(full, full, squares)
    tl.store(factor_ptr + row + tl.arange(0, 1), norm_factor(squares, width, eps))
    for start in tl.static_range(0, width, block_width):
        at = start + channel
        full = load_channels(x_ptr, at, width, block_width).to(tl.float32)
        gain = load_channels(gain_ptr, at, width, block_width).to(tl.float32)
        tl.store(out_ptr + row * width + at, (full * gain).to(out_ptr.dtype.element_ty), mask=at < width)


def gained(
    x: torch.Tensor, gain: torch.Tensor, eps: float, block_width: int, parts: int, index: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a product after an RMSNorm takes, if its programs do not compute it: `x`, or its rows at `index`, times the
    gain, and the factors [rows] of these rows, summed as they would."""
    rows = len(x if index is None else index)
    out, factor = x.new_empty(rows, x.shape[1]), torch.empty(rows, dtype=torch.float32, device=x.device)
    options = {"width": x.shape[1], "block_width": block_width, "parts": parts, "num_warps": WARPS}
    gained_kernel[(rows,)](x, gain, index, out, factor, eps, **options)
    return out, factor


@triton.jit
def turned_heads(
    ptr,
    inside,
    gain_ptr,
    bias_ptr,
    eps,
    table_ptr,
    position,
    head_dim: tl.constexpr,
    block_dim: tl.constexpr,
    normed: tl.constexpr,
    turned: tl.constexpr,
    halves: tl.constexpr,
):
    """Heads [N, block_dim] in float32, with zeros after `head_dim`, which begin at `ptr` [N, 1], after a norm of each,
    if they are `normed`, and their rotation: of neighbouring pairs of their first `turned` channels, or of those of
    the `halves` of these."""
    channel = tl.arange(0, block_dim)[None]
    inside = inside & (channel < head_dim)
    turns = channel < turned
    if halves:
        half: tl.constexpr = turned // 2
        is_left, pair = channel < half, channel % half
        partner = tl.where(is_left, channel + half, channel - half)
    else:
        is_left, pair = channel % 2 == 0, channel // 2
        partner = channel ^ 1
    partner = tl.where(turns, partner, channel)
    states = tl.load(ptr + channel, mask=inside, other=0.0).to(tl.float32)
    others = tl.load(ptr + partner, mask=inside, other=0.0).to(tl.float32)
    if normed:
        if bias_ptr is not None:
            mean = tl.sum(states, axis=1)[:, None] / head_dim
            states = tl.where(channel < head_dim, states - mean, 0.0)
            others -= mean
        factor = 1 / tl.sqrt_rn(tl.sum(states * states, axis=1)[:, None] / head_dim + eps)
        states, others = states * factor, others * factor
        if gain_ptr is not None:
            states *= tl.load(gain_ptr + channel, mask=inside, other=0.0).to(tl.float32)
            others *= tl.load(gain_ptr + partner, mask=inside, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            states += tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)
            others += tl.load(bias_ptr + partner, mask=inside, other=0.0).to(tl.float32)
    if table_ptr is not None:
        table_ptr += position * turned + 2 * pair
        cos = tl.load(table_ptr, mask=inside & turns, other=1.0)
        sin = tl.load(table_ptr + 1, mask=inside & turns, other=0.0)
        states = states * cos + tl.where(is_left, -others, others) * sin
    return states


def block_rows(rows: int) -> int:
    return min(max(triton.next_power_of_2(rows), LEAST_ROWS), TILE_ROWS)


@cache
def capability(device: torch.device) -> str:
    """Of a GPU, as "9.0"; "cpu" in Triton's interpreter."""
    return device.type if device.type == "cpu" else "{}.{}".format(*torch.cuda.get_device_capability(device))


def tuned_key(operation: str, shape: Sequence[int | bool | torch.dtype], rows: int, device: torch.device) -> str:
    return " ".join(map(str, (capability(device), operation, *shape, block_rows(rows))))


def tuned(
    operation: str, shape: Sequence[int | bool | torch.dtype], rows: int, device: torch.device
) -> dict[str, int]:
    """The settings for an operation that replace those of its file: none where nobody has searched for faster ones.
    Those that a sum depends on are the same for any number of rows."""
    return TUNED.get(tuned_key(operation, shape, rows, device), {})
