"""A decoding is its settings: they survive JSON, do not change, and say what is wrong with them."""

import dataclasses
import json

import pytest
import torch

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
)


SEEDS = torch.arange(5)
PRESETS = pytest.mark.parametrize("preset", decoding_names())
FOR_CODES = pytest.mark.parametrize("preset", decoding_names(scales=False))


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
    }
    assert decoding_from_dict(written) == decoding
    assert written["method"] == "SpeculativeJacobiDecoding"  # what was read stays whole


def test_an_acceptance_survives_json_and_may_be_given_as_a_dict():
    decoding = decoding_from_name("lantern", acceptance=NeighbourAcceptance(delta=0.2), relax=1.1)
    written = json.loads(json.dumps(decoding_to_dict(decoding)))
    assert written["acceptance"] == {
        "method": "NeighbourAcceptance",
        "neighbours": 1000,
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
def test_a_preset_is_frozen_and_says_whether_it_is_exact(preset):
    decoding = decoding_from_name(preset)
    assert isinstance(decoding.exact, bool)
    with pytest.raises(dataclasses.FrozenInstanceError):
        decoding.window = 3


def test_an_unknown_name_is_answered_with_the_choices():
    with pytest.raises(ValueError, match="no decoding 'jacobi': choose among ar, sjd, sjd-coupled, sjd-gumbel"):
        decoding_from_name("jacobi")


@pytest.mark.parametrize("settings", [{"method": "Jacobi"}, {"window": 3}, {}], ids=str)
def test_an_unknown_method_is_answered_with_the_choices(settings):
    with pytest.raises(ValueError, match="choose among AutoregressiveDecoding, SpeculativeJacobiDecoding"):
        decoding_from_dict(settings)


@pytest.mark.parametrize(
    ("preset", "settings", "message"),
    [
        ("ar", {"window": 3}, "AutoregressiveDecoding has no setting 'window': it has none"),
        ("sjd", {"windows": 3}, "no setting 'windows': it has window, refresh, init"),
        ("sjd", {"exact": False}, "no setting 'exact'"),
        ("sjd", {"window": 0}, "window is 0: give a whole number of at least 1"),
        ("sjd", {"refresh": "none"}, "refresh is 'none': choose among independent, coupled, gumbel"),
        ("sjd", {"init": "right"}, "init is 'right': choose among uniform, left, above"),
        ("sjd-tree", {"width": 1}, "width is 1: give a whole number of at least 2"),
        ("sjd-tree", {"window": 4}, "window is 4: give a whole number of at least 5"),
        ("sjd-lazy", {"tokens": 12}, "tokens is 12: give a whole number of at least 16"),
        ("sjd-lazy", {"window": 2.5}, "window is 2.5: give a whole number of at least 32"),
        ("sjd", {"acceptance": "gsd"}, r"acceptance is 'gsd': choose among ExactAcceptance\(\), Group"),
        ("sjd", {"acceptance": {"method": "Gsd"}}, "no acceptance method 'Gsd': choose among ExactAcceptance, Group"),
        (
            "sjd",
            {"acceptance": {"method": "GroupAcceptance", "k": 3}},
            "GroupAcceptance has no setting 'k': it has size",
        ),
        (
            "gsd",
            {"acceptance": {"method": "GroupAcceptance", "size": 0}},
            "size is 0: give a whole number of at least 1",
        ),
        ("gsd", {"acceptance": {"method": "GroupAcceptance", "max_distance": -1}}, "max_distance is -1: give"),
        ("lantern", {"acceptance": {"method": "NeighbourAcceptance", "neighbours": 0.5}}, "neighbours is 0.5: give"),
        ("lantern", {"acceptance": {"method": "NeighbourAcceptance", "delta": -0.1}}, "delta is -0.1: give"),
        ("sjd", {"relax": 0.9}, "relax is 0.9: give a factor of at least 1"),
        ("sjd", {"relax": float("nan")}, "relax is nan: give"),
        ("sjd", {"reuse": -1}, "reuse is -1: give a ratio of at least 0, or None"),
    ],
)
def test_wrong_settings_are_refused(preset, settings, message):
    with pytest.raises(ValueError, match=message):
        decoding_from_name(preset, **settings)
    method = type(decoding_from_name(preset)).__name__
    with pytest.raises(ValueError, match=message):
        decoding_from_dict({"method": method, **settings})


@FOR_CODES
def test_a_decoding_that_ends_has_decided_every_code_once(table_model, preset):
    model = table_model(grid=(2, 4), vocab_size=2)
    state = decode(model, decoding_from_name(preset), Sampling(), SEEDS)
    assert state.tokens.shape == state.decided.shape == (5, 8)
    assert state.tokens.dtype == torch.long and 0 <= state.tokens.min() and state.tokens.max() < 2
    assert state.decided.all() and state.finished.all()
    assert state.forward_passes == len(state.accepted_per_step()) == model.forward_passes
    assert state.accepted_per_step().sum(0).tolist() == [8] * 5


@FOR_CODES
def test_every_pass_is_reported_and_decided_codes_stay(table_model, preset):
    model = table_model(grid=(2, 4), vocab_size=3)
    seen = []

    def watch(state):
        assert state.forward_passes == model.forward_passes
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


@FOR_CODES
@pytest.mark.parametrize("stop_at", [1, 2, 3])
def test_decoding_stops_when_the_watcher_says_so(table_model, preset, stop_at):
    model = table_model(grid=(2, 4), vocab_size=3)
    sampling = Sampling()
    state = decode(
        model, decoding_from_name(preset), sampling, SEEDS, on_step=lambda state, step: state.forward_passes == stop_at
    )
    assert state.forward_passes == model.forward_passes == stop_at
    whole = decode(model, decoding_from_name(preset), sampling, SEEDS)
    assert torch.equal(state.tokens[state.decided], whole.tokens[state.decided])
