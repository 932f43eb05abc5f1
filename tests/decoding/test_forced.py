"""Forced tokens: every decoding samples the others by the model's distribution given all tokens before them."""

import pytest
import torch
from decoding.conftest import some_order
from decoding.pairwise import each_once
from decoding.test_exactness import assert_follows, sample_images
from presets import FOR_TOKENS, quick

from arimage.decoding import (
    DraftTreeDecoding,
    FlowDecoding,
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
    **{name: decoding_from_name(name, window=3) for name in ("sjd", "sjd-coupled", "sjd-gumbel", "sjd2")},
    "flow": FlowDecoding(3, guesses="random"),
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
# None, one, two, and all but one of those that come first in an order.
FIRST = torch.tensor([[-1, -1, -1, -1], [1, -1, -1, -1], [2, 0, -1, -1], [2, 0, 1, -1]])


@pytest.mark.every(10)
@SIZES
@pytest.mark.parametrize("order", ["none", "random"])
@pytest.mark.parametrize("name", EXACT)
def test_free_tokens_follow_their_distribution_given_the_tokens_before(table_model, name, order, size):
    """Tokens that come first in an order are prefilled."""
    model = table_model(**GRID, branches=2, order=some_order(order, GRID["grid"], size))
    assert_each_follows(model, EXACT[name], FORCED if order == "none" else FIRST, size, f"{order} {size}")


@pytest.mark.parametrize(
    "settings",
    each_once({"window": [1, 2, 4], "refresh": ["independent", "coupled", "gumbel"], "init": ["uniform", "above"]}),
    ids=str,
)
def test_no_window_changes_the_distribution(table_model, settings):
    assert_each_follows(table_model(**GRID, branches=2), SpeculativeJacobiDecoding(**settings), FORCED[4:], 5_000, "")


def test_forced_tokens_come_out_and_the_others_are_sampled(decoding):
    decoding, model = decoding

    def tokens(forced, **settings):
        return decode(model, decoding, Sampling(forced=forced, **settings), SEEDS).tokens

    for share in (0.5, 1.0):
        forced = some_forced(model, 6, share)
        found = tokens(forced)
        assert torch.equal(torch.where(forced < 0, -1, found), forced) and (found >= 0).all()
    # Tokens that could not be sampled, and none.
    forced = torch.full((6, model.num_tokens), -1)
    assert torch.equal(tokens(forced), tokens(None))
    forced[:, ::3] = 2
    assert torch.equal(tokens(forced, allowed=torch.tensor([True, True, False])) == 2, forced == 2)


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


def test_tokens_of_another_shape_or_vocabulary_are_refused(table_model):
    model, ar = table_model(**LARGER), DECODINGS["ar"]
    for shape in ((1, 13), (1, 11), (2, 12), (12,)):
        with pytest.raises(ValueError, match="forced is .*: give"):
            decode(model, ar, Sampling(forced=torch.full(shape, -1)), SEEDS[:1])
    flags = [Sampling(allowed=torch.ones(size, dtype=torch.bool)) for size in (1, 2, 4, 3)]
    for sampling in flags[:3]:
        with pytest.raises(ValueError, match=f"allowed has {len(sampling.allowed)} tokens, the model 3"):
            decode(model, ar, sampling, SEEDS[:1])
    with pytest.raises(ValueError, match="allowed is of 4 and of 3 tokens in one batch"):
        Sampling.stack(flags[3:1:-1])
