"""The rotation of queries and keys is a multiplication by complex numbers."""

import pytest
import torch

from arimage.kernels import operation
from arimage.kernels.rotary import rotate


SIZES = [(1, 1, 1, 4), (2, 5, 3, 12), (3, 2, 17, 64)]


def inputs(size, dtype, rows):
    generator = torch.Generator().manual_seed(0)
    batch, length, heads, width = size
    qkv = torch.randn(batch, length, 3 * heads, width, generator=generator).to(dtype)
    angles = 6 * torch.rand(rows, length, width // 2, generator=generator)
    return qkv[:, :, : 2 * heads], torch.stack([angles.cos(), angles.sin()], dim=-1)


def expected(states, table):
    outcome = torch.empty_like(states, dtype=torch.float32)
    for *place, head, axis in torch.cartesian_prod(*map(torch.arange, states.shape)).tolist():
        cos, sin = table[min(place[0], len(table) - 1), place[1], axis // 2].tolist()
        even, odd = states[(*place, head)][axis // 2 * 2 : axis // 2 * 2 + 2].tolist()
        outcome[(*place, head, axis)] = odd * cos + even * sin if axis % 2 else even * cos - odd * sin
    return outcome.to(states.dtype)


@pytest.mark.every(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("shared", [False, True])
def test_both_forms_rotate_neighbouring_pairs(on_triton, size, dtype, shared):
    states, table = inputs(size, dtype, 1 if shared else size[0])
    wanted = expected(states, table)
    torch.testing.assert_close(rotate(states, table), wanted)
    (rotated,) = on_triton("rotary", "rotate", states, table)
    assert rotated.is_contiguous()
    torch.testing.assert_close(rotated, wanted)


def test_the_compiled_form_is_the_same_and_needs_no_kernel(monkeypatch):
    states, table = inputs(SIZES[1], torch.float32, 2)
    wanted = rotate(states, table)
    # The kernel would refuse tensors on the CPU.
    monkeypatch.setattr(operation, "DEVICES", {"cpu"})
    compiled = torch.compile(rotate, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(states, table), wanted)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_kernel_compiles_without_spills(compile_kernel, dtype):
    signature = {"states_ptr": f"*{dtype}", "table_ptr": "*fp32", "out_ptr": f"*{dtype}"}
    signature |= dict.fromkeys(["length", "heads", "width"], "i32")
    signature |= dict.fromkeys(["stride_row", "stride_token", "stride_head", "table_row", "table_token"], "i32")
    compile_kernel("rotary", "rotate_kernel", signature, {"block_heads": 16, "block_pairs": 32})
