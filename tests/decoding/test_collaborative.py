"""Collaborative decoding: the first maps follow the model's distribution, the others the refiner's, one forward pass
each."""

import pytest
import tiny
import torch
from decoding.conftest import scale_condition
from decoding.test_exactness import SAMPLINGS, assert_follows
from decoding.test_next_scale import ScaleTable
from pipelines.var import tiny as tiny_var

from arimage.decoding import CollaborativeDecoding, NextScaleDecoding, Sampling, decode
from arimage.pipelines.var.transformer_var import VARScaleModel


SCALES, SIZE = (1, 1, 2), 2
SEEDS = torch.arange(16)


def pair(branches=1, same=False):
    """A model of tables and its refiner."""
    model, refiner = (ScaleTable(SCALES, SIZE, branches, seed) for seed in (1, 1 if same else 2))
    model.refiner = refiner
    return model, refiner


@pytest.mark.every(2)
@pytest.mark.parametrize("drafter_scales", [1, 2])
@pytest.mark.parametrize("sampling", ["plain", "guidance", "top-p"])
def test_each_map_follows_the_distribution_of_the_model_that_sampled_it(drafter_scales, sampling):
    sampling = SAMPLINGS[sampling]
    model, refiner = pair(branches=1 if sampling.guidance_scale == 1 else 2)
    tokens = decode(model, CollaborativeDecoding(drafter_scales), sampling, torch.arange(20_000)).tokens
    both = ScaleTable(SCALES, SIZE, model.branches)
    both.tables = model.tables[:drafter_scales] + refiner.tables[drafter_scales:]
    assert_follows(tokens, both.joint(sampling), SIZE)
    with pytest.raises(AssertionError, match="chi-square|total variation|impossible"):
        assert_follows(tokens, model.joint(sampling), SIZE)


def test_forced_tokens_stand():
    model, _ = pair()
    forced = torch.full((16, 6), -1)
    forced[:, [0, 1, 4]] = torch.tensor([1, 0, 1])
    tokens = decode(model, CollaborativeDecoding(1), Sampling(forced=forced), SEEDS).tokens
    assert torch.equal(tokens[:, [0, 1, 4]], forced[:, [0, 1, 4]]) and len(tokens.unique(dim=0)) > 1


def test_a_model_without_refiner_and_wrong_settings_are_refused():
    with pytest.raises(ValueError, match="refiner"):
        decode(ScaleTable(), CollaborativeDecoding(1), Sampling(), SEEDS)
    with pytest.raises(ValueError, match="drafter_scales is 3.* 2"):
        decode(pair()[0], CollaborativeDecoding(3), Sampling(), SEEDS)
    with pytest.raises(ValueError, match="drafter_scales"):
        CollaborativeDecoding(0)


# A VAR of random weights


@pytest.fixture(params=["class", "text"])
def bound(request):
    """A tiny VAR bound to 16 classes or texts, with a smaller one as its refiner."""
    condition = scale_condition(request.param, 16)
    vq = tiny.scale_tokenizer()
    small = tiny_var.transformer(request.param, seed=1, hidden_size=16, num_layers=1)
    refiner = VARScaleModel(small, vq, condition, guided=True)
    return VARScaleModel(tiny_var.transformer(request.param), vq, condition, guided=True, refiner=refiner)


SAMPLING = Sampling(guidance_scale=3.0, top_k=30, top_p=0.95)


@pytest.mark.every(4)
@torch.no_grad()
@pytest.mark.parametrize("more_smooth", [False, True])
@pytest.mark.parametrize("drafter_scales", [1, 2, 3])
def test_a_network_that_refines_itself_samples_its_own_images(bound, drafter_scales, more_smooth):
    alone = decode(bound, NextScaleDecoding(more_smooth), SAMPLING, SEEDS)
    bound.refiner = bound
    state = decode(bound, CollaborativeDecoding(drafter_scales, more_smooth), SAMPLING, SEEDS)
    assert torch.equal(state.tokens, alone.tokens)
    torch.testing.assert_close(state.latents, alone.latents, atol=1e-4, rtol=1e-4)


@pytest.mark.every(2)
@torch.no_grad()
@pytest.mark.parametrize("drafter_scales", [1, 2, 3])
def test_heads_run_over_the_maps_that_are_sampled_and_no_others(bound, drafter_scales):
    seen = {"model": [], "refiner": []}
    for name, model in (("model", bound), ("refiner", bound.refiner)):
        model.network.head.register_forward_hook(lambda *call, name=name: seen[name].append(call[-1].shape[1]))
    state = decode(bound, CollaborativeDecoding(drafter_scales), SAMPLING, SEEDS)
    assert seen == {"model": [1, 4, 9, 16][:drafter_scales], "refiner": [1, 4, 9, 16][drafter_scales:]}
    assert state.forward_passes == len(tiny.SCALES)
    drafted = decode(bound, NextScaleDecoding(), SAMPLING, SEEDS).tokens
    count = sum([1, 4, 9, 16][:drafter_scales])
    assert torch.equal(state.tokens[:, :count], drafted[:, :count])
    assert not torch.equal(state.tokens[:, count:], drafted[:, count:])
