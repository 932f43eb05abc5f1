"""SiLU of a group norm in Triton, in both memory formats: the moments of every part of a group, those of whole groups,
then the normalised parts."""

import torch
import triton
import triton.language as tl


# Elements of a part.
_PART = 4096
# Parts that are combined at a time.
_COMBINED = 1024


@triton.jit
def _part(
    pixels,
    channels,
    size,
    channels_last: tl.constexpr,
    block_pixels: tl.constexpr,
    block_groups: tl.constexpr,
    block_size: tl.constexpr,
):
    """The part [pixels, groups, channels of a group] of this program: its channels, its addresses, and which of them
    exist."""
    pixel = tl.program_id(0) * block_pixels + tl.arange(0, block_pixels)
    group = tl.program_id(1) * block_groups + tl.arange(0, block_groups)
    inside = tl.arange(0, block_size)
    channel = group[:, None] * size + inside
    exists = (inside < size) & (channel < channels)
    if channels_last:
        address = pixel[:, None, None].to(tl.int64) * channels + channel[None]
    else:
        address = pixel[:, None, None] + channel[None].to(tl.int64) * pixels
    address += tl.program_id(2).to(tl.int64) * channels * pixels
    return channel, address, exists, (pixel < pixels)[:, None, None] & exists[None]


@triton.jit
def moments_kernel(
    hidden_ptr,
    moments_ptr,
    pixels,
    channels,
    size,
    channels_last: tl.constexpr,
    block_pixels: tl.constexpr,
    block_groups: tl.constexpr,
    block_size: tl.constexpr,
):
    """The mean of every part, and the sum of the squared distances to it: moments [B, G, 2, parts]."""
    channel, address, exists, mask = _part(
        pixels, channels, size, channels_last, block_pixels, block_groups, block_size
    )
    hidden = tl.load(hidden_ptr + address, mask=mask, other=0.0).to(tl.float32)
    count = tl.minimum(pixels - tl.program_id(0) * block_pixels, block_pixels) * size
    mean = tl.sum(tl.sum(hidden, axis=2), axis=0) / count
    distance = tl.where(mask, hidden - mean[None, :, None], 0.0)
    squares = tl.sum(tl.sum(distance * distance, axis=2), axis=0)
    groups = channels // size
    group = tl.program_id(1) * block_groups + tl.arange(0, block_groups)
    parts = tl.num_programs(0)
    place = moments_ptr + (tl.program_id(2).to(tl.int64) * groups + group) * 2 * parts + tl.program_id(0)
    tl.store(place, mean, mask=group < groups)
    tl.store(place + parts, squares, mask=group < groups)


@triton.jit
def combine_kernel(moments_ptr, groups_ptr, pixels, size, parts, eps, block_pixels: tl.constexpr, block: tl.constexpr):
    """Mean and inverse standard deviation of every group [B, G, 2] from the moments of its parts (Chan, Golub and
    LeVeque: without the difference of large sums)."""
    place = moments_ptr + tl.program_id(0).to(tl.int64) * 2 * parts
    count = (pixels * size).to(tl.float32)
    sums = tl.zeros([block], tl.float32)
    for first in range(0, parts, block):
        part = first + tl.arange(0, block)
        counts = tl.minimum(tl.maximum(pixels - part * block_pixels, 0), block_pixels) * size
        sums += tl.load(place + part, mask=part < parts, other=0.0) * counts
    mean = tl.sum(sums) / count
    sums = tl.zeros([block], tl.float32)
    for first in range(0, parts, block):
        part = first + tl.arange(0, block)
        counts = tl.minimum(tl.maximum(pixels - part * block_pixels, 0), block_pixels) * size
        distance = tl.load(place + part, mask=part < parts, other=0.0) - mean
        squares = tl.load(place + parts + part, mask=part < parts, other=0.0)
        sums += squares + distance * distance * counts
    out = groups_ptr + tl.program_id(0) * 2
    tl.store(out, mean)
    tl.store(out + 1, 1 / tl.sqrt(tl.sum(sums) / count + eps))


@triton.jit
def apply_kernel(
    hidden_ptr,
    groups_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    pixels,
    channels,
    size,
    channels_last: tl.constexpr,
    block_pixels: tl.constexpr,
    block_groups: tl.constexpr,
    block_size: tl.constexpr,
):
    groups = channels // size
    group = tl.program_id(1) * block_groups + tl.arange(0, block_groups)
    place = groups_ptr + (tl.program_id(2) * groups + group) * 2
    mean = tl.load(place, mask=group < groups, other=0.0)
    scale = tl.load(place + 1, mask=group < groups, other=0.0)

    channel, address, exists, mask = _part(
        pixels, channels, size, channels_last, block_pixels, block_groups, block_size
    )
    hidden = tl.load(hidden_ptr + address, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + channel, mask=exists, other=0.0).to(tl.float32) * scale[:, None]
    bias = tl.load(bias_ptr + channel, mask=exists, other=0.0).to(tl.float32)
    normed = (hidden - mean[None, :, None]) * weight[None] + bias[None]
    tl.store(out_ptr + address, (normed * tl.sigmoid(normed)).to(out_ptr.dtype.element_ty), mask=mask)


def group_norm_silu(hidden, num_groups, weight, bias, eps):
    if not hidden.is_contiguous(memory_format=torch.channels_last):
        hidden = hidden.contiguous()
    out = torch.empty_like(hidden)
    yield out
    batch, channels, height, width = hidden.shape
    pixels, size = height * width, channels // num_groups
    block_size = triton.next_power_of_2(size)
    # Neighbours in memory are pixels of a channel or, in channels_last, channels of a pixel. There, groups share a
    # part until it fills 128 bytes.
    block_groups, channels_last = 1, not hidden.is_contiguous()
    if channels_last:
        block_groups = min(triton.next_power_of_2(num_groups), triton.cdiv(128 // hidden.element_size(), block_size))
    block_pixels = max(1, _PART // (block_groups * block_size))
    parts = triton.cdiv(pixels, block_pixels)
    moments = torch.empty(batch, num_groups, 2, parts, dtype=torch.float32, device=hidden.device)
    of_groups = torch.empty(batch, num_groups, 2, dtype=torch.float32, device=hidden.device)
    sizes, grid = (pixels, channels, size), (parts, triton.cdiv(num_groups, block_groups), batch)
    blocks = {"block_pixels": block_pixels, "block_groups": block_groups, "block_size": block_size}
    blocks["channels_last"] = channels_last
    moments_kernel[grid](hidden, moments, *sizes, **blocks)
    combined = min(_COMBINED, triton.next_power_of_2(parts))
    combine_kernel[(batch * num_groups,)](moments, of_groups, pixels, size, parts, eps, block_pixels, combined)
    apply_kernel[grid](hidden, of_groups, weight, bias, out, *sizes, **blocks)
