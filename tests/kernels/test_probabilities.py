"""Probabilities in Triton equal the reference, which tests/decoding/contract/test_distribution.py compares with the
published ones."""

import pytest
import torch

from arimage.kernels.probabilities import probabilities


def random_logits(*shape, dtype=torch.float32, seed=0):
    return (3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def three_of_four(size):
    return torch.arange(size) % 4 != 1


def naive_probabilities(logits, scale, temperature, top_k, top_p, allowed, min_p):
    """One place, in float64, by sorting a list; logits are [G, V]."""
    logits = logits.double()
    row = logits[0] if len(logits) == 1 else logits[1] + scale * (logits[0] - logits[1])
    weights = (row / temperature).exp().tolist()
    tokens = [token for token in range(len(row)) if allowed is None or allowed[token]]
    tokens.sort(key=lambda token: -weights[token])
    if top_k:
        tokens = [token for token in tokens if weights[token] >= weights[tokens[min(top_k, len(tokens)) - 1]]]
    total, before, kept = sum(weights[token] for token in tokens), 0.0, [0.0] * len(row)
    for token in tokens:
        if before <= top_p * total:
            kept[token] = weights[token]
        before += weights[token]
    kept = [weight if weight >= min_p * max(kept) else 0.0 for weight in kept]
    return torch.tensor(kept) / sum(kept)


@pytest.mark.parametrize("min_p", [0.0, 0.03, 0.3, 1.0])
@pytest.mark.parametrize("top_p", [0.3, 0.9, 1.0])
@pytest.mark.parametrize("top_k", [0, 1, 7, 100])
@pytest.mark.parametrize("branches", [1, 2])
def test_the_definition_equals_sorted_lists(branches, top_k, top_p, min_p):
    logits, allowed = random_logits(branches, 2, 3, 40), three_of_four(40)
    scale = torch.arange(6).view(2, 3) / 2
    actual = probabilities(logits, scale, 0.8, top_k, top_p, allowed, min_p)
    for b in range(2):
        for j in range(3):
            expected = naive_probabilities(logits[:, b, j], scale[b, j].item(), 0.8, top_k, top_p, allowed, min_p)
            torch.testing.assert_close(actual[b, j], expected, atol=1e-6, rtol=1e-4)


def sorted_top_p(logits, k, top_p):
    """The kept tokens [V] of one place by a stable sort in float64."""
    ordered, order = logits.sort(descending=True, stable=True)
    weights = ordered.double().exp()
    weights[ordered < ordered[k - 1]] = 0
    kept = (weights.cumsum(-1) - weights <= top_p * weights.sum()) & (weights > 0)
    return torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, kept)


ROWS = {
    "normal": random_logits(8, 9000),
    "with ties": random_logits(8, 9000).mul(8).round() / 8,
    "positive": random_logits(8, 9000).abs(),
    "negative": -random_logits(8, 9000).abs(),
    "around zero": random_logits(8, 9000) * 1e-30,
    "two values": (random_logits(8, 9000) > 4).float() * 9,
    "zeros of both signs": torch.where(random_logits(8, 9000) > 0, 0.0, -0.0),
    "some -inf": random_logits(8, 9000).masked_fill(random_logits(8, 9000) < 1, -torch.inf),
}


@pytest.mark.every(2)
@pytest.mark.parametrize("rows", ROWS)
def test_the_search_for_a_threshold_keeps_what_sorting_keeps(rows):
    logits = ROWS[rows]
    for k in (129, 2000, 8999):
        kept = probabilities(logits[None, None], top_k=k)[0] > 0
        assert torch.equal(kept, (logits >= logits.sort(descending=True).values[:, k - 1, None]) & logits.isfinite())
        for top_p in (0.3, 0.9):
            kept = probabilities(logits[None, None], top_k=k, top_p=top_p)[0] > 0
            for row in range(len(logits)):
                expected = sorted_top_p(logits[row], k, top_p)
                # Rounding may decide over the last, which is the first of those that are as probable.
                assert abs(int(kept[row].sum()) - int(expected.sum())) <= 1
                assert logits[row][kept[row] != expected].unique().numel() <= 1


CASES = {
    "softmax": ((1, 1, 2, 1000), torch.float32, {}),
    "one token": ((2, 1, 2, 1), torch.float32, {"top_k": 1, "top_p": 0.5}),
    "two tokens": ((2, 2, 1, 2), torch.float32, {"top_k": 1, "allowed": three_of_four(2)}),
    "guided": ((2, 2, 2, 37), torch.float16, {"scale": 7.5, "temperature": 0.7, "allowed": three_of_four(37)}),
    "guided by place": ((2, 2, 2, 37), torch.float32, {"scale": torch.tensor([[0.0, 1.0], [2.5, 7.5]])}),
    "top-k": ((2, 1, 2, 1000), torch.bfloat16, {"scale": 3.0, "top_k": 100, "allowed": three_of_four(1000)}),
    "top-k of more blocks than one": ((1, 1, 1, 5003), torch.float32, {"top_k": 2000}),
    "top-p": ((1, 1, 2, 1000), torch.float16, {"top_p": 0.9, "allowed": three_of_four(1000)}),
    "top-p of more blocks than one": ((1, 1, 1, 5003), torch.bfloat16, {"top_p": 0.95}),
    "min-p": ((2, 1, 2, 1000), torch.bfloat16, {"scale": 3.0, "min_p": 0.03, "allowed": three_of_four(1000)}),
    "min-p of more blocks than one": ((1, 1, 1, 5003), torch.float32, {"min_p": 0.3}),
    "min-p above top-k": ((1, 1, 2, 1000), torch.float32, {"top_k": 500, "min_p": 0.1}),
    "min-p below top-k": ((1, 1, 2, 1000), torch.float32, {"top_k": 5, "min_p": 0.001}),
    "min-p above top-p": ((1, 1, 2, 1000), torch.float32, {"top_p": 0.95, "min_p": 0.1}),
    "min-p below top-p": ((1, 1, 2, 1000), torch.float32, {"top_p": 0.3, "min_p": 0.001}),
    "the most probable": ((1, 1, 2, 1000), torch.bfloat16, {"min_p": 1.0}),
    "all": (
        (2, 1, 2, 500),
        torch.bfloat16,
        {
            "scale": 2.0,
            "temperature": 1.3,
            "top_k": 50,
            "top_p": 0.8,
            "allowed": three_of_four(500),
            "min_p": 0.2,
        },
    ),
    "more than there are": ((1, 1, 1, 70), torch.float32, {"top_k": 71}),
}


DEFAULTS = {"scale": 1.0, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "allowed": None, "min_p": 0.0}


@pytest.mark.every(6)
@pytest.mark.parametrize("case", CASES)
def test_triton_equals_the_definition(on_triton, case):
    shape, dtype, settings = CASES[case]
    settings = DEFAULTS | settings
    arguments = (random_logits(*shape, dtype=dtype), *settings.values())
    (actual,) = on_triton("probabilities", "probabilities", *arguments)
    expected = probabilities(*arguments)
    assert actual.dtype == torch.float32
    # No sum of these probabilities lies within rounding of its top-p.
    assert torch.equal(actual > 0, expected > 0)
    torch.testing.assert_close(actual, expected, atol=1e-7, rtol=1e-5)


BY_ROW = {
    "scale": torch.tensor([1.0, 3.0, 0.0, 7.5]),
    "temperature": torch.tensor([1.0, 0.7, 1.3, 1.0]),
    "top_k": torch.tensor([0, 5, 1000, 300]),
    "top_p": torch.tensor([0.9, 1.0, 0.3, 1.0]),
    "allowed": torch.stack([torch.arange(1000) % 4 != row for row in range(4)]),
    "min_p": torch.tensor([0.0, 0.03, 0.3, 1.0]),
}


@pytest.mark.every(4)
@pytest.mark.parametrize(
    "settings",
    [["scale"], ["temperature", "top_k"], ["top_p"], ["allowed"], ["min_p"], ["top_p", "min_p"], list(BY_ROW)],
    ids=str,
)
def test_every_row_has_settings_of_its_own(on_triton, settings):
    logits = random_logits(2, 4, 2, 1000)
    defaults = DEFAULTS | {"scale": 2.0}
    by_row = defaults | {name: BY_ROW[name] for name in settings}
    (actual,) = on_triton("probabilities", "probabilities", logits, *by_row.values())
    expected = probabilities(logits, **by_row)
    assert torch.equal(actual > 0, expected > 0)
    torch.testing.assert_close(actual, expected, atol=1e-7, rtol=1e-5)
    for row in range(4):
        own = {name: BY_ROW[name][row] for name in settings}
        own = defaults | {name: own[name].item() if own[name].ndim == 0 else own[name] for name in own}
        alone = logits[:, row, None], *own.values()
        torch.testing.assert_close(probabilities(*alone)[0], expected[row], atol=1e-7, rtol=1e-5)
        (found,) = on_triton("probabilities", "probabilities", *alone)
        torch.testing.assert_close(found[0], actual[row], atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("top_k", [1, 2, 4, 5, 8])
def test_triton_keeps_all_ties_of_top_k(on_triton, top_k):
    logits = torch.tensor([2.0, 0.0, 3.0, -0.0, 2.0, 0.0, -1.0, 2.0])[None, None, None]
    (actual,) = on_triton("probabilities", "probabilities", logits, 1.0, 1.0, top_k, 1.0, None)
    assert torch.equal(actual > 0, probabilities(logits, top_k=top_k) > 0)
    torch.testing.assert_close(actual, probabilities(logits, top_k=top_k))


@pytest.mark.parametrize(("top_p", "kept"), [(1e-6, 1), (0.2, 13), (0.25, 17), (0.5, 33), (0.99, 64)])
def test_triton_keeps_of_equally_probable_tokens_those_first_in_order(on_triton, top_p, kept):
    # 64 probabilities of 2 ** -6: the sums are exact, so a bound may be reached exactly.
    logits = torch.full((1, 1, 1, 100), -torch.inf)
    logits[..., 20:84] = 5.0
    (actual,) = on_triton("probabilities", "probabilities", logits, 1.0, 1.0, 0, top_p, None)
    assert torch.equal(actual, probabilities(logits, top_p=top_p))
    assert actual.flatten().nonzero().flatten().tolist() == list(range(20, 20 + kept))


def test_triton_cuts_through_ties_that_lie_in_several_blocks(on_triton):
    logits = torch.zeros(1, 1, 1, 9000)
    logits[..., ::9] = 4.0
    for top_p in (0.5, 0.95):
        (actual,) = on_triton("probabilities", "probabilities", logits, 1.0, 1.0, 0, top_p, None)
        expected = probabilities(logits, top_p=top_p)
        # Whether the last of the ties is in, rounding may decide.
        assert (actual > 0).sum() - (expected > 0).sum() in (-1, 0, 1)
        differ = ((actual > 0) != (expected > 0)).nonzero()[:, -1]
        assert (differ >= (expected > 0).nonzero()[-1, -1]).all()
        torch.testing.assert_close(actual.sum(), torch.tensor(1.0))


BROKEN = {
    "positive NaN": 0x7FC00000,
    "negative NaN": 0xFFC00000,
    "NaN of all bits": 0xFFFFFFFF,
    "+inf": 0x7F800000,
}
SETTINGS = {
    "softmax": {},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.9},
    "top-k, top-p": {"top_k": 9, "top_p": 0.9},
    "min-p": {"min_p": 0.03},
    "top-p, min-p": {"top_p": 0.9, "min_p": torch.tensor([0.03])},
}


@pytest.mark.every(6)
@pytest.mark.parametrize("broken", [*BROKEN, "all -inf", "all NaN"])
@pytest.mark.parametrize(
    ("settings", "branches", "size"),
    [
        ("softmax", 2, 30),
        ("top-k", 1, 5003),
        ("top-p", 2, 30),
        ("top-k, top-p", 1, 30),
        ("min-p", 1, 5003),
        ("top-p, min-p", 2, 30),
    ],
)
def test_a_row_that_is_not_finite_is_nan_and_the_others_are_not(on_triton, branches, size, broken, settings):
    logits = random_logits(branches, 1, 3, size)
    if broken == "all -inf":
        logits[:, 0, 1] = -torch.inf
    elif broken == "all NaN":
        logits[:, 0, 1] = torch.nan
    else:
        # Bits, since a float of Python keeps no sign of NaN.
        logits.view(torch.int32)[:, 0, 1, size - 2] = torch.tensor(BROKEN[broken]).to(torch.int32)
    settings = DEFAULTS | {"scale": 2.0, "temperature": 0.7} | SETTINGS[settings]
    (actual,) = on_triton("probabilities", "probabilities", logits, *settings.values())
    expected = probabilities(logits, *settings.values())
    assert expected[0, 1].isnan().all() and actual[0, 1].isnan().all()
    torch.testing.assert_close(actual[:, ::2], expected[:, ::2], atol=1e-7, rtol=1e-5)


def test_what_is_not_allowed_may_be_anything(on_triton):
    allowed = three_of_four(30)
    logits = random_logits(1, 1, 1, 30)
    expected = probabilities(logits, 1.0, 1.0, 5, 0.9, allowed)
    for value in (torch.nan, -torch.nan, torch.inf, -torch.inf):
        logits[..., ~allowed] = value
        (actual,) = on_triton("probabilities", "probabilities", logits, 1.0, 1.0, 5, 0.9, allowed)
        torch.testing.assert_close(probabilities(logits, 1.0, 1.0, 5, 0.9, allowed), expected)
        torch.testing.assert_close(actual, expected)


def long_rows(size):
    """Rows of which the registers do not hold what a threshold may be among, or only after some sweeps."""
    normal = random_logits(size)
    return {
        "normal": normal,
        "nearly equal": normal / 50 + 20,
        "far from zero and close to it": torch.where(normal > 4, normal, normal * 1e-30),
        "with ties": normal.mul(8).round() / 8,
        "few values": (normal > 4).float() * 9 + (normal > 8).float(),
        "equal": torch.zeros(size),
        "mostly -inf": normal.masked_fill(torch.arange(size) % 50 > 0, -torch.inf),
    }


@pytest.mark.every(2)
@pytest.mark.parametrize("size", [16385, pytest.param(64000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("k", "top_p", "min_p"),
    [
        (100, 1.0, 0.0),
        (0, 0.9, 0.3),
        (9000, 0.99, 1.0),
        *(
            pytest.param(*cuts, marks=pytest.mark.slow)
            for cuts in [
                (0, 0.9, 0.0),
                (9000, 0.3, 0.0),
                (0, 1.0, 0.01),
                # Between the cuts, above and below them.
                (9000, 1.0, 0.01),
                (9000, 1.0, 1e-9),
                (0, 0.9, 1e-3),
            ]
        ),
    ],
)
def test_triton_cuts_rows_that_are_longer_than_its_registers(on_triton, k, top_p, min_p, size):
    arguments = torch.stack(list(long_rows(size).values()))[None, :, None], 1.0, 1.0, k, top_p, None, min_p
    (actual,) = on_triton("probabilities", "probabilities", *arguments)
    for ours, theirs in zip(actual[:, 0], probabilities(*arguments)[:, 0], strict=True):
        differs = (ours > 0) != (theirs > 0)
        # Rounding may decide over the last.
        assert differs.sum() <= (top_p < 1)
        rounding = 1e-5 + 2 * float((ours + theirs)[differs].sum())
        torch.testing.assert_close(ours[~differs], theirs[~differs], atol=1e-7, rtol=rounding)


@pytest.mark.parametrize("size", [40, pytest.param(20_000, marks=pytest.mark.slow)])
def test_images_are_invalid_where_a_place_that_counts_is_not_finite(on_triton, size):
    logits = random_logits(1, 6, 2, size)
    # Broken nowhere, after the end, within an image, everywhere, and where the token is known; the last was invalid.
    for image, place in ((1, 1), (2, 0), (3, 0), (3, 1), (4, 0)):
        logits[0, image, place, 5] = torch.nan
    ended = torch.zeros(6, 2, dtype=torch.bool)
    ended[1, 1] = ended[3, 1] = True
    forced, positions = torch.full((6, 7), -1), torch.tensor([3, 9]).repeat(6, 1)
    forced[4, 3], forced[5, 6] = 11, 12
    invalid = torch.arange(6) == 5
    settings = 1.0, 1.0, 0, 0.9, None, 0.0, forced, positions
    ours, marked = on_triton("probabilities", "probabilities", logits, *settings, invalid, ended, written=[9])
    expected = probabilities(logits, *settings, invalid, ended)
    assert invalid.tolist() == marked.tolist() == [False, False, True, True, False, True]
    torch.testing.assert_close(ours, expected, atol=1e-7, rtol=1e-5, equal_nan=True)
    for actual in (ours, expected):
        assert actual[4, 0].nonzero().tolist() == [[11]] and actual[5, 1].nonzero().tolist() == [[12]]
    # The flag of an image may be one for all its places, and none may count.
    for given in (ended[:, 1:], None):
        invalid, alone = torch.zeros(6, dtype=torch.bool), torch.zeros(6, dtype=torch.bool)
        *_, marked = on_triton("probabilities", "probabilities", logits, *settings, invalid, given, written=[9])
        probabilities(logits, *settings, alone, given)
        assert torch.equal(marked, alone)


@pytest.mark.parametrize(
    ("size", "by_row", "ones", "cuts_min"),
    [
        (4096, True, False, False),
        (4096, True, False, True),
        (16384, False, True, False),
        (16384, False, False, True),
        (16384, True, False, False),
        (16384, True, False, True),
        (65536, True, False, False),
        (65536, True, False, True),
        pytest.param(65536, False, False, False, marks=pytest.mark.slow),
    ],
)
def test_the_kernel_compiles_without_spills(compile_kernel, size, by_row, ones, cuts_min):
    signature = {"logits_ptr": "*bf16", "allowed_ptr": "*u8", "out_ptr": "*fp32"}
    kinds = {"scale": "fp32", "temperature": "fp32", "top_k": "i64" if by_row else "i32", "top_p": "fp32"}
    signature |= {name: f"*{kind}" if by_row else kind for name, kind in kinds.items()}
    signature["min_p"] = "*fp32" if by_row and cuts_min else "fp32"
    signature |= dict.fromkeys(["group_stride", "queries", "vocab_size"], "i32")
    signature |= {"scale_strides": ("i32", "i32"), "allowed_stride": "i32"}
    block = min(size, 16384)
    constants = {"guided": True, "masked": True, "cuts_k": True, "cuts_p": True, "block": block, "chunk": block // 4}
    constants |= {"cuts_min": cuts_min, "by_place": by_row, "by_row": by_row}
    # Triton compiles an argument that is 1 as a constant.
    constants |= {"queries": 1, "top_k": 1} if ones else {}
    signature |= {"forced_ptr": "*i64", "positions_ptr": "*i64", "invalid_ptr": "*u8", "ended_ptr": "*u8"}
    signature |= {"num_tokens": "i32", "ended_strides": ("i32", "i32")}
    if size > block:
        signature["gathered_ptr"] = "*fp32"
    else:
        constants["gathered_ptr"] = None
    compile_kernel("probabilities", "probabilities_kernel", signature, constants, num_warps=block // 1024)


@pytest.mark.parametrize("size", [1000, pytest.param(16385, marks=pytest.mark.slow)])
def test_min_p_of_zero_leaves_every_bit_as_it_is(on_triton, size):
    logits, off = random_logits(1, 2, 2, size), torch.zeros(2)
    for cuts in ({}, {"top_k": 100}, {"top_p": 0.9}, {"top_k": 500, "top_p": 0.9}):
        settings = DEFAULTS | {name: torch.full((2,), value) for name, value in cuts.items()}
        assert torch.equal(probabilities(logits, **settings | {"min_p": off}), probabilities(logits, **settings))
        (actual,) = on_triton("probabilities", "probabilities", logits, *(settings | {"min_p": off}).values())
        (expected,) = on_triton("probabilities", "probabilities", logits, *settings.values())
        assert torch.equal(actual, expected)


def test_min_p_keeps_what_is_as_probable_as_the_most_probable(on_triton):
    logits = torch.tensor([1.0, 3.0, -torch.inf, 3.0, 2.0])[None, None, None]
    for min_p in (1.0, 0.5):
        (actual,) = on_triton("probabilities", "probabilities", logits, 1.0, 1.0, 0, 1.0, None, min_p)
        assert actual.tolist() == probabilities(logits, min_p=min_p).tolist() == [[[0, 0.5, 0, 0.5, 0]]]


def test_rows_keep_as_many_tokens_as_each_of_them_asks_for():
    logits, ks = torch.randn(2, 4, 3, 50, generator=torch.Generator().manual_seed(0)), [0, 7, 1, 7]
    together = probabilities(logits, 2.0, 0.1, torch.tensor(ks))
    for row, k in enumerate(ks):
        assert torch.equal(together[row], probabilities(logits[:, row : row + 1], 2.0, 0.1, k)[0])
        assert k == 0 or ((together[row] > 0).sum(-1) <= k).all()
