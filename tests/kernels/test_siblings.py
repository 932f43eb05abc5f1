"""Siblings in Triton equal the reference, whose distribution tests/decoding/test_siblings.py enumerates."""

import pytest
import torch

from arimage.kernels.siblings import couple_siblings, sample_siblings


def arguments(batch, size, count, scale=256):
    """p and q [batch, size] and noise, which float32 adds and multiplies without rounding until a draft is
    rejected."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.empty(2 * batch, size).exponential_(generator=generator) ** 3
    counts = [row.bincount(minlength=size) for row in weights.multinomial(4096, True, generator=generator)]
    p, q = (torch.stack(counts) / 4096).chunk(2)
    return p, q, torch.rand(batch, 2 * count + 1, generator=generator).mul(scale).floor() / scale


@pytest.mark.every(2)
@pytest.mark.parametrize(("size", "count"), [(2, 1), (3, 4), (50, 3), (5003, 2)])
def test_triton_samples_the_same_siblings(on_triton, size, count):
    _, q, noise = arguments(6, size, count)
    (siblings,) = on_triton("siblings", "sample_siblings", q, noise[:, :count], None)
    assert torch.equal(siblings, sample_siblings(q, noise[:, :count], None))
    first = siblings[:, 0].contiguous()
    (others,) = on_triton("siblings", "sample_siblings", q, noise[:, 1:count], first)
    assert torch.equal(others, siblings) and torch.equal(sample_siblings(q, noise[:, 1:count], first), siblings)
    # Without replacement, until none is left.
    for row, possible in zip(siblings.tolist(), (q > 0).sum(1).tolist(), strict=True):
        drafts = [token for token in row if token >= 0]
        assert len(set(drafts)) == len(drafts) == min(count, possible)


@pytest.mark.every(2)
@pytest.mark.parametrize(("size", "count"), [(2, 1), (3, 4), (50, 3), (5003, 2)])
def test_triton_couples_siblings_as_the_definition_does(on_triton, size, count):
    p, q, noise = arguments(40, size, count)
    x = sample_siblings(q, noise[:, :count], None)
    y, which = on_triton("siblings", "couple_siblings", p, q, x, noise[:, count:])
    expected_y, expected_which = couple_siblings(p, q, x, noise[:, count:])
    assert torch.equal(which, expected_which) and torch.equal(y, expected_y)
    assert len(which.unique()) > 1
    assert (p.gather(1, y[:, None]) > 0).all()


def test_what_is_no_draft_changes_nothing(on_triton):
    p, q, noise = arguments(20, 30, 2)
    x, verify = sample_siblings(q, noise[:, :2], None), noise[:, 2:]
    none = torch.full_like(x[:, :1], -1)
    y, which = on_triton("siblings", "couple_siblings", p, q, x, verify)
    padded = torch.cat([none, x[:, :1], none, x[:, 1:]], dim=1)
    verify = verify[:, [0, 0, 1, 1, 2]]
    padded_y, padded_which = on_triton("siblings", "couple_siblings", p, q, padded, verify)
    assert torch.equal(padded_y, y) and torch.equal(padded_which, torch.where(which < 0, -1, 2 * which + 1))


@pytest.mark.parametrize("size", [9, 8192, pytest.param(65536, marks=pytest.mark.slow)])
def test_siblings_compile_without_spills(compile_kernel, size):
    sizes = dict.fromkeys(["vocab_size", "count", "noise_stride"], "i32")
    block = min(4096, 1 << (size - 1).bit_length())
    constants = {"block": block, "blocks": max(1, size // block)}
    floats = dict.fromkeys(["q_ptr", "noise_ptr", "left_ptr"], "*fp32")
    longs = dict.fromkeys(["first_ptr", "out_ptr"], "*i64")
    begun = constants | {"begun": True}
    compile_kernel("siblings", "sample_siblings_kernel", floats | longs | sizes, begun, num_warps=8)
    floats |= dict.fromkeys(["p_ptr", "rest_ptr"], "*fp32")
    longs = dict.fromkeys(["x_ptr", "y_ptr", "which_ptr"], "*i64")
    compile_kernel("siblings", "couple_siblings_kernel", floats | longs | sizes, constants, num_warps=16)
