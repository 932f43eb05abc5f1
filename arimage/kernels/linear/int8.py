"""Products with weights in int8 on a processor: small ones as they are stored, others as bytes, by size alone."""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import library
from torch.utils._pytree import tree_map_only


# Weights of up to this many numbers are read as they are stored, in bfloat16 products of up to so many rows, by the
# instructions that torch uses of a processor: what makes bytes of `x` would take longer than the product. More rows
# convert them. `benchmarks/int8_rows.py` measures it.
SMALL = 2**20
STORED_ROWS = {"AVX512": 16, "AVX2": 8} if sys.platform == "linux" else {}
# The operator sums this many products at a time, so widths are multiples of it, and needs tensors that begin at
# multiples of so many bytes, as those that torch allocates do.
WIDTH, ALIGNMENT = 16, 64
# How many bytes are a number of `x`: each counts steps of 1 / FINER of those of the one before.
BYTES = {torch.bfloat16: 2, torch.float16: 2, torch.float32: 3}
LARGEST, FINER = 127, 254
SMALLEST = 1e-30
ZERO = torch.zeros(1, dtype=torch.long)
# The most rows at a time, which limits what a long prompt takes. Bits of a row do not depend on it: sums are exact.
MOST_ROWS = 128


# Whether the processor has instructions that add up products of bytes without overflow (VNNI, AMX). With those that
# others have, oneDNN adds pairs of products in 16 bits. ARM, macOS and Windows were not measured.
HAS_BYTES = sys.platform == "linux" and torch.cpu._is_vnni_supported() and torch.backends.mkldnn.is_available()


class PackedWeight(torch.Tensor):
    """A weight int8 [N, D] whose bytes lie as the processor multiplies them. Everything but `int8_product` reads it
    as it was."""

    packed: torch.Tensor

    @staticmethod
    def __new__(cls, packed: torch.Tensor, requires_grad: bool | None = None) -> Any:
        if requires_grad is not None:
            # accelerate makes a parameter of another tensor by the type of the one that it replaces.
            return torch.nn.Parameter(packed, requires_grad)
        shape = packed.shape[1], packed.shape[0]
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=packed.dtype, device=packed.device)  # pyright: ignore[reportAttributeAccessIssue]

    def __init__(self, packed: torch.Tensor):
        self.packed = packed

    @classmethod
    def of(cls, weight: torch.Tensor) -> "PackedWeight":
        return cls(torch.ops.onednn.qlinear_prepack(weight, None))

    def __deepcopy__(self, memo: dict) -> torch.nn.Parameter:
        return torch.nn.Parameter(PackedWeight(self.packed.clone()), requires_grad=False)

    def plain(self) -> torch.Tensor:
        return self.packed.to_dense().t().contiguous()

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["packed"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], *_: Any) -> "PackedWeight":
        return cls(inner["packed"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].packed)
        if func._schema.is_mutable:
            raise NotImplementedError("packed weights are not written to: replace them")
        plain = tree_map_only(cls, cls.plain, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


def takes_bytes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `int8_product` takes the product of `x` [..., D] and a weight in int8 [N, D], packed or not."""
    # Tensors without memory are of another type, and so are those that are divided over devices.
    plain = type(x) is torch.Tensor and type(weight) in (torch.nn.Parameter, PackedWeight)
    fits = x.dtype in BYTES and weight.dtype == torch.int8 and x.device.type == weight.device.type == "cpu"
    wanted = HAS_BYTES and weight.numel() > SMALL and not x.requires_grad and not torch.is_autocast_enabled("cpu")
    return plain and fits and wanted


def takes_stored(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `stored_product` takes the product of `x` [..., D] and a weight in int8 [N, D]."""
    # Compilers do not know where tensors lie.
    if torch.compiler.is_compiling() or type(x) is not torch.Tensor or x.device.type != "cpu":
        return False
    plain = x.dtype == torch.bfloat16 and weight.dtype == torch.int8 and not x.requires_grad
    few = x.numel() <= STORED_ROWS.get(torch.backends.cpu.get_cpu_capability(), 0) * x.shape[-1]
    return plain and few and weight.numel() <= SMALL and x.shape[-1] % WIDTH == 0


def stored_product(x: torch.Tensor, weight: torch.Tensor, scale: torch.FloatTensor) -> torch.Tensor:
    """x (scale W)^T [..., N] of `x` [..., D] in bfloat16 and a weight in int8, with sums in float32. The scale of each
    row is one that bfloat16 has."""
    # It has no public name. Nothing that has one reads int8 without a compiler.
    rows = _aligned(x.reshape(-1, x.shape[-1]).contiguous())
    product = torch.ops.aten._weight_int8pack_mm(rows, _aligned(weight), scale.to(x.dtype))
    return product.view(*x.shape[:-1], len(weight))


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


def int8_product(x: torch.Tensor, weight: PackedWeight, scale: torch.FloatTensor) -> torch.Tensor:
    """x (scale W)^T [..., N] of `x` [..., D] and a weight in int8.

    A number of `x` becomes the sum of two bytes, or of three in float32, so that it is off by at most 1 / 64,516 of
    the largest number of its row: the products are rounded to `x.dtype` once, as those with full weights are. Sums of
    products of bytes are exact, so no row depends on the others, nor on how many there are.
    """
    if torch.compiler.is_compiling():
        return _operator(x, weight.packed, scale)
    return int8_products(x, [(weight, scale)])[0]


def int8_products(x: torch.Tensor, weights: Sequence[tuple[PackedWeight, torch.FloatTensor]]) -> list[torch.Tensor]:
    """`int8_product` of `x` with several weights and their scales, whose bytes it makes once."""
    return _products(x, [(weight.packed, scale) for weight, scale in weights])


def _products(x: torch.Tensor, weights: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    made = [(_as_bytes(part), part) for part in x.reshape(-1, x.shape[-1]).split(MOST_ROWS)]
    products = []
    for packed, scale in weights:
        parts = [_product_of_bytes(*each, part.dtype, packed, scale) for each, part in made]
        products.append((parts[0] if len(parts) == 1 else torch.cat(parts)).view(*x.shape[:-1], len(scale)))
    return products


def _as_bytes(x: torch.Tensor) -> tuple[torch.Tensor, torch.FloatTensor]:
    """The bytes of the numbers of `x` [R, D], int8 [bytes * R, D], and of how much each row counts steps, [R, 1]."""
    # A row of zeros stays zeros.
    unit = x.abs().amax(-1, keepdim=True).float().clamp_(min=SMALLEST).div_(LARGEST)
    rest = x / unit
    parts = [rest.round()]
    while len(parts) < BYTES[x.dtype]:
        rest = rest.sub_(parts[-1]).mul_(FINER)
        parts.append(rest.round())
    return torch.cat(parts).to(torch.int8), unit


def _product_of_bytes(
    made: torch.Tensor, unit: torch.FloatTensor, dtype: torch.dtype, packed: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    # It has no public name. Nothing that has one keeps the scale of each row of `x`.
    sums = torch.ops.onednn.qlinear_pointwise(
        made,
        *(1.0, 0, packed, scale, ZERO, None),
        *(1.0, 0, torch.float32, "none", [], ""),
    )
    *coarser, total = sums.split(len(unit))
    while coarser:
        total = torch.add(coarser.pop(), total, alpha=1 / FINER)
    return total.mul_(unit).to(dtype)


# Compilers do not look into it.
_operator: Any = library.custom_op(
    "arimage::int8_product",
    lambda x, packed, scale: _products(x, [(packed, scale)])[0],
    mutates_args=(),
    schema="(Tensor x, Tensor packed, Tensor scale) -> Tensor",
)
_operator.register_fake(lambda x, packed, scale: x.new_empty(*x.shape[:-1], len(scale)))


def describe() -> str:
    """What layers in int8 do on this processor, in a few words."""
    rows = STORED_ROWS.get(torch.backends.cpu.get_cpu_capability(), 0)
    small = f"read as stored in bfloat16 products of up to {rows} rows with up to {SMALL:,} of them; " if rows else ""
    large = "more than that are multiplied as bytes; " if HAS_BYTES else ""
    return f"{small}{large}else converted for every product".removeprefix("else ")
