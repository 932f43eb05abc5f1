"""Products of a few rows on a processor, which read weights in int8 as they are stored."""

import sys

import torch


# The most rows for which this takes less time than to convert the weight first, by the instructions that torch uses
# of a processor: for weights of more than `SMALL` numbers, and for the others. `benchmarks/int8_rows.py` measures it.
# The operator computes one number at a time in other dtypes, and on Windows; ARM was not measured.
MOST_ROWS = {"AVX512": (8, 16), "AVX2": (8, 8)} if sys.platform == "linux" else {}
SMALL = 2**20
DTYPE = torch.bfloat16
# It sums this many products at a time: widths are multiples of it.
WIDTH = 16
# It needs tensors that begin at multiples of so many bytes, as those that torch allocates do.
ALIGNMENT = 64


def most_rows(count: int) -> int:
    """The most rows of a product with a weight of `count` numbers that `int8_product` should take."""
    large, small = MOST_ROWS.get(torch.backends.cpu.get_cpu_capability(), (0, 0))
    return small if count <= SMALL else large


def reads_int8(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `int8_product` takes the product of `x` [..., D] and `weight` [N, D]."""
    # Compilers do not know where tensors lie, nor do tensors without memory, which are of another type.
    if torch.compiler.is_compiling() or type(x) is not torch.Tensor or x.device.type != "cpu":
        return False
    plain = x.dtype == DTYPE and weight.dtype == torch.int8 and not x.requires_grad and x.shape[-1] % WIDTH == 0
    return plain and x.numel() <= most_rows(weight.numel()) * x.shape[-1]


def int8_product(x: torch.Tensor, weight: torch.Tensor, scale: torch.FloatTensor) -> torch.Tensor:
    """x (scale W)^T [..., N] of `x` [..., D] in bfloat16 and a weight in int8, with sums in float32. The scale of each
    row is one that bfloat16 has."""
    # It has no public name. Nothing that has one reads int8 without a compiler: torchao's layers convert it, and
    # dynamic quantisation rounds activations too.
    rows = _aligned(x.reshape(-1, x.shape[-1]).contiguous())
    product = torch.ops.aten._weight_int8pack_mm(rows, _aligned(weight), scale.to(x.dtype))
    return product.view(*x.shape[:-1], len(weight))


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


def describe() -> str:
    """Which products of layers in int8 take `int8_product`, in a few words."""
    large, small = most_rows(SMALL + 1), most_rows(SMALL)
    if not small:
        return "converted for every product"
    rows = f"{large} rows" if large == small else f"{large} rows, {small} of up to {SMALL:,} weights"
    return f"read as stored in bfloat16 products of up to {rows}; else converted for every product"
