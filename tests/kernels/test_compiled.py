"""A compiled function that calls a Triton implementation is one graph with the same result."""

import importlib

import pytest
import torch
from torch import library

from arimage.kernels.window import Drafting


def arguments(function):
    generator = torch.Generator().manual_seed(0)
    logits, noise = torch.randn(2, 2, 3, 40, generator=generator), torch.rand(2, 3, 2, generator=generator)
    p, x, rows = logits[0].softmax(-1), torch.arange(6).view(2, 3), torch.tensor([1, 5])
    return {
        "probabilities": (logits, noise[:, 0, 0], 0.9, rows, 0.9, None),
        "sample": (p, noise[..., 0]),
        "sample_at": (p, rows, x, rows, 3),
        "race_at": (p, rows, x, rows, 3),
        "couple_at": (p, logits[1].softmax(-1), x, rows, x, rows, 3),
        "open_step": (rows % 3, rows > 3, x, 1),
        "open_window": (1 + x % 2, x, 3, 1, 3),
        "couple": (p, logits[1].softmax(-1), x, noise),
        "couple_window": (p, logits[1].softmax(-1), x, noise, x < 5),
        "sample_siblings": (p, noise, x),
        "couple_siblings": (p, logits[1].softmax(-1), x[..., None] + torch.arange(2), noise.repeat(1, 1, 2)[..., :3]),
        "uniforms": (rows, x, rows, 3, 5),
        "exponentials": (rows, x, rows, 3, 5),
        "normals": (rows, x, rows, 3, 5),
        "neighbour_mass": (p, x, torch.arange(120).view(40, 3).int() % 40, noise[..., 0]),
        "group_norm_silu": (logits.transpose(1, 2), 3, noise[0, :, 0], noise[1, :, 0], 1e-6),
    }[function]


FUNCTIONS = [
    ("probabilities", "probabilities"),
    ("coupling", "sample"),
    ("coupling", "couple"),
    ("coupling", "sample_at"),
    ("coupling", "race_at"),
    ("coupling", "couple_at"),
    ("cursor", "open_step"),
    ("window", "open_window"),
    ("coupling", "couple_window"),
    ("siblings", "sample_siblings"),
    ("siblings", "couple_siblings"),
    ("noise", "uniforms"),
    ("noise", "exponentials"),
    ("noise", "normals"),
    ("neighbours", "neighbour_mass"),
    ("group_norm", "group_norm_silu"),
]


@pytest.mark.every(8)
@pytest.mark.parametrize(("operation", "function"), FUNCTIONS)
def test_a_kernel_breaks_no_graph(interpreter, operation, function):
    call = operation, function, arguments(function)
    for compiled, eager in zip(interpreter.call(*call, compiled=True), interpreter.call(*call), strict=True):
        assert torch.equal(compiled, eager)


def progress():
    """Cursor, finished, steps and accepted of two images of 9 tokens."""
    return torch.tensor([7, 9]), torch.tensor([False, True]), torch.tensor([2, 5]), torch.zeros(10, 2).long()


def in_place(function):
    """The arguments of a function that writes some of them, and their places."""
    generator = torch.Generator().manual_seed(0)
    positions, tokens = torch.tensor([[8, 7], [9, 10]]), torch.arange(24).view(2, 12)
    q, p = torch.rand(2, 2, 2, 40, generator=generator).softmax(-1)
    start, sums = torch.full((2, 40), 1 / 40), torch.arange(1, 41).div(40).repeat(2, 1)
    invalid, fresh, end = torch.tensor([False, False]), positions % 2 == 0, torch.tensor([9, 9])
    logits, seeds = torch.where(fresh[..., None], p, torch.nan)[None], torch.tensor([1, 5])
    slots, window = (
        (positions, fresh, tokens, q, p, end, *Drafting(start, sums, None), None, None),
        (seeds, seeds, 3, 2, 9),
    )
    return {
        "probabilities": ((logits, 1.0, 1.0, 3, 0.9, None, 0.0, None, None, invalid, positions > 8), [9]),
        "close_step": ((positions, positions + 1, tokens, *progress(), 9), range(2, 7)),
        "advance": ((end, *progress(), 9), range(1, 5)),
        "close_window": ((positions, positions > 6, positions + 1, None, tokens, *progress(), 1, 9), range(4, 9)),
        "slide_window": ((*slots, *window), range(4)),
    }[function]


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("operation", "function"),
    [
        ("probabilities", "probabilities"),
        ("cursor", "close_step"),
        ("cursor", "advance"),
        ("window", "close_window"),
        ("window", "slide_window"),
    ],
)
def test_a_kernel_that_writes_its_arguments_breaks_no_graph(interpreter, operation, function):
    arguments, written = in_place(function)
    eager, compiled = (
        interpreter.call(operation, function, arguments, compiled=compiled, written=written)
        for compiled in (False, True)
    )
    definition = torch.compile(
        getattr(importlib.import_module(f"arimage.kernels.{operation}"), function), backend="aot_eager", fullgraph=True
    )
    definition(*arguments)
    for place, ours, theirs in zip(written, eager[-len(written) :], compiled[-len(written) :], strict=True):
        assert torch.equal(ours, theirs) and torch.equal(ours, arguments[place])
        assert not torch.equal(ours, in_place(function)[0][place])


@pytest.mark.every(6)
@pytest.mark.parametrize(("operation", "function"), FUNCTIONS)
def test_its_definition_breaks_none_either(operation, function):
    eager = getattr(importlib.import_module(f"arimage.kernels.{operation}"), function)
    compiled = torch.compile(eager, backend="aot_eager", fullgraph=True)
    for actual, expected in zip(compiled(*arguments(function)), eager(*arguments(function)), strict=True):
        assert torch.equal(actual, expected)


# Two take other arguments than their operators, and the definition of the third returns a part of what it computes.
OTHERS = ("probabilities", "couple_window", "normals")


@pytest.mark.parametrize("function", [name for _, name in FUNCTIONS if name not in OTHERS])
def test_what_kernels_fill_has_the_shapes_of_the_definition(function):
    pytest.importorskip("triton", reason="triton is not installed")
    importlib.import_module(f"arimage.kernels.{dict(map(reversed, FUNCTIONS))[function]}")
    operator = getattr(torch.ops.arimage, function).default
    library.opcheck(operator, arguments(function), test_utils=("test_schema", "test_faketensor"))
