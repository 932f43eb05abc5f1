"""A decoding is its settings: they survive JSON, do not change, and say what is wrong with them."""

import contextlib
import dataclasses
import itertools
import json

import pytest
import torch
from presets import FOR_TOKENS

from arimage.decoding import (
    ExactAcceptance,
    GroupAcceptance,
    NeighbourAcceptance,
    Sampling,
    SpeculativeJacobiDecoding,
    decode,
    decoding_from_dict,
    decoding_from_name,
    decoding_from_text,
    decoding_names,
    decoding_to_dict,
    decoding_to_text,
    names,
)


SEEDS = torch.arange(5)
PRESETS = pytest.mark.parametrize("preset", decoding_names())
EVERY_TOKEN_PRESET = pytest.mark.parametrize("preset", FOR_TOKENS)


# A few values of every setting that has a choice of them, next to those of the presets.
VALUES = {
    "window": [8, 128, "auto"],
    "refresh": ["coupled", "gumbel", "independent"],
    "init": ["left", "uniform"],
    "relax": [1.0, 1.0000001, 12.5],
    "reuse": [None, 0.8, 1e-05],
    "levels": [0, 2],
    "corrections": [0, 3],
    "lines": [None, 2, 12],
    "chain": [4, "auto"],
    "tokens": [48],
    "width": [2],
    "depth": [2],
    "adaptive": [True],
    "context": [None, 3],
    "nodes": [16],
    "tree": ["static"],
    "groups": [4, (4,), (1, 3)],
    "schedule": ["cosine"],
    "guidance_schedule": ["constant", "falling", "half-linear"],
    "attention": ["causal"],
    "more_smooth": [True],
    "guided_scales": [1, 3],
    "stop_after": [2],
    "pruned": [(), (0.5,), (0.25, 0.75)],
    "drafter_scales": [2],
    "starts": [(0,), (0, 3)],
    "codes_until": [2],
    "diffusion_steps": [None, (50, 5), (4, 4)],
    "target_share": [1e-05, 0.5],
    "heat": [0.1, 1e5],
    "coupling": ["path", "reflection"],
    "teacher_start": [0, 2],
    "acceptance": [
        ExactAcceptance(),
        GroupAcceptance(),
        GroupAcceptance(size=3, max_distance=1e-07),
        NeighbourAcceptance(neighbours=5),
        NeighbourAcceptance(delta=1e-07, relative=True),
    ],
}


def variants(preset):
    """A preset, and it with every one and every two of its settings changed; those that are no decoding left out."""
    fields = [field.name for field in dataclasses.fields(decoding_from_name(preset)) if field.name in VALUES]
    changes = [{name: value} for name in fields for value in VALUES[name]]
    pairs = [one | other for one, other in itertools.combinations(changes, 2) if one.keys() != other.keys()]
    # Corrections need two others, which some presets do not have.
    corrected = [{"refresh": "coupled", "reuse": None, "corrections": 2}] if "corrections" in fields else []
    for change in ({}, *changes, *pairs, *corrected):
        with contextlib.suppress(ValueError):
            yield decoding_from_name(preset, **change)


@pytest.mark.every(3)
@PRESETS
def test_texts_and_decodings_are_inverse(preset):
    found = list(variants(preset))
    fields = [field.name for field in dataclasses.fields(found[0]) if field.name != "drafter"]
    for decoding in found:
        text = decoding_to_text(decoding)
        assert decoding_from_text(text) == decoding, text
        assert decoding_from_dict(json.loads(json.dumps(decoding_to_dict(decoding)))) == decoding
        names.check_text(text)
    # Not one setting without a value that makes a decoding.
    assert all(len({getattr(decoding, name) for decoding in found}) > 1 for name in fields)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("zipar:acceptance.delta=0.1", "ZipARDecoding has no setting 'acceptance'"),
        ("sjd:acceptance.delta=0.1", "ExactAcceptance has no setting 'delta'"),
        ("sjd:acceptance=Nearest", "unknown acceptance method 'Nearest'; available: ExactAcceptance, "),
        ("lantern:acceptance.size=3", "NeighbourAcceptance has no setting 'size': it has neighbours, delta, relative"),
        ("lantern:window.size=3", "has no setting 'window.size'"),
    ],
)
def test_a_text_with_an_unknown_part_is_refused_with_the_choices(text, sentence):
    for read in (decoding_from_text, names.check_text):
        with pytest.raises(ValueError, match=sentence):
            read(text)


def test_a_decoding_of_another_library_has_no_text():
    class Other(SpeculativeJacobiDecoding):
        pass

    with pytest.raises(ValueError, match="Other has no text: give a decoding that is one of Auto"):
        decoding_to_text(Other())


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
        assert names.defaults_of(type(part).__name__) == defaults


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match="'jacobi'.*path-jacobi.*arimage decodings"):
        decoding_from_name("jacobi")


@pytest.mark.parametrize("settings", [{"method": "Jacobi"}, {"window": 3}, {}], ids=str)
def test_an_unknown_method_is_answered_with_the_choices(settings):
    with pytest.raises(ValueError, match="method.*AutoregressiveDecoding, SpeculativeJacobiDecoding"):
        decoding_from_dict(settings)


def part(method, **settings):
    return {"acceptance": {"method": method, **settings}}


# By preset and setting: values that it cannot have.
NAN = float("nan")
WRONG = {
    "ar": {"window": [3]},
    "sjd": {
        "windows": [3], "exact": [False], "window": [0, True, 10**9, "large"], "refresh": ["none"], "init": ["right"],
        "relax": [0.9, NAN, 10**30, "x", True], "reuse": [-1, 2, "abc", 10**30], "acceptance": ["gsd"],
    },
    "sjd-coupled": {"corrections": [-1]},
    "sjd-tree": {"width": [1], "window": [4], "depth": [10**9]},
    "sjd-lazy": {"tokens": [12], "window": [2.5], "chain": [0, "all", None]},
    "eagle": {
        "depth": [0, -1, 1.5, None, True, 10**9], "nodes": [0, 10**9], "width": [0], "drafter": ["x"],
        "tree": ["ternary"], "acceptance": ["exact"],
    },
    "zipar": {"adaptive": ["x"], "window": [0]},
    "pjd": {"window": [1.5], "context": [0], "refresh": ["gumbel"]},
    "line-cache": {"lines": [1, 0, -3, True, 2.5, "4"]},
    "next-scale": {"more_smooth": ["x"], "guided_scales": [0], "stop_after": [1.5]},
    "fastvar": {"pruned": [1.0, (0.5, NAN), (True,), "half"]},
    "code": {"more_smooth": ["x"], "drafter_scales": [0]},
    "groups": {
        "groups": [0, (), (1, 0), (1, 2.0), "1/3", True], "schedule": ["linear"], "guidance_schedule": ["cosine"],
        "attention": ["none"],
    },
    "few-step": {
        "starts": [(), (1,), (0, 3, 2), (0, 2, 2), (0, 2.5), "0,2"], "codes_until": [-1, True],
        "teacher_start": [0, "x"],
    },
    "flow": {"starts": [(1,)], "window": [0], "guesses": ["teacher"]},
    "mar": {"diffusion_steps": [(6,), (6, 1), 6, (6, 2.5)]},
    "recap": {
        "steps": [0], "full_steps": [-1], "partial_steps": [0], "denoising_steps": [1, (4, 0)],
        "partial_denoising_steps": [2.5], "keep_buffers": ["yes"],
    },
    "lazy-mar": {
        "first": [0], "every": [0], "layer": [-1], "extra": [1.5], "head_every": [0], "fractions": [(0.5, 1.5), ()],
    },
    "ml-cache": {
        "steps": [0], "warmup": [1, -0.1], "interval": [0], "ratio": [0, 1], "sampler": ["confidence"],
    },
    "confidence": {"max_gumbel": [-1]},
}  # fmt: skip


def check_refused(preset, settings, named):
    with pytest.raises(ValueError, match=named):
        decoding_from_name(preset, **settings)
    with pytest.raises(ValueError, match=named):
        decoding_from_dict({"method": type(decoding_from_name(preset)).__name__, **settings})


@pytest.mark.parametrize("preset", WRONG)
def test_values_out_of_range_are_refused_by_the_name_of_their_setting(preset):
    for setting, values in WRONG[preset].items():
        for value in values:
            check_refused(preset, {setting: value}, setting)


@pytest.mark.parametrize(
    ("preset", "settings", "named"),
    [
        ("sjd", {"corrections": 2, "refresh": "gumbel"}, "corrections is 2: give the coupled refresh"),
        ("sjd-coupled", {"corrections": 2, "reuse": 0.5}, "corrections is 2: .* without reuse"),
        ("few-step", {"starts": (0, 2), "teacher_start": 2}, "teacher_start"),
        ("recap", {"full_steps": 9, "steps": 8}, "full_steps"),
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
def test_settings_that_do_not_fit_each_other_are_refused(preset, settings, named):
    check_refused(preset, settings, named)


@pytest.mark.every(3)
@EVERY_TOKEN_PRESET
def test_every_step_is_reported_and_decided_tokens_stay_until_all_are_decided_once(table_model, preset):
    model, seen = table_model(grid=(2, 4), vocab_size=3), []

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
    assert len(seen) == state.forward_passes == len(state.accepted_per_step()) == model.forward_passes
    assert state.tokens.shape == state.decided.shape == (5, 8) and state.tokens.dtype == torch.long
    assert 0 <= state.tokens.min() and state.tokens.max() < 3 and state.decided.all() and state.finished.all()
    assert state.accepted_per_step().sum(0).tolist() == [8] * 5
    assert torch.equal(state.tokens, decode(model, decoding_from_name(preset), Sampling(), SEEDS).tokens)
