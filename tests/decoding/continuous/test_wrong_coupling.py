"""Couplings of denoising paths that are wrong in one place do not pass for right: many tokens of several numbers that
depend on each other a little, so that most paths stay together, next to their closed form."""

import pytest
import torch
from continuous_kit import MixtureModel, normal_joint, worst_z

from arimage.decoding import LatentSampling, PathJacobiDecoding, PathSpeculativeDecoding, decode
from arimage.decoding.continuous import path_coupling


STEPS, TOKENS, COUNT, MANY = 6, 8, 10_000, 40_000
NORMAL = {"offsets": ((0.3, -0.2, 0.5),), "variance": 0.5, "slope": 0.5, "num_tokens": TOKENS}
uniforms, normalize = path_coupling.uniforms, path_coupling.F.normalize


def deviation(decoding, count=COUNT, **settings):
    """The largest deviation of samples from their distribution, in standard errors of a mean or a covariance."""
    sizes = NORMAL | {"branches": 1 + (settings.get("guidance_scale", 1) > 1)}
    model = MixtureModel(**sizes, drafter=MixtureModel(**sizes | {"slope": 0.4}))
    sampling = LatentSampling(num_diffusion_steps=STEPS, **settings)
    state = decode(model, decoding, sampling, torch.arange(count))
    return worst_z(state.tokens.flatten(1), *normal_joint(model, sampling))


RIGHT = {
    **{f"reflection-{window}": PathJacobiDecoding(window) for window in range(1, TOKENS + 1)},
    **{f"path-{window}": PathJacobiDecoding(window, "path") for window in (2, TOKENS)},
    "drafter-3": PathSpeculativeDecoding(3),
}


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("decoding", "count"),
    [pytest.param(PathJacobiDecoding(TOKENS), COUNT, id=f"reflection-{TOKENS}")]
    + [pytest.param(one, MANY, marks=pytest.mark.slow, id=f"{name}-many") for name, one in RIGHT.items()],
)
@pytest.mark.parametrize("settings", [{}, {"guidance_scale": 2.0, "temperature": 0.7}], ids=["plain", "guided"])
def test_right_couplings_pass(decoding, count, settings):
    # Of 324 means and covariances the largest is above 5 once in five thousand times.
    # Where paths are sampled again with many candidates, fewer images do.
    fewer = 1 if getattr(decoding, "coupling", "path") == "reflection" else 4
    assert deviation(decoding, count // fewer, **settings) < 5


def same_in_every_pass(seeds, positions, steps, purpose, count):
    return uniforms(seeds, positions, None if steps is None else torch.zeros_like(steps), purpose, count)


def same_at_every_position(seeds, positions, *rest):
    return uniforms(seeds, torch.zeros_like(positions), *rest)


def same_in_every_step(seeds, positions, steps, purpose, count):
    return uniforms(seeds, positions, steps, purpose, 1).expand(*positions.shape, count)


# What is wrong, by its name. The first two are hardest to notice.
WRONG = {
    "same at every position": ("uniforms", same_at_every_position),
    "half a reflection": ("normalize", lambda gap, dim: normalize(gap, dim=dim) / 2**0.5),
    "same in every step": ("uniforms", same_in_every_step),
    "same in every pass": ("uniforms", same_in_every_pass),
    "no reflection": ("normalize", lambda gap, dim: torch.zeros_like(gap)),
}


@pytest.mark.parametrize(
    "wrong", [*list(WRONG)[:2], *(pytest.param(w, marks=pytest.mark.slow) for w in list(WRONG)[2:])]
)
def test_wrong_couplings_are_noticed(wrong, monkeypatch):
    name, function = WRONG[wrong]
    monkeypatch.setattr(path_coupling if name == "uniforms" else path_coupling.F, name, function)
    assert deviation(PathJacobiDecoding(TOKENS)) > 8
