"""Masked decoding of continuous tokens: the distribution of its samples, noise, known tokens, batches, refusals,
devices."""

import math

import pytest
import torch
from continuous_kit import energy_p_value
from pipelines.mar import tiny as tiny_mar

from arimage.decoding import (
    LatentSampling,
    Layout,
    MaskedDecoding,
    decode,
    decoding_from_name,
)
from arimage.decoding.contract.noise import Purpose, normals, random_orders
from arimage.decoding.masked.sets import masked_counts
from arimage.models.denoising_head import diffusion_tables
from arimage.pipelines.mar.transformer_mar import MARLatentModel


COUNT, STEPS = 40_000, 10
SEEDS = torch.arange(COUNT)


class GaussianModel:
    """A `LatentModel` of two tokens [1] with an exact denoiser: a token is normal with variance V, and its mean is its
    own plus SLOPE times the sum of those that are visible. Without the condition the mean is that plus SHIFT."""

    kind = "masked_latents"

    V, SLOPE, SHIFT, MEANS = 0.5, 0.8, 0.6, (0.3, -0.7)
    num_tokens, dim, device, network = 2, 1, torch.device("cpu"), None

    def __init__(self, branches=1, drafter=None):
        self.branches, self.drafter = branches, drafter

    def forward(self, tokens, visible, count, *, padded=False):
        assert (visible.sum(1) <= count).all() and (padded or (visible.sum(1) == count).all())
        known = torch.where(visible[..., None], tokens, torch.nan).nansum(1, keepdim=True)
        means = torch.tensor(self.MEANS)[None, :, None] + self.SLOPE * known
        return torch.stack([means, means + self.SHIFT][: self.branches])

    def denoise(self, step, tokens, conditions, guidance, num_diffusion_steps):
        clean = conditions[0]
        if self.branches == 2:
            clean = conditions[1] + guidance * (conditions[0] - conditions[1])
        kept = diffusion_tables(num_diffusion_steps).alphas_cumprod
        now, before = kept[step], kept[step - 1] if step else 1.0
        spread = now * self.V + 1 - now
        # The next state is normal with this state: by the rules for joint normals.
        ratio = (now / before) ** 0.5 * (before * self.V + 1 - before) / spread
        mean = before**0.5 * clean + ratio * (tokens - now**0.5 * clean)
        variance = before * self.V + 1 - before - ratio * (now / before) ** 0.5 * (before * self.V + 1 - before)
        return mean, torch.full_like(tokens, variance**0.5)


def variance_of_samples():
    """V less what the last step, which adds no noise, leaves out."""
    kept = diffusion_tables(STEPS).alphas_cumprod[0]
    return GaussianModel.V**2 * kept / (kept * GaussianModel.V + 1 - kept)


def assert_normal(values, mean, variance):
    """Mean and variance of independent normal values [n], up to five standard errors."""
    count = len(values)
    assert abs(values.mean() - mean) < 5 * math.sqrt(variance / count)
    assert abs(values.var() - variance) < 5 * variance * math.sqrt(2 / count)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("passes", "scale", "schedule"), [(1, 3.0, "linear"), (2, 1.0, "linear"), (2, 3.0, "linear"), (2, 3.0, "constant")]
)
def test_samples_follow_the_distribution_of_the_model(passes, scale, schedule):
    guided = scale > 1
    model = GaussianModel(branches=1 + guided)
    sampling = LatentSampling(scale, num_inference_steps=passes, num_diffusion_steps=STEPS, guidance_schedule=schedule)
    state = decode(model, MaskedDecoding(), sampling, SEEDS)
    assert state.forward_passes == passes and state.decided.all()
    order = random_orders(SEEDS, 2)
    first, second = order[:, 1], order[:, 0]
    tokens, means = state.tokens[..., 0], torch.tensor(GaussianModel.MEANS)

    def error(which, seen, guidance):
        """How far the tokens `which` [n] are from their means."""
        shift = (1 - guidance) * GaussianModel.SHIFT if guided else 0
        mean = means[which] + GaussianModel.SLOPE * seen + shift
        return tokens.gather(1, which[:, None])[:, 0] - mean

    # One token is left after the first of two passes, and none after the last, which is guided as if one were.
    strength = 1 + (scale - 1) * (0.5 if schedule == "linear" else 1)
    errors = error(first, 0, strength)
    seen = tokens.gather(1, first[:, None])[:, 0] if passes == 2 else 0
    others = error(second, seen, strength)
    for values in (errors, others):
        assert_normal(values, 0, variance_of_samples())
    correlation = torch.corrcoef(torch.stack([errors, others]))[0, 1]
    assert abs(correlation) < 5 / math.sqrt(COUNT)


def noise_of(seeds, positions, step, count):
    return normals(seeds, positions, torch.full_like(seeds, step), Purpose.DENOISE, count)


def test_orders_are_uniform_and_noise_is_normal_and_independent():
    orders = random_orders(SEEDS, 3)
    ranks = (orders * torch.tensor([9, 3, 1])).sum(1)
    shares = ranks.unique(return_counts=True)[1] / COUNT
    assert len(shares) == 6 and (shares - 1 / 6).abs().max() < 5 * math.sqrt(5 / 36 / COUNT)
    positions = torch.arange(2).expand(COUNT, -1)
    noise = torch.stack([noise_of(SEEDS, positions, step, 3) for step in range(2)], dim=-1).flatten(1)
    for column in noise.T:
        assert_normal(column, 0, 1)
    assert (torch.corrcoef(noise.T) - torch.eye(12)).abs().max() < 5 / math.sqrt(COUNT)
    # Squares would be correlated if two numbers had one radius and an angle of too few values.
    assert (torch.corrcoef(noise.T.square()) - torch.eye(12)).abs().max() < 6 / math.sqrt(COUNT)
    fourth = noise.pow(4).mean(0)
    assert (fourth - 3).abs().max() < 5 * math.sqrt(96 / COUNT)


@pytest.mark.parametrize(("tokens", "steps"), [(256, 256), (256, 64), (7, 3), (5, 9), (1, 4), (0, 4)])
def test_every_step_decides_a_token_until_none_is_left(tokens, steps):
    counts = masked_counts(tokens, steps)
    assert counts[0] == tokens and counts[-1] == 0 and len(counts) == max(1, min(tokens, steps)) + 1
    assert all(before > after for before, after in zip(counts, counts[1:], strict=False)) or tokens == 0


class OtherGaussianModel(GaussianModel):
    SLOPE, MEANS = 0.7, (0.25, -0.6)


def cspd_state(count=COUNT, **settings):
    model, sampling = (
        GaussianModel(drafter=OtherGaussianModel()),
        LatentSampling(num_inference_steps=2, num_diffusion_steps=STEPS),
    )
    return decode(model, decoding_from_name("cspd", **settings), sampling, torch.arange(count))


def correlation(state):
    tokens = state.tokens[..., 0] - torch.tensor(GaussianModel.MEANS)
    return float(torch.corrcoef(tokens.T)[0, 1])


@pytest.mark.slow
def test_continuous_speculative_decoding_loses_what_the_drafts_would_tell():
    """The control that must fail: its model never sees the drafts that it tests."""
    sampling = LatentSampling(num_inference_steps=2, num_diffusion_steps=STEPS)
    exact = [decode(GaussianModel(), MaskedDecoding(), sampling, SEEDS + first) for first in (0, COUNT)]
    drafted, alone = cspd_state(window=2, target_share=0.0), cspd_state(target_share=1.0)
    assert (drafted.forward_passes, alone.forward_passes) == (1, 2)
    assert torch.equal(alone.tokens, exact[0].tokens)
    found = [energy_p_value(state.tokens[:500], exact[1].tokens[:500]) for state in (exact[0], alone, drafted)]
    assert found[0] > 0.01 and found[1] > 0.01 and found[2] < 1 / 190
    assert abs(correlation(exact[0]) - correlation(exact[1])) < 0.02 and correlation(exact[0]) > 0.55
    assert abs(correlation(drafted)) < 0.06


def test_continuous_speculative_decoding_tests_one_token_at_a_time():
    # Every draft is seen before the next is made, and a heat of 1 rejects nearly all: the model's own tokens, with
    # some noise.
    count, sampling = 2000, LatentSampling(num_inference_steps=2, num_diffusion_steps=STEPS)
    state = cspd_state(count, window=1, target_share=0.0, heat=1.0)
    own = decode(GaussianModel(), MaskedDecoding(), sampling, SEEDS[:count])
    assert state.forward_passes == 2 and (state.tokens - own.tokens).abs().median() < 0.1
    # The drafter's own tokens, where all are accepted.
    drafter = decode(OtherGaussianModel(), MaskedDecoding(), sampling, SEEDS[:count])
    assert torch.equal(cspd_state(count, window=2, target_share=0.0, heat=1e6).tokens, drafter.tokens)


def test_denoising_steps_may_fall_from_set_to_set():
    state = decode(
        GaussianModel(),
        MaskedDecoding((6, 3)),
        LatentSampling(num_inference_steps=2, num_diffusion_steps=STEPS),
        SEEDS[:3],
    )
    assert state.head_calls == 9 and not MaskedDecoding((6, 3)).exact and MaskedDecoding().exact


def mar(images=3, guided=True):
    labels = torch.arange(images)
    return MARLatentModel(tiny_mar.transformer(), tiny_mar.head(), labels, Layout((4, 4)), guided=guided)


def sampling(**changes):
    return LatentSampling(**{"guidance_scale": 2.0, **tiny_mar.STEPS, **changes})


def generate(model, seeds, **changes):
    with torch.no_grad():
        return decode(model, decoding_from_name("mar"), sampling(**changes), torch.tensor(seeds))


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 5},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"guided_tokens": 3},
        {"guidance_schedule": "cosine"},
        {"num_inference_steps": 0},
        {"num_inference_steps": 2.5},
        {"num_diffusion_steps": 1},
        {"num_diffusion_steps": [4, 0]},
        {"num_diffusion_steps": "100"},
        {"temperature": 0.0},
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused_by_their_name(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        LatentSampling(**settings)


@pytest.mark.parametrize("steps", [1001, (2, 600), (400, 2, 2)], ids=str)
def test_more_denoising_steps_than_the_training_had_are_refused(steps):
    with pytest.raises(ValueError, match="num_diffusion_steps"):
        diffusion_tables(steps)


def test_tokens_that_are_not_finite_are_an_error():
    model = mar()
    model.head.output_projection.bias.data[0] = torch.inf
    with pytest.raises(ValueError, match="not finite"):
        generate(model, [1, 2, 3])


@torch.no_grad()
@pytest.mark.parametrize("name", ["mar", "mar-disa", "recap", "lazy-mar"])
def test_steps_after_the_end_change_nothing(name):
    decoding = decoding_from_name(name)
    state = decode(mar(), decoding, sampling(), torch.arange(3))
    tokens, calls = state.tokens.clone(), state.head_calls
    decoding.step(state)
    assert torch.equal(state.tokens, tokens) and state.head_calls == calls
