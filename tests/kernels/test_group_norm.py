"""SiLU of group norm is that of float64, in both memory formats."""

import pytest
import torch
import torch.nn.functional as F

from arimage.kernels.group_norm import group_norm_silu


EPS = 1e-6
# Channels, groups, height, width: a group of one channel, of five, of all; one pixel; parts that are not whole.
SIZES = [(32, 32, 5, 7), (20, 4, 16, 16), (6, 1, 3, 50), (64, 8, 1, 1), (12, 2, 40, 60), (96, 32, 9, 33)]
ROUNDING = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def arguments(channels, groups, height, width, dtype=torch.float32, channels_last=False, mean=0.5):
    generator = torch.Generator().manual_seed(channels)
    shape = (2, height, width, channels) if channels_last else (2, channels, height, width)
    # What lies around the images must not be read.
    memory = torch.full((2 * channels * height * width + 256,), torch.nan, dtype=dtype)
    hidden = memory[128:-128].view(shape).copy_(torch.randn(shape, generator=generator) + mean)
    weight, bias = (torch.randn(channels, generator=generator).to(dtype) for _ in range(2))
    return hidden.permute(0, 3, 1, 2) if channels_last else hidden, groups, weight, bias, EPS


def expected(hidden, groups, weight, bias, eps):
    return F.silu(F.group_norm(hidden.double(), groups, weight.double(), bias.double(), eps)).to(hidden.dtype)


def assert_close(actual, given):
    rounding = ROUNDING[given[0].dtype]
    assert actual.dtype == given[0].dtype
    torch.testing.assert_close(actual, expected(*given), atol=rounding, rtol=rounding)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_definition_is_that_of_float64(size, channels_last):
    given = arguments(*size, channels_last=channels_last)
    before = given[0].clone()
    assert_close(group_norm_silu(*given), given)
    assert torch.equal(given[0], before)


@pytest.mark.parametrize("channels_last", [False, True])
def test_large_images_are_as_precise_as_small_ones(channels_last):
    given = arguments(4, 1, 768, 768, channels_last=channels_last, mean=30.0)
    torch.testing.assert_close(group_norm_silu(*given), expected(*given), atol=1e-4, rtol=1e-4)


def test_the_definition_has_gradients():
    hidden, groups, weight, bias, eps = (
        a.double().requires_grad_() if isinstance(a, torch.Tensor) else a for a in arguments(4, 2, 3, 3)
    )
    torch.autograd.gradcheck(
        lambda *tensors: group_norm_silu(tensors[0], groups, *tensors[1:], eps), (hidden, weight, bias)
    )


# By default each size and layout in one dtype.
@pytest.mark.every(6)
@pytest.mark.parametrize(
    ("size", "channels_last", "dtype"),
    [
        pytest.param(
            size,
            channels_last,
            dtype,
            id=f"{size}-{'last' if channels_last else 'first'}-{dtype}",
            marks=[] if (i + j + channels_last) % len(ROUNDING) == 0 else pytest.mark.slow,
        )
        for i, size in enumerate(SIZES)
        for j, dtype in enumerate(ROUNDING)
        for channels_last in (False, True)
    ],
)
def test_triton_is_that_of_float64(on_triton, size, channels_last, dtype):
    given = arguments(*size, dtype=dtype, channels_last=channels_last)
    actual = on_triton("group_norm", "group_norm_silu", *given)[0]
    assert_close(actual, given)
    for order in (torch.contiguous_format, torch.channels_last):
        assert actual.is_contiguous(memory_format=order) == given[0].is_contiguous(memory_format=order)


@pytest.mark.parametrize("channels_last", [False, True])
def test_many_parts_are_combined_in_blocks(on_triton, monkeypatch, channels_last):
    kernels = pytest.importorskip("arimage.kernels.group_norm.triton")
    monkeypatch.setattr(kernels, "_PART", 32)
    monkeypatch.setattr(kernels, "_COMBINED", 16)
    given = arguments(12, 2, 41, 7, channels_last=channels_last, mean=100.0)
    actual = on_triton("group_norm", "group_norm_silu", *given)[0]
    torch.testing.assert_close(actual, expected(*given), atol=1e-4, rtol=0)


@pytest.mark.parametrize("channels_last", [False, True])
def test_a_large_mean_costs_no_precision(on_triton, channels_last):
    given = arguments(12, 2, 40, 60, channels_last=channels_last, mean=1000.0)
    actual = on_triton("group_norm", "group_norm_silu", *given)[0]
    torch.testing.assert_close(actual, expected(*given), atol=1e-3, rtol=0)


def test_images_in_another_order_are_copied(on_triton):
    hidden, *others = arguments(20, 4, 16, 16)
    given = hidden.transpose(2, 3), *others
    torch.testing.assert_close(
        on_triton("group_norm", "group_norm_silu", *given)[0], expected(*given), atol=2e-6, rtol=0
    )


def test_what_is_not_finite_stays_in_its_group(on_triton):
    hidden, *others = arguments(20, 4, 16, 16)
    hidden[0, 7, 3, 3] = torch.inf
    actual = on_triton("group_norm", "group_norm_silu", hidden, *others)[0]
    assert actual[0, 5:10].isnan().all()
    assert actual.isnan().sum() == actual[0, 5:10].numel()


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("channels_last", "blocks"),
    [(False, (1024, 1, 4)), (False, (256, 1, 16)), (True, (64, 16, 4)), (True, (64, 8, 8))],
)
def test_the_kernels_compile_without_spills(compile_kernel, dtype, channels_last, blocks):
    pointers = {"hidden_ptr": f"*{dtype}", "moments_ptr": "*fp32"}
    sizes = dict.fromkeys(["pixels", "channels", "size"], "i32")
    constants = dict(zip(["block_pixels", "block_groups", "block_size"], blocks, strict=True))
    constants["channels_last"] = channels_last
    compile_kernel("group_norm", "moments_kernel", pointers | sizes, constants)
    pointers = {"hidden_ptr": f"*{dtype}", "groups_ptr": "*fp32"}
    pointers |= dict.fromkeys(["weight_ptr", "bias_ptr", "out_ptr"], f"*{dtype}")
    compile_kernel("group_norm", "apply_kernel", pointers | sizes, constants)


@pytest.mark.parametrize("block", [64, 1024])
def test_the_kernel_of_groups_compiles_without_spills(compile_kernel, block):
    signature = {"moments_ptr": "*fp32", "groups_ptr": "*fp32", "eps": "fp32"}
    signature |= dict.fromkeys(["pixels", "size", "parts"], "i32")
    compile_kernel("group_norm", "combine_kernel", signature, {"block_pixels": 64, "block": block})
