"""An image depends on its own seed alone, and greedy decoding on nothing: exactly so on a model of tables."""

import pytest
import torch
from decoding.conftest import some_order
from decoding.pairwise import each_once

from arimage.decoding import (
    AutoregressiveDecoding,
    DraftTreeDecoding,
    FlowDecoding,
    GroupAcceptance,
    LazyJacobiDecoding,
    NeighbourAcceptance,
    ParallelJacobiDecoding,
    Sampling,
    SpeculativeJacobiDecoding,
    TreeJacobiDecoding,
    ZipARDecoding,
    decode,
)


REFRESHES, INITS = ("independent", "coupled", "gumbel"), ("uniform", "left", "above")
SEEDS = torch.tensor([0, 1, -1, 2**31, 2**32 + 5, -(2**63), 2**63 - 1, 77])
GRID = {"grid": (2, 4), "vocab_size": 2}


def jacobi(**others):
    """Settings of speculative Jacobi decoding, with `others`: each value once."""
    return each_once({**others, "refresh": list(REFRESHES), "init": list(INITS)})


DECODINGS = [
    *(SpeculativeJacobiDecoding(**settings) for settings in jacobi(window=[1, 2, 5, 8])),
    *(SpeculativeJacobiDecoding(window, levels=levels) for window, levels in ((2, 1), (5, 2))),
    SpeculativeJacobiDecoding(5, corrections=2),
    *(TreeJacobiDecoding(5, 3, 2, init) for init in INITS),
    *(LazyJacobiDecoding(8, 2, 4, init) for init in INITS),
    *(DraftTreeDecoding(tree=tree, depth=3, width=2, nodes=8) for tree in ("dynamic", "static")),
    FlowDecoding(3, guesses="random"),
    SpeculativeJacobiDecoding(5, acceptance=GroupAcceptance(3, 1.0, 9.0), relax=2.0),
    SpeculativeJacobiDecoding(5, acceptance=NeighbourAcceptance(1000, 0.2)),
    SpeculativeJacobiDecoding(5, acceptance=NeighbourAcceptance(1000, 1.0, relative=True), reuse=0.3),
]
# Rows side by side, which ask for distributions given fewer tokens.
BY_ROWS = [
    *(ZipARDecoding(window, adaptive) for window, adaptive in ((1, False), (2, True))),
    *(ParallelJacobiDecoding(*settings) for settings in ((9, 1, "coupled"), (3, 2, "independent"))),
]


@pytest.fixture(params=DECODINGS, ids=str)
def decoding(request):
    return request.param


def alone(model, decoding, sampling, seeds):
    """The same seeds, each in a batch of its own: tokens and how many steps each took."""
    states = [decode(model, decoding, sampling, seed[None]) for seed in seeds]
    return torch.cat([state.tokens for state in states]), [state.forward_passes for state in states]


@pytest.mark.every(6)
@pytest.mark.parametrize("decoding", [AutoregressiveDecoding(), *DECODINGS, *BY_ROWS], ids=str)
def test_an_image_does_not_depend_on_its_batch(table_model, decoding):
    """Nor on padding, nor does it wait for the others."""
    sampling, steps = Sampling(guidance_scale=1.5, top_p=0.95), []
    for padding in (float("nan"), 0.0):
        # The model refuses to read a slot before it is written.
        model = table_model(**GRID, branches=2, padding=padding, truncated=decoding in BY_ROWS)
        state = decode(model, decoding, sampling, SEEDS)
        tokens, alone_steps = alone(model, decoding, sampling, SEEDS[::2])
        assert torch.equal(state.tokens[::2], tokens)
        assert state.steps[::2].tolist() == alone_steps and state.forward_passes == max(state.steps)
        assert max(state.steps) <= model.num_tokens and (state.accepted.sum(0) == model.num_tokens).all()
        steps.append(state.tokens)
    assert torch.equal(*steps)
    if isinstance(decoding, AutoregressiveDecoding) or getattr(decoding, "window", 0) == 1 and decoding not in BY_ROWS:
        assert (state.steps == model.num_tokens).all()


ONE_OF_EACH = [AutoregressiveDecoding(), *(SpeculativeJacobiDecoding(10, refresh) for refresh in REFRESHES)]


@pytest.mark.parametrize("decoding", ONE_OF_EACH, ids=str)
def test_equal_seeds_give_equal_images_and_others_do_not(table_model, decoding):
    model = table_model(grid=(2, 5), vocab_size=3, sharpness=0.3)
    seeds = torch.arange(20) // 2
    for _ in range(2):
        tokens = decode(model, decoding, Sampling(), seeds).tokens
        assert torch.equal(tokens[::2], tokens[1::2])
        assert len(tokens.unique(dim=0)) == 10


def greedy(model, guidance_scale=1.0):
    """The tokens of the greatest logits, straight from the tables."""
    tokens, row = [], 0
    for table in model.tables:
        logits = table[0, row]
        if model.branches == 2:
            logits = table[1, row] + guidance_scale * (logits - table[1, row])
        tokens.append(int(logits.argmax()))
        row = row * model.vocab_size + tokens[-1]
    return torch.tensor(tokens)


@pytest.mark.every(4)
@pytest.mark.parametrize("decoding", [AutoregressiveDecoding(), *DECODINGS], ids=str)
@pytest.mark.parametrize("batch_size", [1, 8])
def test_greedy_tokens_are_those_of_the_greatest_logits(table_model, decoding, batch_size):
    for seed in (1, 2):
        model = table_model(**GRID, branches=2, seed=seed)
        state = decode(model, decoding, Sampling(guidance_scale=3.0, top_k=1), SEEDS[:batch_size])
        assert torch.equal(state.tokens, greedy(model, 3.0).expand(batch_size, -1))
        assert state.forward_passes <= model.num_tokens


@pytest.mark.parametrize("decoding", [*ONE_OF_EACH, *DECODINGS[-6:]], ids=str)
def test_an_image_of_one_token_takes_one_forward_pass(table_model, decoding):
    model = table_model(grid=(1, 1))
    state = decode(model, decoding, Sampling(), SEEDS)
    assert state.tokens.shape == (8, 1) and state.forward_passes == model.forward_passes == 1
    assert state.decided.all() and state.finished.all()
    assert torch.equal(state.tokens, alone(model, decoding, Sampling(), SEEDS)[0])


@pytest.mark.every(4)
@pytest.mark.parametrize("grid", [(1, 6), (6, 1), (3, 2)], ids=str)
def test_no_shape_of_the_grid_asks_for_what_is_not_there(table_model, grid, decoding):
    model = table_model(grid=grid, vocab_size=2)
    state = decode(model, decoding, Sampling(), SEEDS)
    assert state.decided.all() and state.forward_passes <= 6


@pytest.mark.every(2)
@pytest.mark.parametrize("order", ["random", pytest.param("spread-out", marks=pytest.mark.slow)])
def test_an_image_of_any_order_does_not_depend_on_its_batch(table_model, decoding, order):
    shape = (2, 2, 2)
    orders = some_order(order, shape, len(SEEDS))
    together = decode(table_model(grid=shape, vocab_size=2, order=orders), decoding, Sampling(), SEEDS)
    for row, seed in enumerate(SEEDS[:3]):
        model = table_model(grid=shape, vocab_size=2, order=orders[row, None])
        assert torch.equal(decode(model, decoding, Sampling(), seed[None]).tokens[0], together.tokens[row])
