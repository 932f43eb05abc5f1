"""A decoding is its settings: they survive JSON, do not change, and say what is wrong with them."""

import dataclasses
import json

import pytest
import torch
from presets import FOR_TOKENS

from arimage.decoding import (
    AutoregressiveDecoding,
    NeighbourAcceptance,
    Sampling,
    SpeculativeJacobiDecoding,
    decode,
    decoding_from_dict,
    decoding_from_name,
    decoding_names,
    decoding_to_dict,
    names,
)


SEEDS = torch.arange(5)
PRESETS = pytest.mark.parametrize("preset", decoding_names())
EVERY_TOKEN_PRESET = pytest.mark.parametrize("preset", FOR_TOKENS)


@PRESETS
def test_a_preset_survives_json(preset):
    decoding = decoding_from_name(preset)
    assert decoding_from_dict(json.loads(json.dumps(decoding_to_dict(decoding)))) == decoding


def test_changed_settings_survive_json():
    decoding = decoding_from_name("sjd-gumbel", window=7, init="above")
    assert decoding == SpeculativeJacobiDecoding(window=7, refresh="gumbel", init="above")
    written = json.loads(json.dumps(decoding_to_dict(decoding)))
    assert written == {
        "method": "SpeculativeJacobiDecoding",
        "window": 7,
        "refresh": "gumbel",
        "init": "above",
        "acceptance": {"method": "ExactAcceptance"},
        "relax": 1.0,
        "reuse": None,
        "levels": 0,
    }
    assert decoding_from_dict(written) == decoding
    assert written["method"] == "SpeculativeJacobiDecoding"  # what was read stays whole


def test_an_acceptance_survives_json_and_may_be_given_as_a_dict():
    decoding = decoding_from_name("lantern", acceptance=NeighbourAcceptance(delta=0.2), relax=1.1)
    written = json.loads(json.dumps(decoding_to_dict(decoding)))
    assert written["acceptance"] == {
        "method": "NeighbourAcceptance",
        "neighbours": None,
        "delta": 0.2,
        "relative": False,
    }
    assert decoding_from_dict(written) == decoding
    assert decoding_from_name("sjd", acceptance=written["acceptance"]).acceptance == decoding.acceptance
    assert decoding_from_name("gsd", acceptance={"method": "GroupAcceptance"}) == decoding_from_name("gsd")


def test_settings_left_out_are_the_defaults():
    assert decoding_from_dict({"method": "SpeculativeJacobiDecoding"}) == SpeculativeJacobiDecoding()


def test_the_presets_are_different_decodings():
    assert len({decoding_from_name(preset) for preset in decoding_names()}) == len(decoding_names())
    assert decoding_from_name("ar") == AutoregressiveDecoding()


@PRESETS
def test_the_table_of_names_says_what_the_methods_say(preset):
    row = names.PRESETS[preset]
    decoding = decoding_from_name(preset)
    assert (type(decoding).__name__, decoding.exact) == (row.method, row.exact)
    for part in (type(decoding)(), *filter(dataclasses.is_dataclass, vars(decoding).values())):
        defaults = {
            key: {"method": type(value).__name__} if dataclasses.is_dataclass(value) else value
            for key, value in vars(type(part)()).items()
        }
        assert names.DEFAULTS[type(part).__name__] == defaults


@PRESETS
def test_a_preset_is_frozen_and_says_whether_it_is_exact(preset):
    decoding = decoding_from_name(preset)
    assert isinstance(decoding.exact, bool)
    with pytest.raises(dataclasses.FrozenInstanceError):
        decoding.window = 3


def test_an_unknown_name_is_answered_with_the_choices():
    with pytest.raises(ValueError, match="'jacobi'.*ar, sjd, sjd-coupled, sjd-gumbel"):
        decoding_from_name("jacobi")


@pytest.mark.parametrize("settings", [{"method": "Jacobi"}, {"window": 3}, {}], ids=str)
def test_an_unknown_method_is_answered_with_the_choices(settings):
    with pytest.raises(ValueError, match="method.*AutoregressiveDecoding, SpeculativeJacobiDecoding"):
        decoding_from_dict(settings)


def part(method, **settings):
    return {"acceptance": {"method": method, **settings}}


@pytest.mark.parametrize(
    ("preset", "settings", "named"),
    [
        ("ar", {"window": 3}, "window"),
        ("sjd", {"windows": 3}, "windows"),
        ("sjd", {"exact": False}, "exact"),
        ("sjd", {"window": 0}, "window"),
        ("sjd", {"window": True}, "window"),
        ("sjd", {"window": 10**9}, "window"),
        ("sjd", {"window": "large"}, "window"),
        ("sjd", {"refresh": "none"}, "refresh"),
        ("sjd", {"init": "right"}, "init"),
        ("sjd", {"relax": 0.9}, "relax"),
        ("sjd", {"relax": float("nan")}, "relax"),
        ("sjd", {"relax": 10**30}, "relax"),
        ("sjd", {"relax": "x"}, "relax"),
        ("sjd", {"relax": True}, "relax"),
        ("sjd", {"reuse": -1}, "reuse"),
        ("sjd", {"reuse": 2}, "reuse"),
        ("sjd", {"reuse": "abc"}, "reuse"),
        ("sjd", {"reuse": 10**30}, "reuse"),
        ("sjd-tree", {"width": 1}, "width"),
        ("sjd-tree", {"window": 4}, "window"),
        ("sjd-tree", {"depth": 10**9}, "depth"),
        ("sjd-lazy", {"tokens": 12}, "tokens"),
        ("sjd-lazy", {"window": 2.5}, "window"),
        ("eagle", {"depth": 10**9}, "depth"),
        ("eagle", {"nodes": 10**9}, "nodes"),
        ("eagle", {"width": 0}, "width"),
        ("eagle", {"drafter": "x"}, "drafter"),
        ("zipar", {"adaptive": "x"}, "adaptive"),
        ("next-scale", {"more_smooth": "x"}, "more_smooth"),
        ("code", {"more_smooth": "x"}, "more_smooth"),
        ("code", {"drafter_scales": 0}, "drafter_scales"),
        ("sjd", {"acceptance": "gsd"}, "acceptance"),
        ("sjd", part("Gsd"), "acceptance.*Gsd"),
        ("sjd", part("GroupAcceptance", k=3), "GroupAcceptance.*k"),
        ("gsd", part("GroupAcceptance", size=0), "size"),
        ("gsd", part("GroupAcceptance", max_distance=-1), "max_distance"),
        ("lantern", part("NeighbourAcceptance", neighbours=0.5), "neighbours"),
        ("lantern", part("NeighbourAcceptance", delta=-0.1), "delta"),
        ("lantern", part("NeighbourAcceptance", relative="x"), "relative"),
    ],
    ids=str,
)
def test_wrong_settings_are_refused(preset, settings, named):
    with pytest.raises(ValueError, match=named):
        decoding_from_name(preset, **settings)
    method = type(decoding_from_name(preset)).__name__
    with pytest.raises(ValueError, match=named):
        decoding_from_dict({"method": method, **settings})


@EVERY_TOKEN_PRESET
def test_a_decoding_that_ends_has_decided_every_token_once(table_model, preset):
    model = table_model(grid=(2, 4), vocab_size=2)
    state = decode(model, decoding_from_name(preset), Sampling(), SEEDS)
    assert state.tokens.shape == state.decided.shape == (5, 8)
    assert state.tokens.dtype == torch.long and 0 <= state.tokens.min() and state.tokens.max() < 2
    assert state.decided.all() and state.finished.all()
    assert state.forward_passes == len(state.accepted_per_step()) == model.forward_passes
    assert state.accepted_per_step().sum(0).tolist() == [8] * 5


@EVERY_TOKEN_PRESET
def test_every_step_is_reported_and_decided_tokens_stay(table_model, preset):
    model = table_model(grid=(2, 4), vocab_size=3)
    seen = []

    def watch(state, step):
        assert state.forward_passes == step == model.forward_passes
        assert torch.equal(state.decided.sum(1), state.accepted_per_step().sum(0))
        assert torch.equal(state.finished, state.decided.all(1))
        if seen:
            decided, tokens = seen[-1]
            assert state.decided[decided].all() and torch.equal(state.tokens[decided], tokens[decided])
        seen.append((state.decided.clone(), state.tokens.clone()))
        return False

    state = decode(model, decoding_from_name(preset), Sampling(), SEEDS, on_step=watch)
    assert len(seen) == state.forward_passes
    unwatched = decode(model, decoding_from_name(preset), Sampling(), SEEDS)
    assert torch.equal(state.tokens, unwatched.tokens)


@EVERY_TOKEN_PRESET
@pytest.mark.parametrize("stop_at", [1, 2, 3])
def test_decoding_stops_when_the_watcher_says_so(table_model, preset, stop_at):
    model = table_model(grid=(2, 4), vocab_size=3)
    sampling = Sampling()
    state = decode(model, decoding_from_name(preset), sampling, SEEDS, on_step=lambda state, step: step == stop_at)
    assert state.forward_passes == model.forward_passes == stop_at
    whole = decode(model, decoding_from_name(preset), sampling, SEEDS)
    assert torch.equal(state.tokens[state.decided], whole.tokens[state.decided])
