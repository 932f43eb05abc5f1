"""Scales of which only some cells are fed: on a VAR of classes, one of texts and an Infinity of random weights."""

from dataclasses import replace

import pytest
import torch
from decoding.conftest import scale_condition, scale_models
from pipelines.infinity import tiny as tiny_infinity

from arimage.decoding import NextScaleDecoding, Sampling, decode
from arimage.models.conditions import with_unconditional
from arimage.models.pruning import Pruning, only
from arimage.pipelines.infinity.scale_model import InfinityScaleModel
from arimage.pipelines.infinity.schedules import SCHEDULES


SEEDS, ROWS = torch.arange(3), [0, 1, 2]
SHARP = Sampling(guidance_scale=3.0, top_k=30, top_p=0.95)
HALF = NextScaleDecoding(pruned=(0.5, 0.5))


@pytest.fixture(scope="module", params=["class", "text", "bits"])
def bound(request):
    return scale_models(request.param)


def watch(model):
    """The shape [rows, cells] that the layers are fed with in each forward pass, filled as it runs."""
    shapes, blocks = [], model.network.blocks
    handle = blocks[-1].register_forward_hook(lambda block, inputs, output: shapes.append(tuple(output.shape[:2])))
    return shapes, handle


def counts_of(model):
    return [rows * columns for rows, columns in model.scales]


# The parts


def test_the_cells_that_differ_most_are_fed_and_the_others_change_as_their_place_did():
    change = torch.zeros(2, 4, 5)
    pruning = Pruning(kept=3, first=0, stop=3, shape=(4, 4), source=(2, 2), change=change)
    hidden = torch.zeros(2, 16, 5)
    hidden[0, [2, 7, 9], 1], hidden[1, [0, 1, 15], 3] = 4.0, -4.0
    hidden[:, 4, 0] = 0.1
    cells = pruning.choose(hidden)
    assert [sorted(row) for row in cells.tolist()] == [[2, 7, 9], [0, 1, 15]]
    whole = Pruning(kept=None, first=1, stop=5, shape=(2, 2), source=(2, 2), change=change)
    before, after = torch.randn(2, 2, 4, 5)
    assert whole.choose(before) is None and only(before, None) is before
    assert whole.restore(before, after, None) is after
    torch.testing.assert_close(change, after - before)
    passed = torch.full((2, 3, 5), 9.0)
    restored = pruning.restore(hidden, passed, cells)
    # Each cell of the map before covers four.
    place = torch.tensor([0, 0, 1, 1] * 2 + [2, 2, 3, 3] * 2)
    expected = hidden + (after - before)[:, place]
    for row, fed in enumerate([[2, 7, 9], [0, 1, 15]]):
        expected[row, fed] = 9.0
    torch.testing.assert_close(restored, expected)


# Whole images


@pytest.mark.every(2)
@torch.no_grad()
@pytest.mark.parametrize("shares", [(0.0,), (0.0, 0.0)])
def test_nothing_left_out_changes_nothing(bound, shares):
    plain, state = (decode(bound(ROWS), NextScaleDecoding(pruned=pruned), SHARP, SEEDS) for pruned in ((), shares))
    assert torch.equal(state.tokens, plain.tokens) and state.forward_passes == plain.forward_passes
    torch.testing.assert_close(state.latents, plain.latents)


@torch.no_grad()
def test_fewer_cells_are_fed_and_all_tokens_are_decided(bound):
    model = bound(ROWS)
    counts, (shapes, handle) = counts_of(model), watch(model)
    plain = decode(model, NextScaleDecoding(), SHARP, SEEDS)
    keys = plain.cache.allocated
    del shapes[:]
    state = decode(model, HALF, SHARP, SEEDS)
    handle.remove()
    # A text is a prefix of the first scale.
    assert shapes[1:] == [(6, count) for count in (*counts[1:-2], *(round(count / 2) for count in counts[-2:]))]
    # VAR keeps its last scale too.
    halved = counts[-2:] if keys > plain.cache.prefix_end + sum(counts) else counts[-2:-1]
    assert state.cache.allocated == keys - sum(count - round(count / 2) for count in halved)
    assert not HALF.exact and state.forward_passes == len(counts) and state.decided.all()
    kept = sum(model.scale_sizes[:-2])
    assert torch.equal(state.tokens[:, :kept], plain.tokens[:, :kept])
    assert not torch.equal(state.tokens[:, kept:], plain.tokens[:, kept:])
    assert state.latents.isfinite().all()


@torch.no_grad()
def test_an_image_does_not_depend_on_its_batch(bound):
    batch = decode(bound(ROWS), HALF, SHARP, SEEDS)
    for row in ROWS:
        alone = decode(bound([row]), HALF, SHARP, SEEDS[row : row + 1])
        assert torch.equal(alone.tokens[0], batch.tokens[row])


@torch.no_grad()
def test_cells_are_left_out_without_guidance_and_after_it(bound):
    """An image without guidance, one whose last scales are not guided, and one whose guidance is a list."""
    model = bound(ROWS)
    last = len(model.scales) - 1
    plain = replace(SHARP, guidance_scale=1.0)
    ones = replace(SHARP, guidance_scale=[1.0] * (last + 1))
    tokens = [
        decode(bound(ROWS, guided=guided), HALF, sampling, SEEDS).tokens
        for guided, sampling in ((False, plain), (True, ones))
    ]
    assert torch.equal(*tokens)
    shapes, handle = watch(model)
    state = decode(model, replace(HALF, guided_scales=last), SHARP, SEEDS)
    handle.remove()
    assert [rows for rows, _ in shapes] == [6] * last + [3]
    full = decode(model, HALF, SHARP, SEEDS)
    kept = sum(model.scale_sizes[:-1])
    assert torch.equal(state.tokens[:, :kept], full.tokens[:, :kept]) and not torch.equal(state.tokens, full.tokens)


@torch.no_grad()
def test_the_last_of_the_scales_that_are_generated_are_pruned(bound):
    model = bound(ROWS)
    end = len(model.scales) - 1
    shapes, handle = watch(model)
    state = decode(model, NextScaleDecoding(stop_after=end, pruned=(0.75,)), SHARP, SEEDS)
    handle.remove()
    assert [cells for _, cells in shapes[1:]] == [*counts_of(model)[1 : end - 1], round(counts_of(model)[end - 1] / 4)]
    decided = sum(model.scale_sizes[:end])
    assert (state.tokens[:, :decided] >= 0).all() and (state.tokens[:, decided:] == -1).all()


@torch.no_grad()
def test_known_tokens_stay_and_the_others_follow_them(bound):
    model = bound(ROWS)
    plain = decode(model, NextScaleDecoding(), SHARP, SEEDS)
    known = torch.where(torch.arange(model.num_tokens) % 3 > 0, plain.tokens, -1)
    state = decode(model, HALF, replace(SHARP, forced=known), SEEDS)
    assert torch.equal(state.tokens[known >= 0], known[known >= 0]) and state.decided.all()
    assert torch.equal(decode(model, HALF, replace(SHARP, forced=plain.tokens), SEEDS).tokens, plain.tokens)


@torch.no_grad()
def test_guidance_of_hidden_states_leaves_out_cells():
    parts = tiny_infinity.transformer(), tiny_infinity.tokenizer()
    condition = with_unconditional(scale_condition("text"), kept=("prompt_attention_mask",))
    sampling = replace(SHARP, guidance_scale=1.0)
    for shares in ((0.0, 0.0), (0.5, 0.5)):
        tokens = []
        for pruned in ((), shares):
            model = InfinityScaleModel(
                *parts, condition, SCHEDULES[16, 16], guided=True, mixed_layer=0, guidance=(3.0,) * 7
            )
            # The pipeline samples from logits that are guided already.
            tokens.append(decode(model, NextScaleDecoding(pruned=pruned), sampling, SEEDS).tokens)
        assert torch.equal(*tokens) == (shares == (0.0, 0.0))


# What is refused


def test_the_first_two_scales_and_models_that_cannot_are_refused(bound):
    model = bound(ROWS)
    most = len(model.scales) - 2
    assert NextScaleDecoding(pruned=(0.5,) * most).supports(model) is None
    message = f"pruned holds {most + 1} shares: give at most {most}"
    assert message in NextScaleDecoding(pruned=(0.5,) * (most + 1)).supports(model)
    assert "give at most 1" in NextScaleDecoding(pruned=(0.5, 0.5), stop_after=3).supports(model)
    assert model.codebook is not None or "more_smooth" in replace(HALF, more_smooth=True).supports(model)
    model.prunes = False
    assert NextScaleDecoding().supports(model) is None
    with pytest.raises(ValueError, match="it cannot leave out cells"):
        decode(model, HALF, SHARP, SEEDS)
