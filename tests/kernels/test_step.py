"""The kernels of a step are what torch computes, and no row depends on the others."""

import pytest
import torch
import torch.nn.functional as F

import arimage.kernels.step
from arimage.kernels.step.attention import attention, normed_attention
from arimage.kernels.step.embedding import embedding
from arimage.kernels.step.gate import gate
from arimage.kernels.step.head_norms import head_norms
from arimage.kernels.step.keys import write_keys
from arimage.kernels.step.linear import linear
from arimage.kernels.step.norm_and_add import norm_and_add
from arimage.kernels.step.qkv import qkv, queries, unturned
from arimage.kernels.step.rows import open_rows


EPS = 1e-5
TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def eight_bits(weight, dtype):
    """A weight as numbers of 8 bits and one scale per row."""
    scale = weight.abs().amax(1) / 127
    rows = weight / scale[:, None]
    return (rows.round() if dtype == torch.int8 else rows).to(dtype), scale


KINDS = ["plain", "norm", "residual", "gated", "int8", "float8"]
# Rows, width, size: an odd multiple of 64 as width, a size that blocks do not divide, one with larger blocks, and more
# rows than one program takes.
CASES = [(kind, shape) for kind in KINDS for shape in ((1, 128, 96), (33, 192, 100))]
CASES += [("plain", (3, 64, 8200)), ("gated", (70, 64, 40))]


@pytest.mark.every(6)
@pytest.mark.parametrize(("kind", "shape"), CASES, ids=str)
def test_linear(on_triton, kind, shape):
    rows, width, size = shape
    x, gain, weight = random(rows, width), random(width, seed=1), random(size, width, seed=2) / width**0.5
    up = random(size, width, seed=3) / width**0.5 if kind in ("gated", "int8", "float8") else None
    residual = random(rows, size, seed=4) if kind == "residual" else None
    scale = up_scale = None
    if kind in ("int8", "float8"):
        dtype = torch.int8 if kind == "int8" else torch.float8_e4m3fn
        (weight, scale), (up, up_scale) = eight_bits(weight, dtype), eight_bits(up, dtype)
    gain = None if kind in ("plain", "residual") else gain
    expected = linear(x, weight, gain=gain, eps=EPS, up=up, residual=residual, scale=scale, up_scale=up_scale)
    states = x if gain is None else F.rms_norm(x, (width,), gain, EPS)
    both = [
        w.float() * (1 if s is None else s[:, None]) for w, s in ((weight, scale), (up, up_scale)) if w is not None
    ]
    products = [states @ w.T for w in both]
    by_hand = products[0] if up is None else F.silu(products[0]) * products[1]
    torch.testing.assert_close(expected, by_hand if residual is None else by_hand + residual, **TOLERANCE)
    (found,) = on_triton("step.linear", "linear", x, weight, gain, EPS, up, residual, scale, up_scale)
    torch.testing.assert_close(found, expected, **TOLERANCE)


@pytest.mark.parametrize("rows", [3, 20])
def test_a_head_of_some_rows(on_triton, rows):
    x, gain, weight = random(40, 192), random(192, seed=1), random(100, 192, seed=2) / 192**0.5
    bias, index = random(100, seed=3), torch.arange(rows) * 7 % 40
    expected = F.gelu(F.rms_norm(x, (192,), gain, EPS)[index] @ weight.T + bias)
    options = {"gain": gain, "eps": EPS, "bias": bias, "gelu": True, "index": index}
    torch.testing.assert_close(linear(x, weight, **options), expected, **TOLERANCE)
    given = x, weight, gain, EPS, None, None, None, None, bias, True, index
    torch.testing.assert_close(*on_triton("step.linear", "linear", *given), expected, **TOLERANCE)


def test_a_row_of_a_product_does_not_depend_on_the_others(on_triton):
    # Whole numbers: the matrix products of the interpreter may add in another order for other shapes.
    x, weight = (random(*shape).mul(4).round() for shape in ((70, 192), (100, 192)))
    gain = random(192, seed=1)
    gain = gain.sign() * gain.abs().log2().round().exp2()
    (together,) = on_triton("step.linear", "linear", x, weight, gain, EPS, weight)
    for row in (0, 20, 69):
        (alone,) = on_triton("step.linear", "linear", x[row : row + 1], weight, gain, EPS, weight)
        assert torch.equal(alone[0], together[row])


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True])
def test_a_row_of_a_product_does_not_depend_on_the_others_on_a_gpu(gated):
    x, gain, weight, up = (
        random(*shape, seed=seed).bfloat16().cuda()
        for seed, shape in enumerate(((64, 1280), (1280,), (8200, 1280), (8200, 1280)))
    )
    options = {"gain": gain, "eps": EPS, **({"up": up} if gated else {})}
    together = linear(x, weight, **options)
    for rows in (1, 8, 9, 17, 33):
        assert torch.equal(linear(x[:rows], weight, **options), together[:rows])


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_queries_by_weights_of_8_bits(on_triton, dtype):
    width, head_dim = 128, 32
    weight, scale = eight_bits(random(6 * head_dim, width, seed=2), dtype)
    x, gain, table = random(3, width), random(width, seed=1), random(40, head_dim // 2, 2, seed=3)
    arguments = x, gain, EPS, weight, table, torch.arange(3), head_dim
    (found,) = on_triton("step.qkv", "queries", *arguments, scale)
    expected = queries(x, gain, EPS, weight.float() * scale[:, None], *arguments[4:])
    torch.testing.assert_close(found, expected, **TOLERANCE)
    torch.testing.assert_close(queries(*arguments, scale), expected, **TOLERANCE)


# Rows of the cache, queries of each, heads, heads of keys, the width of a head: one query, a window, and shared keys.
HEADS = [(2, 1, 2, 2, 64), (4, 3, 4, 2, 32), (2, 20, 8, 1, 32)]
PREFIX, FIRST, PLACES = 9, 16, 100


def layer(shape):
    rows, queries, heads, key_heads, head_dim = shape
    width, images = 128, rows // 2
    return {
        "x": random(rows * queries, width),
        "gain": random(width, seed=1),
        "weight": random((heads + 2 * key_heads) * head_dim, width, seed=2) / width**0.5,
        "table": random(40, head_dim // 2, 2, seed=3),
        "positions": torch.arange(images * queries) * 7 % 41 - 1,
        "keys": random(rows, key_heads, PLACES, head_dim, seed=4),
        "values": random(rows, key_heads, PLACES, head_dim, seed=5),
        "index": FIRST
        + torch.randperm(PLACES - FIRST, generator=torch.Generator().manual_seed(6))[: images * queries],
    }


def turn(states, table, positions):
    turns = torch.view_as_complex(table)[positions].repeat(2, 1)[:, None]
    return torch.view_as_real(torch.view_as_complex(states.unflatten(2, (-1, 2)).contiguous()) * turns).flatten(2)


@pytest.mark.every(3)
@pytest.mark.parametrize("shape", HEADS, ids=str)
@pytest.mark.parametrize("which", ["all", "queries", "keys and values"])
def test_queries_keys_and_values(on_triton, shape, which):
    rows, fed, heads, key_heads, head_dim = shape
    x, gain, weight, table, positions, keys, values, index = layer(shape).values()
    if which == "queries":
        heads = len(weight) // head_dim
    elif which == "keys and values":
        heads, weight = 0, weight[heads * head_dim :].contiguous()
    arguments = x, gain, EPS, weight, table, positions, head_dim
    name, operation, written = "queries", queries, ()
    if which != "queries":
        arguments = (*arguments[:3], [weight], *arguments[4:], keys, values, index, [], [])
        name, operation, written = "qkv", qkv, (7, 8)
    found, *cached = on_triton("step.qkv", name, *arguments, written=written)
    states = (F.rms_norm(x, x.shape[1:], gain, EPS) @ weight.T).unflatten(1, (-1, head_dim))
    turned = turn(states, table, positions)
    before = keys.clone(), values.clone()
    torch.testing.assert_close(operation(*arguments), turned[:, :heads], **TOLERANCE)
    torch.testing.assert_close(found, turned[:, :heads], **TOLERANCE)
    if written:
        for row in range(rows * fed):
            at = row // fed, slice(None), index[row % len(index)]
            before[0][at] = turned[row, heads : heads + key_heads]
            before[1][at] = states[row, heads + key_heads :]
        for each in (cached, (keys, values)):
            torch.testing.assert_close(tuple(each), before, **TOLERANCE)


def turn_halves(states, table, positions):
    """Channel i of the first half of those that are rotated turns with channel i of the second."""
    width = 2 * table.shape[1]
    cos, sin = table[positions].repeat(2, 1, 1)[:, None].unbind(3)
    left, right = states[..., :width].chunk(2, dim=2)
    return torch.cat([left * cos - right * sin, right * cos + left * sin, states[..., width:]], dim=2)


@pytest.mark.parametrize("bits", [0, 8])
@pytest.mark.parametrize("turned", [32, 16])
def test_three_weights_with_biases_and_halves(on_triton, bits, turned):
    rows, fed, heads, key_heads, head_dim = HEADS[1]
    x, gain, weight, table, positions, keys, values, index = layer(HEADS[1]).values()
    table, sizes = table[:, : turned // 2].contiguous(), [heads * head_dim, key_heads * head_dim, key_heads * head_dim]
    bias = random(sum(sizes), seed=11)
    expected = (F.rms_norm(x, x.shape[1:], gain, EPS) @ weight.T + bias).unflatten(1, (-1, head_dim))
    weights, scales = [each.clone() for each in weight.split(sizes)], []
    tolerance = TOLERANCE
    if bits:
        weights, scales = map(list, zip(*(eight_bits(each, torch.int8) for each in weights), strict=True))
        tolerance = {"rtol": 0.05, "atol": 0.1}
    biases = [each.clone() for each in bias.split(sizes)]
    arguments = x, gain, EPS, weights, table, positions, head_dim, keys, values, index, scales, biases, True
    found = on_triton("step.qkv", "qkv", *arguments, written=(7, 8))
    query = qkv(*arguments)
    torch.testing.assert_close(query, turn_halves(expected[:, :heads], table, positions), **tolerance)
    torch.testing.assert_close(found, (query, keys, values), **TOLERANCE)
    states = unturned(x, gain, EPS, weights, head_dim, scales, biases)
    torch.testing.assert_close(states, expected, **tolerance)
    (found,) = on_triton("step.qkv", "unturned", x, gain, EPS, weights, head_dim, scales, biases)
    torch.testing.assert_close(found, states, **TOLERANCE)


@pytest.mark.parametrize("head_dim", [32, 48])
@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm", "LayerNorm per head"])
def test_attention_of_heads_with_norms(on_triton, kind, head_dim):
    shape = (*HEADS[1][:4], head_dim)
    rows, fed, heads, key_heads, _ = shape
    _, keys, values, seen, prefix, first, slots, _ = cached(shape, False)
    given, per_head = layer(shape), kind.endswith("head")
    table, positions, index = (given[name] for name in ("table", "positions", "index"))
    states = random(rows * fed, heads + 2 * key_heads, head_dim, seed=12)
    gains = [random(*((n,) if per_head else ()), head_dim, seed=13) for n in (heads, key_heads)]
    biases = [None, None] if kind == "RMSNorm" else [0.3 * gain.flip(-1) for gain in gains]
    norms = *gains, EPS, *biases
    if head_dim == 48:
        table = None
    parts = [*states.split([heads, key_heads, key_heads], dim=1)]
    for part, (gain, bias) in enumerate(zip(gains, biases, strict=True)):
        x = parts[part] if bias is None else parts[part] - parts[part].mean(2, keepdim=True)
        x = x / (x.square().mean(2, keepdim=True) + EPS).sqrt() * gain + (0 if bias is None else bias)
        parts[part] = x if table is None else turn_halves(x, table, positions)
    before = keys.clone(), values.clone()
    for row in range(rows * fed):
        at = row // fed, slice(None), index[row % len(index)]
        before[0][at], before[1][at] = parts[1][row], parts[2][row]
    # Tokens after the second row end, and the row end of the third.
    ends, columns = torch.where(torch.arange(len(slots)) % 2 == 0, 9, 8), 4
    arguments = states, keys, values, seen, prefix, first, slots, index, table, positions, *norms, None, True
    expected = attended(parts[0], *before, seen, prefix, first, slots, None, shown=ends // columns)
    found = on_triton("step.attention", "normed_attention", *arguments, ends, columns, written=(1, 2))
    torch.testing.assert_close(found, (expected, *before), **TOLERANCE)
    torch.testing.assert_close(normed_attention(*arguments, ends, columns), expected, **TOLERANCE)
    torch.testing.assert_close((keys, values), before, **TOLERANCE)


@pytest.mark.parametrize(("tables", "shape"), [(1, (2, 3, 4, 2, 64)), (2, (2, 5, 9, 3, 24))], ids=str)
def test_norms_and_rotations_of_heads(on_triton, tables, shape):
    rows, tokens, heads, key_heads, head_dim = shape
    states = random(rows, tokens, heads + 2 * key_heads, head_dim)
    gains = random(head_dim, seed=1), random(head_dim, seed=2)
    table = random(tables, tokens, head_dim // 2, 2, seed=3)
    expected = (
        states[:, :, : heads + key_heads] / (states.square().mean(3, keepdim=True) + EPS).sqrt()[:, :, :-key_heads]
    )
    expected[:, :, :heads] *= gains[0]
    expected[:, :, heads:] *= gains[1]
    even, odd = expected.unflatten(3, (-1, 2)).unbind(4)
    cos, sin = table[:, :, None].unbind(4)
    expected = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=4).flatten(3)
    # A part of a cache, of which the first seven places are seen.
    past = [random(rows, key_heads, 12, head_dim, seed=seed)[:, :, 2:] for seed in (4, 5)]
    cached = [torch.cat([each[:, :, :7], torch.zeros(rows, key_heads, tokens, head_dim)], dim=2) for each in past]
    cached[0][:, :, 7:] = expected[:, :, heads:].transpose(1, 2)
    cached[1][:, :, 7:] = states[:, :, heads + key_heads :].transpose(1, 2)
    keys, values = (torch.full_like(each, torch.nan) for each in cached)
    arguments = states, *gains, EPS, keys, values, 7, table, *past
    found = on_triton("step.head_norms", "head_norms", *arguments, written=(4, 5))
    for each in (found, (head_norms(*arguments), keys, values)):
        torch.testing.assert_close(tuple(each), (expected[:, :, :heads], *cached), **TOLERANCE)


def test_rows_of_a_language_model(on_triton):
    # Two images and branches, rows of four tokens; a token that is not known ends a row, and one is padding.
    tokens, positions = torch.tensor([[3, 1, -1], [2, -1, 5]]), torch.tensor([[2, 3, 4], [6, 7, -1]])
    # 16 slots, nowhere, and the row ends of all but the last row.
    places, end_places = torch.arange(17).roll(-1) + 20, torch.full((17,), 20)
    end_places[[3, 7, 11]] = torch.tensor([10, 11, 12])
    embedded, end, first = random(6, 192), random(192, seed=1), torch.tensor([5, 7, 0, 1])
    arguments = embedded, tokens, positions, None, places, first, 4, 15, 1, end, end_places
    hidden = embedded.clone().view(2, 3, -1)
    hidden[0, 2] = hidden[1, 1] = 0
    hidden = torch.cat([hidden, end.expand(2, 1, -1)], dim=1).repeat(2, 1, 1).flatten(0, 1)
    seen, index = torch.tensor([2, 3, 4, 3, 6, 7, 0, 6]), torch.tensor([23, 24, 25, 10, 27, 28, 20, 11])
    ends, heads = torch.tensor([2, 3, 4, 4, 6, 7, 0, 8]), torch.tensor([0, 3, 2, 4, 7, 6])
    places_of = torch.tensor([[2, 3, 5, 4], [7, 8, 0, 9]]).repeat(2, 1)
    expected = hidden, seen, index, (first[:, None] + places_of).flatten(), ends, torch.cat([heads, heads + 8])
    for found in (open_rows(*arguments), on_triton("step.rows", "open_rows", *arguments)):
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_norm_before_a_sum(on_triton):
    x, gain, residual = random(3, 192), random(192, seed=1), random(3, 192, seed=2)
    expected = residual + x / (x.square().mean(1, keepdim=True) + EPS).sqrt() * gain
    torch.testing.assert_close(norm_and_add(x, gain, EPS, residual), expected, **TOLERANCE)
    found = on_triton("step.norm_and_add", "norm_and_add", x, gain, EPS, residual)
    torch.testing.assert_close(*found, expected, **TOLERANCE)


def cached(shape, told):
    rows, queries, heads, _, head_dim = shape
    generator = torch.Generator().manual_seed(7)
    images, given = rows // 2, layer(shape)
    slots = torch.randint(0, PLACES - FIRST, (images * queries,), generator=generator)
    seen = torch.arange(5) >= torch.randint(0, 5, (rows, 1), generator=generator)
    # Not only padding on the left.
    seen[0] = torch.tensor([False, True, False, True, True])
    visible = None
    if told:
        visible = torch.rand(images * queries, PLACES - FIRST + 4, generator=generator) < 0.2
        # A query that sees nothing but its prompt.
        visible[-1] = False
    query = random(rows * queries, heads, head_dim, seed=8)
    return query, given["keys"], given["values"], seen, PREFIX, FIRST, slots, visible


def attended(query, keys, values, seen, prefix, first, slots, visible, shown=None):
    """Key by key; `shown` is how many row ends a query sees."""
    rows, shared = len(keys), query.shape[1] // keys.shape[1]
    outcome = torch.empty_like(query)
    for at in range(len(query)):
        row, given = at // (len(query) // rows), at % len(slots)
        places = [prefix - seen.shape[1] + word for word in range(seen.shape[1]) if seen[row, word]]
        if visible is None:
            places += [first + slot for slot in range(slots[given] + 1)]
            places += [] if shown is None else range(prefix, prefix + shown[given])
        else:
            own = visible[given].nonzero().flatten().tolist()
            size = keys.shape[2] - first
            places += [first + slot if slot < size else prefix + slot - size for slot in own]
        for head in range(query.shape[1]):
            k, v = (cache[row, head // shared][places] for cache in (keys, values))
            outcome[at, head] = (k @ query[at, head] / query.shape[2] ** 0.5).softmax(0) @ v
    return outcome.flatten(1)


@pytest.mark.every(2)
@pytest.mark.parametrize("shape", HEADS, ids=str)
@pytest.mark.parametrize("told", [False, True], ids=["by slots", "given"])
def test_attention(on_triton, shape, told):
    arguments = cached(shape, told)
    expected = attended(*arguments)
    torch.testing.assert_close(attention(*arguments), expected, **TOLERANCE)
    torch.testing.assert_close(*on_triton("step.attention", "attention", *arguments), expected, **TOLERANCE)


@pytest.mark.parametrize("told", [False, True], ids=["by slots", "given"])
def test_keys_that_no_query_sees_are_not_read(on_triton, told):
    query, keys, values, seen, prefix, first, slots, visible = cached(HEADS[1], told)
    slots.clamp_(max=20)
    if told:
        visible[:, 21 : PLACES - FIRST] = False
    (before,) = on_triton("step.attention", "attention", query, keys, values, seen, prefix, first, slots, visible)
    unseen = torch.zeros(len(keys), PLACES, dtype=torch.bool)
    unseen[:, first + 21 :] = True
    # Places of trees.
    unseen[:, prefix:first] = not told
    unseen[:, :prefix] = F.pad(seen, (prefix - seen.shape[1], 0)).cumsum(1) == 0
    for each in (keys, values):
        each.transpose(1, 2)[unseen] = torch.nan
    (after,) = on_triton("step.attention", "attention", query, keys, values, seen, prefix, first, slots, visible)
    assert torch.equal(before, after)


def test_a_query_that_sees_nothing_gets_zeros(on_triton):
    query, keys, values, seen, prefix, first, slots, visible = cached(HEADS[1], True)
    arguments = query, keys, values, seen[:, :0], prefix, first, slots, visible
    expected = attention(*arguments)
    assert not expected[-1].any() and expected[0].any()
    torch.testing.assert_close(*on_triton("step.attention", "attention", *arguments), expected, **TOLERANCE)


def test_a_row_of_attention_does_not_depend_on_the_others(on_triton):
    query, keys, values, seen, prefix, first, slots, _ = cached((4, 3, 4, 2, 32), False)
    (together,) = on_triton("step.attention", "attention", query, keys, values, seen, prefix, first, slots)
    alone = query[:3], keys[:1], values[:1], seen[:1], prefix, first, slots[:3]
    (alone,) = on_triton("step.attention", "attention", *alone)
    torch.testing.assert_close(alone, together[:3], **TOLERANCE)


def projected(shape):
    """What is left of `layer` after a product: the queries, and the keys and values, which are parts of it."""
    rows, queries, heads, key_heads, head_dim = shape
    states = random(rows * queries, (heads + 2 * key_heads) * head_dim, seed=9).unflatten(1, (-1, head_dim))
    return states.tensor_split([heads], dim=1)


@pytest.mark.every(3)
@pytest.mark.parametrize("shape", HEADS, ids=str)
@pytest.mark.parametrize("told", [False, True], ids=["by slots", "given"])
def test_attention_rotates_parts_of_a_product(on_triton, shape, told):
    _, *rest = cached(shape, told)
    query, table, positions = projected(shape)[0], layer(shape)["table"], layer(shape)["positions"]
    expected = attended(turn(query, table, positions), *rest)
    arguments = query, *rest, table, positions
    torch.testing.assert_close(attention(*arguments), expected, **TOLERANCE)
    torch.testing.assert_close(*on_triton("step.attention", "attention", *arguments), expected, **TOLERANCE)


@pytest.mark.parametrize("shape", [*HEADS, (2, 2, 12, 12, 32)], ids=str)
def test_keys_and_values_of_many_rows(on_triton, shape):
    rows, queries, *_ = shape
    _, _, _, table, positions, keys, values, index = layer(shape).values()
    key, value = projected(shape)[1].chunk(2, dim=1)
    arguments = key, value, table, positions, keys, values, index
    found = on_triton("step.keys", "write_keys", *arguments, written=(4, 5))
    key, before = turn(key, table, positions), (keys.clone(), values.clone())
    for row in range(rows * queries):
        at = row // queries, slice(None), index[row % len(index)]
        before[0][at], before[1][at] = key[row], value[row]
    write_keys(*arguments)
    for each in (found, (keys, values)):
        torch.testing.assert_close(each, before, **TOLERANCE)


def test_gate(on_triton):
    gates, ups = random(3, 2 * 1100).tensor_split(2, dim=1)
    expected = gates * gates.sigmoid() * ups
    torch.testing.assert_close(gate(gates, ups), expected, **TOLERANCE)
    torch.testing.assert_close(*on_triton("step.gate", "gate", gates, ups), expected, **TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_products_of_many_rows_are_those_of_few(monkeypatch, kind):
    x, gain, residual = random(20, 128), random(128, seed=1), random(20, 128, seed=2)
    weight, up = (random(128, 128, seed=seed) / 128**0.5 for seed in (3, 4))
    options = {"gain": gain, "eps": EPS} if kind not in ("plain", "residual") else {}
    if kind in ("int8", "float8"):
        dtype = torch.int8 if kind == "int8" else torch.float8_e4m3fn
        (weight, scale), (up, up_scale) = eight_bits(weight, dtype), eight_bits(up, dtype)
        options |= {"scale": scale, "up_scale": up_scale}
    options |= {"residual": residual} if kind == "residual" else {}
    options |= {"up": up} if kind in ("gated", "int8", "float8") else {}
    few = linear(x, weight, **options)
    monkeypatch.setattr(arimage.kernels.step, "MOST_ROWS", 19)
    many = linear(x, weight, **options)
    torch.testing.assert_close(many, few, **TOLERANCE)
    assert (many.data_ptr() == residual.data_ptr()) == (kind == "residual")


def test_weights_that_lie_together_are_one_product(monkeypatch):
    monkeypatch.setattr(arimage.kernels.step, "MOST_ROWS", 19)
    x, both = random(20, 128), random(100, 128, seed=1)
    apart = both[:30].clone(), both[30:60].clone()
    parts = []
    monkeypatch.setattr(F, "linear", lambda x, weight, bias=None: (parts.append(len(weight)), x @ weight.T)[1])
    outcomes = [linear(x, weight, up=up) for weight, up in (apart, (both[:30], both[30:60]), (both[:30], both[40:70]))]
    torch.testing.assert_close(outcomes[1], outcomes[0])
    assert parts == [30, 30, 60, 30, 30]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("given", [False, True])
def test_embedding(on_triton, dtype, given):
    tokens, positions = torch.tensor([[3, -1, 0], [6, 2, 2]]), torch.tensor([[0, 1, 2], [5, -1, 4]])
    slots = torch.tensor([[0, 1, 9], [5, 3, 10]]) if given else None
    # Eight slots, three for trees, and nowhere.
    places, weight = torch.arange(12).roll(-4) + 16, random(7, 192).to(dtype)
    own = torch.tensor([0, 1, 9, 5, 0, 10]) if given else torch.tensor([0, 1, 2, 5, 0, 4])
    index = places[own]
    index[4] = places[-1]
    hidden = weight[[3, 0, 0, 6, 2, 2]]
    hidden[1] = 0
    arguments = tokens, positions, slots, places, weight, 2
    for found in (embedding(*arguments), on_triton("step.embedding", "embedding", *arguments)):
        assert torch.equal(found[0], hidden.repeat(2, 1))
        assert torch.equal(found[1], own) and torch.equal(found[2], index)


def qkv_arguments(x, gain, weight, table, positions, keys, values, index):
    return x, gain, EPS, [weight], table, positions, 32, keys, values, index, [], []


KERNELS = {
    "linear": lambda: (random(3, 64), random(40, 64, seed=1), random(64, seed=2), EPS),
    "qkv": lambda: qkv_arguments(**layer(HEADS[1])),
    "attention": lambda: cached(HEADS[1], True),
    "embedding": lambda: (*torch.arange(6).view(3, 1, 2), torch.arange(9), random(7, 64), 2),
}


@pytest.mark.every(2)
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_breaks_no_graph(interpreter, name):
    written = (7, 8) if name == "qkv" else ()
    eager, compiled = (
        interpreter.call(f"step.{name}", name, KERNELS[name](), compiled=compiled, written=written)
        for compiled in (False, True)
    )
    assert all(torch.equal(one, other) for one, other in zip(eager, compiled, strict=True))
    if written:
        keys, values = (KERNELS[name]()[place] for place in written)
        assert not torch.equal(eager[1], keys) and not torch.equal(eager[2], values)
