"""An exact decoding draws images from the model's own joint law: at every setting, and under every sampling.

A new exact decoding is one row of `ROWS`.
"""

import itertools
import math
import sys
import zlib

import pytest
import torch

from arimage.decoding import (
    AutoregressiveDecoding,
    DraftTreeDecoding,
    LazyJacobiDecoding,
    Sampling,
    SpeculativeJacobiDecoding,
    TreeJacobiDecoding,
    decode,
    decoding_from_name,
    decoding_names,
)
from arimage.decoding.noise import uniforms
from arimage.decoding.siblings import sample_siblings
from arimage.decoding.window import slide_window
from arimage.kernels.coupling import couple_window, sample


WINDOWS = object()  # stands for 1 .. N
ROWS = [
    (AutoregressiveDecoding, {}),
    (
        SpeculativeJacobiDecoding,
        {"window": WINDOWS, "refresh": ["independent", "coupled", "gumbel"], "init": ["uniform", "left", "above"]},
    ),
    (TreeJacobiDecoding, {"window": [4], "width": [2, 3], "depth": [1, 2, 3], "init": ["uniform", "left", "above"]}),
    (
        DraftTreeDecoding,
        {"drafter": [None], "tree": ["dynamic", "static"], "depth": [1, 3], "width": [1, 2, 3], "nodes": [4, 8]},
    ),
    (LazyJacobiDecoding, {"window": [4], "chain": [1, 2], "tokens": [2, 3], "init": ["uniform", "left", "above"]}),
]

SAMPLINGS = {
    "plain": Sampling(),
    "temperature": Sampling(temperature=0.6),
    "top-k": Sampling(top_k=2),
    "top-p": Sampling(top_p=0.75),
    "guidance": Sampling(guidance_scale=2.5),
    "guided first 2": Sampling(guidance_scale=2.5, guided_tokens=2),
    "allowed": Sampling(allowed=torch.tensor([True, False, True])),
    "everything": Sampling(guidance_scale=1.7, temperature=1.3, top_k=2, top_p=0.9, guided_tokens=3),
}
GRIDS = {"2x2 of 3": {"grid": (2, 2), "vocab_size": 3}, "2x3 of 2": {"grid": (2, 3), "vocab_size": 2}}


def decodings(num_tokens):
    """Every decoding of `ROWS` at every setting."""
    for method, settings in ROWS:
        values = [range(1, num_tokens + 1) if v is WINDOWS else v for v in settings.values()]
        for choice in itertools.product(*values):
            yield method(**dict(zip(settings, choice, strict=True)))


def name(decoding):
    return "-".join([type(decoding).__name__.removesuffix("Decoding"), *map(str, vars(decoding).values())])


def assert_follows(tokens, joint, vocab_size):
    """Whether images [M, N] are draws from `joint` [V ** N]; an exact decoding fails each check one time in 10,000."""
    powers = vocab_size ** torch.arange(tokens.shape[1] - 1, -1, -1)
    counts = torch.bincount((tokens * powers).sum(1), minlength=len(joint)).double()
    size = len(tokens)
    assert counts[joint == 0].sum() == 0, "an image that cannot be"
    # Pearson's statistic needs 5 of a kind: the rarer images are counted as one.
    expected, rare = joint * size, joint * size < 5
    if expected[rare].sum() >= 5:
        counts_of = torch.cat([counts[~rare], counts[rare].sum()[None]])
        expected_of = torch.cat([expected[~rare], expected[rare].sum()[None]])
    else:
        counts_of, expected_of = counts[~rare], expected[~rare]
    statistic = ((counts_of - expected_of) ** 2 / expected_of).sum()
    freedom = torch.tensor(len(expected_of) - 1.0, dtype=torch.float64)
    chance = torch.special.gammaincc(freedom / 2, statistic / 2)
    assert chance > 1e-4, f"chi-square {statistic:.0f} at {freedom:.0f} degrees of freedom"
    # What the total variation is of as many exact draws, and how far chance may raise it (McDiarmid).
    distance = (counts / size - joint).abs().sum() / 2
    floor = (2 * joint * (1 - joint) / (math.pi * size)).sqrt().sum() / 2
    limit = floor + math.sqrt(math.log(1e4) / (2 * size))
    assert distance < limit, f"total variation {distance:.4f}, exact draws have {floor:.4f}"


def draws(model, decoding, sampling, size, case=""):
    """Images [size, N] of `decoding`, after the promises that hold for each of them; a case has seeds of its own."""
    seeds = torch.arange(size) + (zlib.crc32(f"{case} {name(decoding)}".encode()) << 20)
    before = model.forward_passes
    state = decode(model, decoding, sampling, seeds)
    assert state.forward_passes == len(state.accepted_per_step()) == model.forward_passes - before <= model.num_tokens
    assert state.decided.all() and state.finished.all()
    assert (state.accepted_per_step().sum(0) == model.num_tokens).all()
    return state.tokens


def cases():
    """Grid, sampling, decoding and how many images: a choice of them, and all as slow tests of many more images."""
    pairs = [*(("2x2 of 3", sampling) for sampling in SAMPLINGS), ("2x3 of 2", "plain")]
    for which, (grid, sampling) in enumerate(pairs):
        for i, decoding in enumerate(decodings(math.prod(GRIDS[grid]["grid"]))):
            label = f"{grid}-{sampling}-{name(decoding)}"
            # Every decoding under the first pair; under the others every fifth, each time another fifth.
            if which == 0 or i % 5 == which % 5:
                yield pytest.param(grid, sampling, decoding, 20_000, id=label)
            yield pytest.param(grid, sampling, decoding, 200_000, id=f"{label}-many", marks=pytest.mark.slow)


@pytest.mark.parametrize(("grid", "sampling", "decoding", "size"), list(cases()))
def test_images_follow_the_joint_law(table_model, grid, sampling, decoding, size):
    law = SAMPLINGS[sampling]
    model = table_model(**GRIDS[grid], groups=1 if law.guidance_scale == 1 else 2)
    tokens = draws(model, decoding, law, size, f"{grid} {sampling}")
    assert_follows(tokens, model.joint(law), model.vocab_size)


@pytest.mark.parametrize("preset", decoding_names(scales=False))
def test_every_exact_preset_has_its_row(preset):
    decoding = decoding_from_name(preset)
    rows = [settings for method, settings in ROWS if method is type(decoding)]
    assert rows or not decoding.exact
    for settings in rows:
        for setting, values in settings.items():
            # Sizes are those of images small enough to enumerate.
            value = getattr(decoding, setting)
            assert isinstance(value, int) or value in values


# Decodings that are wrong in ways that published code is wrong: the check above has to tell.


def draw_anew_from_the_target(p, q, x, noise, live):
    _, kept, leading = couple_window(p, q, x, noise, live)
    return torch.where(kept, x, sample(p, noise[..., 1])), kept, leading


def accept_generously(p, q, x, noise, live):
    return couple_window(1.3 * p, q, x, noise, live)


def keep_survivors(redraw):
    """Verifies as it should, but after the first rejection `redraw` says which drafts stay."""

    def broken(p, q, x, noise, live):
        y, kept, leading = couple_window(p, q, x, noise, live)
        verified = (~kept).long().cumsum(1) - (~kept).long() == 0
        p_x, q_x = (law.gather(-1, x[..., None]).squeeze(-1) for law in (p, q))
        stays = redraw(p_x / q_x, noise[..., 0])
        return torch.where(verified, y, torch.where(stays, x, sample(p, noise[..., 1]))), kept, leading

    return broken


class StaleLaw(SpeculativeJacobiDecoding):
    """Draws the drafts anew and verifies them against the laws of their forerunners."""

    def step(self, state):
        state.stale = state.draft_probabilities
        return super().step(state)


def slide_stale_laws(state, accepted, init):
    state.draft_probabilities = state.stale
    slide_window(state, accepted, probabilities)


def siblings_of_another_law(q, noise):
    return sample_siblings((q > 0).float(), noise)


def same_noise_at_every_pass(seeds, positions, purpose, step, count):
    return uniforms(seeds, positions, purpose, 0, count)


COUPLED, INDEPENDENT = ({"window": 3, "refresh": refresh} for refresh in ("coupled", "independent"))
BROKEN = {
    "a rejected draft is drawn anew from the target": (COUPLED, {"couple_window": draw_anew_from_the_target}),
    "drafts are accepted generously": (INDEPENDENT, {"couple_window": accept_generously}),
    "survivors above a threshold stay": (COUPLED, {"couple_window": keep_survivors(lambda ratio, u: ratio > 0.8)}),
    "survivors stay without a residual": (COUPLED, {"couple_window": keep_survivors(lambda ratio, u: ratio > u)}),
    "every survivor stays": (COUPLED, {"couple_window": keep_survivors(lambda ratio, u: ratio >= 0)}),
    "passes share their noise": (COUPLED, {"uniforms": same_noise_at_every_pass}),
    "stale laws, coupled": ({**COUPLED, "method": StaleLaw}, {"slide_window": slide_stale_laws}),
    "stale laws, independent": ({**INDEPENDENT, "method": StaleLaw}, {"slide_window": slide_stale_laws}),
    "siblings follow another law": (
        {"method": TreeJacobiDecoding, "window": 4, "width": 2, "depth": 3},
        {"sample_siblings": siblings_of_another_law},
    ),
}


@pytest.mark.parametrize("flaw", BROKEN)
def test_the_check_rejects_a_decoding_in_which(flaw, table_model, monkeypatch):
    settings, patches = BROKEN[flaw]
    decoding = {"method": SpeculativeJacobiDecoding, **settings}
    decoding = decoding.pop("method")(**decoding)
    # Laws so sharp that siblings are tried often.
    model, law = table_model(sharpness=2.5), Sampling()
    for attribute, value in patches.items():
        monkeypatch.setattr(sys.modules[type(decoding).__mro__[-2].__module__], attribute, value)
    tokens = draws(model, decoding, law, 50_000)
    with pytest.raises(AssertionError, match="chi-square|total variation"):
        assert_follows(tokens, model.joint(law), 3)
