"""Forced tokens: every decoding samples the others by the model's distribution given all tokens before them."""

import pytest
import torch
from decoding.conftest import some_order
from decoding.pairwise import each_once
from decoding.test_exactness import assert_follows, sample_images
from presets import FOR_TOKENS, quick

from arimage.decoding import (
    DraftTreeDecoding,
    LazyJacobiDecoding,
    Sampling,
    SpeculativeJacobiDecoding,
    decode,
    decoding_from_name,
)


GRID = {"grid": (2, 2), "vocab_size": 3}
LARGER = {"grid": (3, 4), "vocab_size": 3}
# The first, the last, one between, two apart, a run.
FORCED = torch.tensor([[2, -1, -1, -1], [-1, -1, -1, 0], [-1, 1, -1, -1], [0, -1, 2, -1], [-1, 2, 0, -1]])
DECODINGS = {name: decoding_from_name(name) for name in FOR_TOKENS}
# Windows and trees no larger than the image, which take a fraction of the time.
SMALL = {
    **{name: decoding_from_name(name, window=3) for name in ("sjd", "sjd-coupled", "sjd-gumbel", "sjd2", "flow")},
    "sjd-tree": decoding_from_name("sjd-tree", window=4, depth=2),
    "sjd-lazy": decoding_from_name("sjd-lazy", window=4, chain=2, tokens=3),
    **{f"eagle {tree}": DraftTreeDecoding(tree=tree, depth=2, width=2, nodes=4) for tree in ("dynamic", "static")},
}
EXACT = {name: decoding for name, decoding in DECODINGS.items() if decoding.exact and name != "eagle"} | SMALL
SEEDS = torch.arange(6)


def some_forced(model, batch_size, share=0.5, seed=0):
    """Codes [B, N] of which about a `share` is forced, in another place in every image."""
    generator = torch.Generator().manual_seed(seed)
    shape = batch_size, model.num_tokens
    tokens = torch.randint(model.vocab_size, shape, generator=generator)
    return torch.where(torch.rand(shape, generator=generator) < share, tokens, -1)


@pytest.fixture(params=quick(DECODINGS))
def decoding(request, table_model):
    # Rows that begin early ask for distributions given fewer tokens, which the tables have with `truncated` only.
    return DECODINGS[request.param], table_model(**LARGER, truncated=request.param in ("zipar", "pjd"))


def assert_each_follows(model, decoding, patterns, size, case):
    """Every image of a batch follows its distribution given the tokens that `patterns` [M, N] force in it, one after
    the other."""
    settings = {"guidance_scale": 1.5, "top_p": 0.95}
    forced = patterns[torch.arange(size) % len(patterns)]
    tokens = sample_images(model, decoding, Sampling(**settings, forced=forced), size, case)
    for first, given in enumerate(patterns.tolist()):
        assert_follows(tokens[first :: len(patterns)], model.joint_given(Sampling(**settings), given), 3)


SIZES = pytest.mark.parametrize("size", [5_000, pytest.param(200_000, marks=pytest.mark.slow)])


@pytest.mark.every(5)
@SIZES
@pytest.mark.parametrize("name", EXACT)
def test_free_tokens_follow_their_distribution_given_the_tokens_before(table_model, name, size):
    assert_each_follows(table_model(**GRID, branches=2), EXACT[name], FORCED, size, f"forced {size}")


@pytest.mark.parametrize(
    "settings",
    each_once(
        {
            "window": [1, 2, 4],
            "refresh": ["independent", "coupled", "gumbel"],
            "init": ["uniform", "left", "above"],
        }
    ),
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_no_window_changes_the_distribution(table_model, settings):
    model, size, given = table_model(**GRID), 5_000, torch.tensor([-1, 2, 0, -1])
    decoding = SpeculativeJacobiDecoding(**settings)
    tokens = sample_images(model, decoding, Sampling(forced=given.expand(size, -1)), size)
    assert_follows(tokens, model.joint_given(Sampling(), given.tolist()), 3)


def test_it_is_not_the_distribution_given_the_tokens_after(table_model):
    # What a token is likely to be, knowing what follows, is another distribution: the check must reject it.
    model, size, given = table_model(**GRID), 1_000, torch.tensor([-1, 2, 0, -1])
    tokens = sample_images(model, DECODINGS["ar"], Sampling(forced=given.expand(size, -1)), size)
    fits = (model.joint_given(Sampling(), given.tolist()) > 0).double()
    conditioned = model.joint(Sampling()) * fits
    with pytest.raises(AssertionError, match="chi-square|total variation"):
        assert_follows(tokens, conditioned / conditioned.sum(), 3)


def test_forced_tokens_come_out_and_the_others_are_sampled(decoding):
    decoding, model = decoding
    forced = some_forced(model, 6)
    state = decode(model, decoding, Sampling(forced=forced), SEEDS)
    assert torch.equal(state.tokens[forced >= 0], forced[forced >= 0])
    assert state.decided.all() and len(state.tokens[forced < 0].unique()) == model.vocab_size


def test_an_image_all_of_whose_tokens_are_forced_comes_out_as_it_is(decoding):
    decoding, model = decoding
    forced = some_forced(model, 6, share=1.0)
    assert torch.equal(decode(model, decoding, Sampling(forced=forced), SEEDS).tokens, forced)


def test_tokens_may_be_forced_that_could_not_be_sampled(decoding):
    decoding, model = decoding
    allowed = torch.tensor([True, True, False])
    forced = torch.full((6, model.num_tokens), -1)
    forced[:, ::3] = 2
    tokens = decode(model, decoding, Sampling(allowed=allowed, forced=forced), SEEDS).tokens
    assert torch.equal(tokens == 2, forced == 2)


@pytest.mark.every(3)
def test_nothing_forced_changes_nothing(decoding):
    decoding, model = decoding
    free = torch.full((6, model.num_tokens), -1)
    tokens = [decode(model, decoding, Sampling(forced=forced), SEEDS).tokens for forced in (None, free)]
    assert torch.equal(*tokens)


@pytest.mark.every(6)
def test_an_image_does_not_depend_on_what_is_forced_in_others(decoding):
    decoding, model = decoding
    forced = some_forced(model, 6)
    batch = decode(model, decoding, Sampling(forced=forced), SEEDS).tokens
    for tokens, given, seed in zip(batch, forced, SEEDS, strict=True):
        alone = decode(model, decoding, Sampling(forced=given[None]), seed[None]).tokens
        assert torch.equal(tokens, alone[0])


@pytest.mark.parametrize("init", ["uniform", "left", "above"])
@pytest.mark.parametrize("method", [SpeculativeJacobiDecoding, LazyJacobiDecoding])
def test_a_run_of_forced_tokens_takes_one_step_per_window(table_model, method, init):
    model = table_model(**LARGER)
    decoding = method(window=4, init=init) if method is SpeculativeJacobiDecoding else method(8, 4, 4, init)
    forced = some_forced(model, 3, share=1.0)
    # One token by the prefill, then four per step.
    assert decode(model, decoding, Sampling(forced=forced), SEEDS[:3]).forward_passes == 1 + 3
    forced[:, 9:] = -1
    assert decode(model, decoding, Sampling(forced=forced), SEEDS[:3]).forward_passes <= 1 + 2 + 3


@pytest.mark.every(5)
@SIZES
@pytest.mark.parametrize("name", EXACT)
def test_tokens_that_come_first_in_an_order_are_prefilled(table_model, name, size):
    # None, one, two, and all but one.
    known = torch.tensor([[-1, -1, -1, -1], [1, -1, -1, -1], [2, 0, -1, -1], [2, 0, 1, -1]])
    model = table_model(**GRID, branches=2, order=some_order("random", GRID["grid"], size))
    assert_each_follows(model, EXACT[name], known, size, f"known {size}")


def test_known_tokens_take_one_forward_pass(table_model):
    model = table_model(**LARGER, order=some_order("random", LARGER["grid"], 6))
    forced = some_forced(model, 6, share=1.0)
    state = decode(model, DECODINGS["ar"], Sampling(forced=forced), SEEDS)
    assert state.forward_passes == 1 and torch.equal(state.tokens, forced)
    forced[:, 9:] = -1
    state = decode(model, DECODINGS["ar"], Sampling(forced=forced), SEEDS)
    assert state.accepted_per_step().tolist() == [[10] * 6, [1] * 6, [1] * 6]
    # Whatever others know.
    forced[0, 4:] = -1
    state = decode(model, DECODINGS["ar"], Sampling(forced=forced), SEEDS)
    assert state.accepted_per_step().T.tolist() == [[5] + [1] * 7] + [[10, 1, 1] + [0] * 5] * 5
    passes = decode(model, DECODINGS["sjd-coupled"], Sampling(forced=forced), SEEDS).accepted_per_step()
    assert (passes[0] == torch.tensor([5] + [10] * 5)).all()


@pytest.mark.parametrize("shape", [(1, 13), (1, 11), (2, 12), (12,)])
def test_known_tokens_of_another_shape_are_refused(decoding, shape):
    method, model = decoding
    with pytest.raises(ValueError, match="forced is .*: give"):
        decode(model, method, Sampling(forced=torch.full(shape, -1)), SEEDS[:1])


@pytest.mark.parametrize("size", [1, 2, 4])
def test_allowed_tokens_of_another_vocabulary_are_refused(decoding, size):
    method, model = decoding
    with pytest.raises(ValueError, match=f"allowed has {size} tokens, the model 3"):
        decode(model, method, Sampling(allowed=torch.ones(size, dtype=torch.bool)), SEEDS[:1])


def test_settings_of_two_vocabularies_make_no_batch():
    flags = [Sampling(allowed=torch.ones(size, dtype=torch.bool)) for size in (3, 4)]
    with pytest.raises(ValueError, match="allowed is of 4 and of 3 tokens in one batch"):
        Sampling.stack(flags)
