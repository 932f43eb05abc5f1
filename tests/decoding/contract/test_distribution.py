"""The sampling distribution is the published one: guidance, temperature, allowed tokens, top-k, top-p, min-p,
softmax."""

import re
from pathlib import Path

import pytest
import torch
from pipelines.llamagen import tiny as tiny_llamagen
from safetensors.torch import load_file
from torch._subclasses.fake_tensor import FakeTensorMode

from arimage.decoding import Sampling


NAN, INF = float("nan"), float("inf")
FIXTURES = Path(__file__).parents[2] / "fixtures"
NAMES = [
    f"filter_probs_t{t}_k{k}_p{p}" for t, k, p in [(0.7, 10, 1), (1.3, 20, 0.9), (1, 0, 0.8), (1, 0, 1), (1, 1, 1)]
]


def distribution(logits, sampling, positions=None):
    """Distributions [G, V] -> [V], or [G, Q, V] -> [Q, V]."""
    logits = torch.as_tensor(logits)
    flat = logits if logits.dim() == 3 else logits[:, None]
    positions = torch.arange(flat.shape[1]) if positions is None else torch.as_tensor(positions)
    return sampling.probabilities(flat[:, None], positions[None])[0].reshape(logits.shape[1:])


def random_logits(*shape, seed=0):
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", ["c2i", "t2i"])
@pytest.mark.parametrize("name", NAMES)
def test_distribution_equals_the_original_filter(family, name):
    expected = load_file(tiny_llamagen.FIXTURES / family / "expected.safetensors")
    temperature, top_k, top_p = re.fullmatch(r"filter_probs_t(.+)_k(.+)_p(.+)", name).groups()
    sampling = Sampling(temperature=float(temperature), top_k=int(top_k), top_p=float(top_p))
    actual = distribution(expected["filter_logits"][None], sampling)
    torch.testing.assert_close(actual, expected[name], atol=1e-6, rtol=0)
    assert torch.equal(actual == 0, expected[name] == 0)


def test_min_p_equals_the_filters_of_transformers():
    # Temperature 0.8, top-k 20, top-p 0.9 and min-p 0.03 of transformers 5.24, in its order.
    expected = load_file(FIXTURES / "min_p.safetensors")
    actual = distribution(expected["logits"][None], Sampling(temperature=0.8, top_k=20, top_p=0.9, min_p=0.03))
    torch.testing.assert_close(actual, expected["probabilities"], atol=1e-6, rtol=0)
    assert torch.equal(actual == 0, expected["probabilities"] == 0)


@pytest.mark.parametrize("scale", [0.0, 1.0, 2.5, 7.5])
def test_guidance_moves_from_the_unconditional_logits(scale):
    logits = random_logits(2, 5, 16)
    conditional, unconditional = logits
    expected = (unconditional + scale * (conditional - unconditional)).softmax(-1)
    torch.testing.assert_close(distribution(logits, Sampling(guidance_scale=scale)), expected)


def test_guidance_needs_no_second_logits():
    logits = random_logits(1, 5, 16)
    assert torch.equal(distribution(logits, Sampling(guidance_scale=7.5)), distribution(logits, Sampling()))


@pytest.mark.parametrize("guided", [0, 1, 3, 6])
def test_only_the_first_positions_are_guided(guided):
    logits, positions = random_logits(2, 6, 16), [5, 0, 3, 1, 2, 4]
    actual = distribution(logits, Sampling(guidance_scale=4.0, guided_tokens=guided), positions)
    on, off = (distribution(logits, Sampling(guidance_scale=scale)) for scale in (4.0, 1.0))
    for j, position in enumerate(positions):
        torch.testing.assert_close(actual[j], (on if position < guided else off)[j])


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(guidance_scale=4.0, temperature=0.7),
        Sampling(guidance_scale=4.0, guided_tokens=3),
        Sampling(guidance_scale=4.0, guidance_scale_pow=2.0, guidance_length=8),
        Sampling.stack([Sampling(guidance_scale=scale) for scale in (0.5, 3.0)]),
    ],
)
@pytest.mark.parametrize("branches", [1, 2])
def test_guided_values_have_the_probabilities_of_both_branches(sampling, branches):
    logits, positions = random_logits(branches, 2, 6, 16), torch.tensor([[5, 0, 3, 1, 2, 9], [0, 1, 2, 3, 4, 5]])
    guided = sampling.guided_values(logits, positions)[None]
    actual, expected = (sampling.probabilities(values, positions) for values in (guided, logits))
    torch.testing.assert_close(actual, expected)


def test_tokens_that_are_not_allowed_get_nothing_and_leave_top_k_to_the_others():
    allowed = torch.tensor([True, False, True, True])
    actual = distribution([[1.0, 9.0, 3.0, 2.0]], Sampling(allowed=allowed, top_k=2))
    torch.testing.assert_close(actual, torch.tensor([0, 0, 1 / (1 + torch.e**-1), 1 / (1 + torch.e)]))


@pytest.mark.parametrize(
    ("top_k", "expected"),
    [(1, [0, 1, 0, 0]), (2, [1, 1, 1, 0]), (3, [1, 1, 1, 0]), (4, [1, 1, 1, 1]), (9, [1, 1, 1, 1]), (0, [1, 1, 1, 1])],
)
def test_ties_at_top_k_are_kept(top_k, expected):
    assert (distribution([[2.0, 3.0, 2.0, 1.0]], Sampling(top_k=top_k)) > 0).long().tolist() == expected


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(1e-6, 1), (0.3, 1), (0.55, 2), (0.75, 2), (0.85, 3), (0.92, 4), (1.0, 5)],
)
def test_top_p_keeps_tokens_until_their_sum_exceeds_it(top_p, kept):
    probabilities = torch.tensor([0.05, 0.3, 0.1, 0.5, 0.05])
    actual = distribution(probabilities.log()[None], Sampling(top_p=top_p))
    # Of two equally probable tokens the one with the lower id goes first.
    order = [3, 1, 2, 0, 4][:kept]
    expected = torch.zeros(5)
    expected[order] = probabilities[order] / probabilities[order].sum()
    torch.testing.assert_close(actual, expected)


def test_top_p_counts_what_temperature_and_top_k_left():
    logits = torch.tensor([0.6, 0.3, 0.1]).log()[None]
    # Of 0.6 and 0.3 the first holds two thirds; at temperature 0.5, four fifths.
    assert (distribution(logits, Sampling(top_k=2, top_p=0.7)) > 0).tolist() == [True, True, False]
    assert (distribution(logits, Sampling(top_k=2, top_p=0.7, temperature=0.5)) > 0).tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("min_p", "kept"),
    [(0.0, [1, 1, 1, 1, 0]), (0.15, [1, 1, 1, 0, 0]), (0.7, [1, 0, 1, 0, 0]), (1.0, [1, 0, 1, 0, 0])],
)
def test_min_p_keeps_tokens_by_their_ratio_to_the_most_probable(min_p, kept):
    probabilities = torch.tensor([0.38, 0.2, 0.38, 0.04, 0.0])
    actual = distribution(probabilities.log()[None], Sampling(min_p=min_p))
    expected = probabilities * torch.tensor(kept)
    torch.testing.assert_close(actual, expected / expected.sum())


def test_min_p_is_the_last_cut():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()[None]
    # Before top-p, it would leave 0.4 and 0.3, of which the first holds more than half.
    assert (distribution(logits, Sampling(top_p=0.5, min_p=0.6)) > 0).tolist() == [True, True, False, False]
    assert (distribution(logits, Sampling(temperature=0.5, min_p=0.6)) > 0).tolist() == [True, False, False, False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_distributions_are_float32_whatever_the_logits(dtype):
    logits = random_logits(2, 5, 16).to(dtype)
    sampling = Sampling(guidance_scale=3.0, temperature=0.8, top_k=7, top_p=0.9)
    assert distribution(logits, sampling).dtype == torch.float32
    assert torch.equal(distribution(logits, sampling), distribution(logits.float(), sampling))


@pytest.mark.parametrize(
    ("setting", "values"),
    [
        (
            "guidance_scale",
            [NAN, INF, 1e7, 1e308, 10**400, -INF, -1, True, None, "3", torch.tensor(3.0), torch.tensor([1.0, 2.0])],
        ),
        ("temperature", [1e30, 10**400, 0, -1.0, 1e-40, NAN, INF, True, "1"]),
        ("top_k", [-1, 5.0, NAN, INF, True, "5"]),
        ("top_p", [0, -0.5, 1.5, NAN, True]),
        ("min_p", [-1e-9, 1.01, NAN, INF, True, None, "0.1", torch.tensor(0.1)]),
        ("guided_tokens", [-1, 2.0, True]),
        ("allowed", [torch.zeros(4, dtype=torch.bool), torch.tensor([0, 1, 1]), [True], "x", torch.ones(2, 4).bool()]),
        ("forced", [[1, 2], 5]),
    ],
)
def test_settings_out_of_range_are_refused(setting, values):
    for value in values:
        with pytest.raises(ValueError, match=setting):
            Sampling(**{setting: value})


BROKEN = {
    "NaN": lambda logits: logits.index_fill(-1, torch.tensor([3]), NAN),
    "+inf": lambda logits: logits.index_fill(-1, torch.tensor([3]), INF),
    "all -inf": lambda logits: torch.full_like(logits, -INF),
}


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize(
    "settings", [{}, {"top_k": 2}, {"min_p": 0.1}, {"top_k": 5, "top_p": 0.9}, {"top_p": 0.9, "min_p": 0.03}], ids=str
)
@pytest.mark.parametrize("branches", [1, 2])
def test_logits_that_are_not_finite_give_no_distribution(broken, settings, branches):
    logits = random_logits(branches, 3, 1, 8)
    logits[:, 1] = BROKEN[broken](logits[:, 1])
    actual = Sampling(guidance_scale=2.0, **settings).probabilities(logits, torch.zeros(3, 1, dtype=torch.long))
    assert actual[1].isnan().all() and not actual[::2].isnan().any()


def forced(*tokens):
    return torch.tensor([tokens])


STACKED = [
    Sampling(guidance_scale=3.0, temperature=0.7, top_k=5),
    Sampling(top_p=0.6, guided_tokens=1, guidance_scale=5.0),
    Sampling(allowed=torch.arange(16) % 3 == 0, guidance_scale=2.0),
    Sampling(temperature=1.5, top_k=3, top_p=0.5, min_p=0.2, forced=forced(-1, 7, -1)),
]
POSITIONS = torch.tensor([[0, 1], [0, 1], [1, 2], [1, 2]])


def alone(logits, samplings, row):
    """The row by itself; without guidance it has no second logits."""
    sampling = samplings[row]
    branches = 2 if sampling.guidance_scale > 1 else 1
    return sampling.probabilities(logits[:branches, row, None], POSITIONS[row, None])[0]


def test_rows_of_a_stack_are_sampled_as_each_of_them_alone():
    logits = random_logits(2, 4, 2, 16)
    stack = Sampling.stack(STACKED)
    together = stack.probabilities(logits, POSITIONS)
    uniform = stack.uniform(POSITIONS, 16)
    for row, sampling in enumerate(STACKED):
        torch.testing.assert_close(together[row], alone(logits, STACKED, row))
        torch.testing.assert_close(uniform[row], sampling.uniform(POSITIONS[row, None], 16)[0])


def test_rows_are_overwritten_in_place():
    logits = random_logits(2, 4, 2, 16)
    stack = Sampling.stack(STACKED)
    names = ("guidance_scale", "temperature", "top_k", "top_p", "min_p", "forced")
    storages = [getattr(stack, name).data_ptr() for name in names]
    new = Sampling(guidance_scale=0.5, temperature=0.9, top_k=2)
    stack.put(torch.tensor([1, 3]), new)
    stack.put(torch.tensor([0, 2]), Sampling.stack([STACKED[1], STACKED[3]]))
    now = [STACKED[1], new, STACKED[3], new]
    together = stack.probabilities(logits, POSITIONS)
    for row in range(4):
        torch.testing.assert_close(together[row], alone(logits, now, row))
    assert storages == [getattr(stack, name).data_ptr() for name in names]


@pytest.mark.parametrize(
    "settings", [{"min_p": 0.1}, {"guided_tokens": 3}, {"allowed": torch.ones(4) > 0}, {"forced": forced(1)}], ids=str
)
def test_what_no_row_could_set_cannot_be_put(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        Sampling.stack([Sampling(), Sampling()]).put(torch.tensor([0]), Sampling(**settings))


def test_an_image_with_min_p_joins_images_without():
    logits, joined = random_logits(1, 3, 1, 16), Sampling(min_p=0.3, temperature=0.9)
    for batch in (Sampling(temperature=2.0), Sampling.stack([Sampling(temperature=2.0)] * 3)):
        stack = batch.join(torch.tensor([1]), joined, 3)
        assert torch.equal(stack.min_p, torch.tensor([0.0, 0.3, 0.0]))
        actual = stack.probabilities(logits, torch.zeros(3, 1, dtype=torch.long))
        for row, sampling in enumerate([Sampling(temperature=2.0), joined, Sampling(temperature=2.0)]):
            torch.testing.assert_close(actual[row], distribution(logits[:, row], sampling))


def test_the_probabilities_of_a_stack_do_not_read_the_device():
    with FakeTensorMode(), torch.device("cuda"):
        rows = [Sampling(guidance_scale=3.0, top_k=5, guided_tokens=1, forced=torch.zeros(1, 3, dtype=torch.long))]
        stack, positions = Sampling.stack(rows * 4), torch.zeros(4, 2, dtype=torch.long)
        probabilities = stack.probabilities(torch.zeros(2, 4, 2, 16), positions)
        assert probabilities.is_cuda and probabilities.shape == stack.uniform(positions, 16).shape == (4, 2, 16)
