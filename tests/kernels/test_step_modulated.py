"""The kernels of modulated layers are what torch computes, and no row depends on the others."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from arimage.kernels.step import MOST_ROWS
from arimage.kernels.step.attention import text_attention, unit_attention
from arimage.kernels.step.head_norms import unit_heads
from arimage.kernels.step.modulated import modulated
from arimage.kernels.step.modulated_norm import modulated_norm, sum_and_norm
from arimage.kernels.step.modulations import modulations


TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}
# The interpreter multiplies no bfloat16.
ROUNDED = {"rtol": 2e-3, "atol": 2e-3}
# rows, of how many images, width, size: an odd multiple of 64 as width, and a size that blocks do not divide.
SHAPES = [(1, 1, 64, 96), (6, 2, 192, 100), (33, 3, 128, 40)]


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def given(shape, kind, dtype=torch.float32):
    """Arguments of `modulated`, as the layers of a kind of model pass them."""
    rows, images, width, size = shape
    # A large mean costs no precision, and rows may lie apart.
    x, parts = (
        (random(rows, 2 * width) + 10)[:, width:],
        random(images, 6 * width, seed=1).unflatten(1, (6, -1)).unbind(1),
    )
    arguments = {"x": x, "weight": random(size, width, seed=2) / width**0.5, "bias": random(size, seed=3)}
    arguments |= dict.fromkeys(("eps", "norm_weight", "norm_bias", "scale", "shift"))
    arguments |= {"added": 0.0, "residual": None, "gate": None, "activation": "", "precise": False, "row_scale": None}
    if kind in ("norm", "affine", "all"):
        arguments |= {"eps": 1e-6, "activation": "gelu_tanh"}
    if kind in ("affine", "all"):
        arguments |= {"norm_weight": random(width, seed=4), "norm_bias": random(width, seed=5), "activation": "silu"}
    if kind in ("norm", "all"):
        # Not contiguous.
        arguments |= {"scale": parts[0], "shift": parts[1], "added": 1.0}
    if kind in ("gated", "all"):
        gates = random(images, 2 * size, seed=6)[:, size:]
        arguments |= {"residual": random(rows, 2 * size, seed=7)[:, size:], "gate": gates}
    if kind == "residual":
        arguments |= {"residual": random(images, size, seed=7), "activation": "gelu"}
    halves = {"x", "weight", "bias"} if kind == "plain" else {"weight", "bias"}
    return {
        name: value.to(dtype) if name in halves and value is not None else value for name, value in arguments.items()
    }


def by_hand(
    x, weight, bias, eps, norm_weight, norm_bias, scale, shift, added, residual, gate, activation, precise, row_scale
):
    """Row by row, in double precision."""
    outcome = []
    for i, row in enumerate(x.double()):
        if eps is not None:
            row = (row - row.mean()) / (row.var(correction=0) + eps).sqrt()
            if norm_weight is not None:
                row = row * norm_weight + norm_bias
        if scale is not None:
            image = i * len(scale) // len(x)
            row = row * (scale[image].double() + added) + shift[image]
        dtype = torch.float32 if precise else weight.dtype if row_scale is None else bias.dtype
        row = weight.double() @ row.to(dtype).double() * (1 if row_scale is None else row_scale) + bias
        if gate is not None:
            row = row * gate[i * len(gate) // len(x)]
        if residual is not None:
            row = row + residual[i * len(residual) // len(x)]
        apply = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh")}
        outcome.append(apply[activation](row) if activation else row)
    return torch.stack(outcome)


@pytest.mark.every(8)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["plain", "norm", "affine", "residual", "gated", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_modulated_layer(on_triton, shape, kind, dtype):
    arguments = given(shape, kind, dtype)
    x, weight, bias, *_ = arguments.values()
    expected = by_hand(**arguments).to(dtype if arguments["residual"] is None else torch.float32)
    tolerance = TOLERANCE if dtype == torch.float32 else ROUNDED
    named = {name: value for name, value in arguments.items() if name not in ("x", "weight", "bias")}
    torch.testing.assert_close(modulated(x, weight, bias, **named), expected, **tolerance)
    (found,) = on_triton("step.modulated", "modulated", *arguments.values())
    torch.testing.assert_close(found, expected, **tolerance)


@pytest.mark.parametrize("kind", ["plain", "norm"])
def test_a_precise_product_rounds_no_row(on_triton, kind):
    arguments = given(SHAPES[1], kind, torch.float16) | {"precise": True}
    expected = by_hand(**arguments).float()
    x, weight, bias, *rest = arguments.values()
    named = dict(zip(list(arguments)[3:], rest, strict=True))
    torch.testing.assert_close(modulated(x, weight, bias, **named), expected, **TOLERANCE)
    (found,) = on_triton("step.modulated", "modulated", *arguments.values())
    torch.testing.assert_close(found, expected, **TOLERANCE)


def eight_bits(weight, dtype):
    scale = weight.float().abs().amax(1) / 127
    rows = weight.float() / scale[:, None]
    return (rows.round() if dtype == torch.int8 else rows).to(dtype), scale


@pytest.mark.parametrize("kind", ["plain", "all"])
@pytest.mark.parametrize("bits", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_weights_of_8_bits(on_triton, kind, bits, dtype):
    arguments = given(SHAPES[1], kind, dtype)
    arguments["weight"], arguments["row_scale"] = eight_bits(arguments["weight"], bits)
    expected = by_hand(**arguments).to(dtype if arguments["residual"] is None else torch.float32)
    x, weight, bias, *rest = arguments.values()
    named = dict(zip(list(arguments)[3:], rest, strict=True))
    tolerance = TOLERANCE if dtype == torch.float32 else ROUNDED
    torch.testing.assert_close(modulated(x, weight, bias, **named), expected, **tolerance)
    (found,) = on_triton("step.modulated", "modulated", *arguments.values())
    torch.testing.assert_close(found, expected, **tolerance)
    scale, x = arguments["row_scale"], arguments["x"].to(dtype)
    expected = ((x.double() @ weight.double().T) * scale + bias).to(dtype).repeat(1, 2)
    shared = x, [weight] * 2, [bias] * 2, [scale] * 2
    torch.testing.assert_close(modulations(*shared), expected, **tolerance)
    torch.testing.assert_close(*on_triton("step.modulations", "modulations", *shared), expected, **tolerance)


@pytest.mark.parametrize("kind", ["norm", "affine", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_modulated_norm(on_triton, kind, dtype):
    arguments = given((6, 2, 192, 192), kind, dtype)
    arguments |= {"weight": torch.eye(192).to(dtype), "bias": torch.zeros(192), "activation": ""}
    expected = by_hand(**arguments | {"residual": None, "gate": None}).to(dtype)
    x, _, _, eps, *rest = list(arguments.values())[:9]
    tolerance = TOLERANCE if dtype == torch.float32 else ROUNDED
    torch.testing.assert_close(modulated_norm(x, eps, dtype, *rest), expected, **tolerance)
    (found,) = on_triton("step.modulated_norm", "modulated_norm", x, eps, dtype, *rest)
    torch.testing.assert_close(found, expected, **tolerance)


@pytest.mark.parametrize("kind", ["norm", "affine"])
@pytest.mark.parametrize("gated", [False, True], ids=["sum", "gated sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_sum_and_its_norm(on_triton, kind, gated, dtype):
    arguments = given((6, 2, 192, 192), kind)
    eps, *norm = list(arguments.values())[3:8]
    product, residual = random(6, 192, seed=6).to(dtype), arguments["x"]
    gate = random(2, 192, seed=7) if gated else None
    total = residual + product * (1 if gate is None else gate.repeat_interleave(3, 0))
    plain = {"weight": torch.eye(192), "bias": torch.zeros(192), "residual": None, "activation": "", "added": 0.0}
    expected = total, by_hand(**arguments | plain | {"x": total}).to(dtype)
    tolerance = TOLERANCE if dtype == torch.float32 else ROUNDED
    torch.testing.assert_close(sum_and_norm(product, residual, gate, eps, *norm), expected, **tolerance)
    found = on_triton("step.modulated_norm", "sum_and_norm", product, residual.contiguous(), gate, eps, *norm)
    torch.testing.assert_close(tuple(found), expected, **tolerance)


@pytest.mark.parametrize("kind", ["plain", "norm", "affine", "residual", "gated"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_many_rows(kind, dtype):
    arguments = given((MOST_ROWS + 3, 3, 64, 40), kind, dtype)
    x, weight, bias, *rest = arguments.values()
    named = dict(zip(list(arguments)[3:], rest, strict=True))
    expected = by_hand(**arguments).to(dtype if arguments["residual"] is None else torch.float32)
    tolerance = TOLERANCE if dtype == torch.float32 else {"rtol": 2e-2, "atol": 5e-2}
    torch.testing.assert_close(modulated(x, weight, bias, **named), expected, **tolerance)


@pytest.mark.parametrize("kind", ["norm", "all"])
def test_a_row_does_not_depend_on_the_others(on_triton, kind):
    arguments = given((33, 3, 192, 40), kind)
    (together,) = on_triton("step.modulated", "modulated", *arguments.values())
    for image in range(3):
        rows = {"x": slice(11 * image, 11 * image + 1), "residual": slice(11 * image, 11 * image + 1)}
        rows |= dict.fromkeys(("scale", "shift", "gate"), slice(image, image + 1))
        alone = {
            name: value[rows[name]] if name in rows and value is not None else value
            for name, value in arguments.items()
        }
        (alone,) = on_triton("step.modulated", "modulated", *alone.values())
        # Matrix products of the interpreter add in another order for other shapes.
        torch.testing.assert_close(alone[0], together[11 * image], **TOLERANCE)


@pytest.mark.every(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", [(96,), (200, 200, 100), (48, 48)], ids=str)
def test_layers_that_share_their_input(on_triton, sizes, dtype):
    x = random(5, 200).to(dtype)[:, 8:]
    weights = [(random(size, 192, seed=i) / 192**0.5).to(dtype) for i, size in enumerate(sizes)]
    biases = [random(size, seed=9 + i).to(dtype) for i, size in enumerate(sizes)]
    expected = torch.cat(
        [x.float() @ w.float().T + b.float() for w, b in zip(weights, biases, strict=True)], dim=1
    ).to(dtype)
    tolerance = TOLERANCE if dtype == torch.float32 else ROUNDED
    torch.testing.assert_close(modulations(x, weights, biases, []), expected, **tolerance)
    (found,) = on_triton("step.modulations", "modulations", x, weights, biases, [])
    torch.testing.assert_close(found, expected, **tolerance)
    (alone,) = on_triton("step.modulations", "modulations", x[3:4], weights, biases, [])
    torch.testing.assert_close(alone[0], found[3], **tolerance)


# Rows of the cache, of the states, tokens, heads, the width of a head: one that fills no block.
HEADS = [(2, 2, 1, 2, 64), (4, 2, 3, 9, 24)]
FIRST, PLACES = 7, 20


@pytest.mark.every(3)
@pytest.mark.parametrize("shape", HEADS, ids=str)
@pytest.mark.parametrize("tables", [None, "one", "per row"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_heads_of_one_length(on_triton, shape, tables, dtype):
    cached, rows, tokens, heads, width = shape
    states = random(rows, tokens, 3 * heads, width).to(dtype)
    log_scale = random(heads, seed=1) + 4
    table = None if tables is None else random(1 if tables == "one" else rows, tokens, width // 2, 2, seed=2)
    keys, values = (random(cached, heads, PLACES, width, seed=seed).to(dtype) for seed in (3, 4))
    expected = torch.empty(rows, tokens, heads, width), keys.clone(), values.clone()
    for row in range(rows):
        for token in range(tokens):
            turns = table if table is None else torch.view_as_complex(table)[min(row, len(table) - 1), token]
            for head in range(heads):
                query, key, value = states[row, token, head::heads].float()
                query, key = (2 * each / each.norm() for each in (query, key))
                if turns is not None:
                    query, key = (
                        torch.view_as_real(torch.view_as_complex(each.unflatten(0, (-1, 2))) * turns).flatten()
                        for each in (query, key)
                    )
                expected[0][row, token, head] = query * min(log_scale[head].exp(), 100)
                expected[1][row, head, FIRST + token] = key.to(dtype)
                expected[2][row, head, FIRST + token] = value.to(dtype)
    expected = expected[0].to(dtype), *expected[1:]
    arguments = states, log_scale, 2.0, keys, values, FIRST, table
    tolerance = TOLERANCE if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    found = on_triton("step.head_norms", "unit_heads", *arguments, written=(3, 4))
    for each in (found, (unit_heads(*arguments), keys, values)):
        torch.testing.assert_close(tuple(each), expected, **tolerance)


def test_a_head_of_zeros_stays_zero(on_triton):
    states, keys = torch.zeros(1, 1, 6, 8), torch.full((1, 2, 3, 8), torch.nan)
    arguments = states, torch.full((2,), math.log(4.0)), 1.0, keys, keys.clone(), 1, None
    query, keys, values = on_triton("step.head_norms", "unit_heads", *arguments, written=(3, 4))
    assert not query.any() and not keys[:, :, 1].any() and not values[:, :, 1].any()
    assert keys[:, :, ::2].isnan().all() and values[:, :, ::2].isnan().all()


# Rows of the cache, tokens of each, heads, the width of a head: more tokens than a program takes, and a width that
# fills no block.
ATTENDED = [(2, 1, 2, 64), (2, 19, 3, 24)]


@pytest.mark.parametrize("shape", ATTENDED, ids=str)
@pytest.mark.parametrize("tables", [None, "one", "per row"])
@pytest.mark.parametrize("prompt", [0, 5])
def test_attention_of_heads_of_one_length(on_triton, shape, tables, prompt):
    rows, tokens, heads, width = shape
    states = random(rows * tokens, 3 * heads, width)
    log_scale, seen = random(heads, seed=1) + 2, torch.rand(rows, prompt) < 0.6
    table = None if tables is None else random(1 if tables == "one" else rows, tokens, width // 2, 2, seed=2)
    keys, values = (random(rows, heads, prompt + 50, width, seed=seed) for seed in (3, 4))
    stop = prompt + 11 + tokens
    for each in (keys, values):
        each[:, :, stop:] = torch.nan
    cached = keys.clone(), values.clone()
    own = states.unflatten(0, (rows, tokens))
    query = unit_heads(own, log_scale, 2.0, *cached, stop - tokens, table).transpose(1, 2)
    mask = torch.cat([seen, torch.ones(rows, stop - prompt, dtype=torch.bool)], dim=1)[:, None, None]
    expected = F.scaled_dot_product_attention(
        query, *(each[:, :, :stop] for each in cached), attn_mask=mask, scale=0.3
    ).transpose(1, 2)
    arguments = states, log_scale, 2.0, 0.3, keys, values, seen, prompt, stop, table
    found = on_triton("step.attention", "unit_attention", *arguments, written=(4, 5))
    torch.testing.assert_close(found, (expected.reshape(rows * tokens, -1), *cached), **TOLERANCE, equal_nan=True)
    for each in (keys, values):
        each[:, :, stop:] = 0
    torch.testing.assert_close(unit_attention(*arguments), found[0], **TOLERANCE)


@pytest.mark.parametrize("shape", ATTENDED, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_attention_to_a_text(on_triton, shape, dtype):
    rows, tokens, heads, head_dim = shape
    x, weight = random(rows * tokens, 192) + 3, (random(heads * head_dim, 192, seed=1) / 192**0.5).to(dtype)
    bias, gain, shift = (random(size, seed=size).to(dtype) for size in (len(weight), 192, 193))
    # Not contiguous, as parts of one product.
    keys, values = random(rows, 37, 2, heads, head_dim, seed=4).to(dtype).transpose(1, 3).unbind(2)
    seen = torch.arange(37) < torch.tensor([[37], [20]])
    normed = F.layer_norm(x.double(), (192,), gain.double(), shift[:-1].double(), 1e-6)
    query = normed.to(dtype).double() @ weight.double().T + bias.double()
    query = query.to(dtype).double().view(rows, tokens, heads, -1).transpose(1, 2)
    expected = F.scaled_dot_product_attention(query, keys.double(), values.double(), attn_mask=seen[:, None, None])
    expected = expected.transpose(1, 2).reshape(rows * tokens, -1).to(dtype)
    arguments = x, weight, bias, 1e-6, gain, shift[:-1], keys, values, seen
    tolerance = TOLERANCE if dtype == torch.float32 else ROUNDED
    torch.testing.assert_close(text_attention(*arguments), expected, **tolerance)
    torch.testing.assert_close(*on_triton("step.attention", "text_attention", *arguments), expected, **tolerance)
