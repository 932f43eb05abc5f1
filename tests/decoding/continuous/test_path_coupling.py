"""Decodings of continuous tokens in turn: the distribution of their samples, and what it takes."""

from itertools import cycle

import pytest
import torch
from continuous_kit import MixtureModel, energy_p_value, normal_joint, worst_z

from arimage.decoding import (
    AutoregressiveDecoding,
    LatentSampling,
    PathJacobiDecoding,
    PathSpeculativeDecoding,
    Sampling,
    SpeculativeJacobiDecoding,
    decode,
    decoding_from_name,
)
from arimage.decoding.run.batch import Batch, Images, run_batch


STEPS = 8
NORMAL = {"offsets": ((0.3,),), "variance": 0.5}
MIXTURE = {"offsets": ((0.7, 0.1), (-0.8, 0.4), (0.0, -0.9))}
DECODINGS = {
    "ar": AutoregressiveDecoding(),
    "sjd-coupled": SpeculativeJacobiDecoding(window=3),
    **{f"reflection-{window}": PathJacobiDecoding(window) for window in (1, 2, 9)},
    **{f"path-{window}": PathJacobiDecoding(window, "path") for window in (2, 9)},
    **{f"drafter-{window}": PathSpeculativeDecoding(window) for window in (1, 3)},
}
GUIDED = {"guidance_scale": 2.0, "temperature": 0.7}
SETTINGS = [
    {"temperature": 0.7},
    {"guidance_scale": 2.0},
    {"guidance_scale": 2.0, "guidance_schedule": "constant"},
    {"guidance_scale": 2.0, "guidance_schedule": "falling"},
]
by_more_settings = pytest.mark.parametrize("settings", [{}, GUIDED, *SETTINGS], ids=str)
by_decoding = pytest.mark.parametrize("decoding", DECODINGS.values(), ids=DECODINGS)


def with_one_of(name, *values):
    """Parametrizes a test by decoding, each with one of the values of another argument."""
    return pytest.mark.parametrize(
        ("decoding", name), list(zip(DECODINGS.values(), cycle(values), strict=False)), ids=str
    )


by_decoding_and_settings = with_one_of("settings", {}, GUIDED)


def model_of(settings, slope=0.9, drafter_slope=0.75, **changes):
    sizes = {**changes, "branches": 1 + (settings.get("guidance_scale", 1) > 1)}
    drafter = {**sizes, "variance": sizes.get("variance", 0.2) * 1.2} if drafter_slope != slope else sizes
    return MixtureModel(**sizes, slope=slope, drafter=MixtureModel(**drafter, slope=drafter_slope))


def generate(model, decoding, settings, seeds):
    state = decode(model, decoding, LatentSampling(num_diffusion_steps=STEPS, **settings), seeds)
    assert state.finished.all() and (state.accepted.sum(0) == model.num_tokens).all()
    return state


def z_of(decoding, settings, count):
    """How far samples of a normal distribution are from it."""
    model = model_of(settings, **NORMAL)
    tokens = generate(model, decoding, settings, torch.arange(count)).tokens
    return worst_z(tokens[..., 0], *normal_joint(model, LatentSampling(num_diffusion_steps=STEPS, **settings)))


def p_value_of(decoding, settings, count):
    """How probable it is that samples of mixtures are as far from those of autoregressive decoding as they are."""
    model = model_of(settings, **MIXTURE)
    tokens = generate(model, decoding, settings, torch.arange(count)).tokens
    others = generate(model, AutoregressiveDecoding(), settings, torch.arange(count) + 10_000_000).tokens
    return energy_p_value(tokens, others)


@pytest.mark.every(4)
@by_decoding_and_settings
def test_normal_tokens_follow_their_closed_form(decoding, settings):
    assert z_of(decoding, settings, 3000) < 5


@pytest.mark.every(3)
@by_decoding_and_settings
def test_mixtures_are_as_autoregressive_decoding_samples_them(decoding, settings):
    assert p_value_of(decoding, settings, 500) > 0.005


@pytest.mark.slow
@by_decoding
@by_more_settings
def test_many_samples_follow_the_distribution(decoding, settings):
    assert z_of(decoding, settings, 100_000) < 5
    assert p_value_of(decoding, settings, 5000) > 0.005


class Careless(PathJacobiDecoding):
    """Decides the whole window, whether its tokens changed or not."""

    def step(self, state):
        before = state.cursor.clone()
        super().step(state)
        end = (before + state.window).clamp(max=state.model.num_tokens)
        state.accepted.scatter_add_(0, state.steps[None] - 1, (end - state.cursor)[None])
        state.cursor.copy_(end)
        state.finished.copy_(end == state.model.num_tokens)


def test_a_decoding_that_is_not_exact_fails():
    assert z_of(Careless(3), {}, 3000) > 8
    assert p_value_of(Careless(3), {}, 500) < 1 / 190


@pytest.mark.every(3)
@by_decoding_and_settings
def test_an_image_does_not_depend_on_its_batch(decoding, settings):
    model = model_of(settings, **MIXTURE)
    together = generate(model, decoding, settings, torch.arange(5)).tokens
    alone = torch.cat([generate(model, decoding, settings, seed[None]).tokens for seed in torch.arange(5)])
    torch.testing.assert_close(alone, together, atol=1e-4, rtol=1e-4)


@pytest.mark.every(4)
@by_decoding
def test_finished_images_make_room_for_others(decoding):
    model, sampling, seeds = model_of({}, num_tokens=6, **MIXTURE), LatentSampling(num_diffusion_steps=STEPS), range(7)
    batch, waiting, tokens = Batch(decoding, 2), list(seeds), {}

    def begin(room):
        names = [waiting.pop(0) for _ in range(min(room, len(waiting)))]
        return Images(names, model, sampling, torch.tensor(names)) if names else None

    def keep(rows):
        tokens.update({batch.names[row]: batch.state.tokens[row].clone() for row in rows})

    run_batch(batch, begin, keep, lambda: False)
    expected = generate(model, decoding, {}, torch.tensor(seeds)).tokens
    torch.testing.assert_close(torch.stack([tokens[seed] for seed in seeds]), expected, atol=1e-4, rtol=1e-4)
    assert sum(batch.calls_per_pass) >= batch.state.head_calls > 0


def joined(decoding, *settings):
    """A batch that runs an image with the first settings when one with the others joins."""
    model, batch = model_of(GUIDED, **MIXTURE), Batch(decoding, 2)
    for seed, each in enumerate(settings):
        sampling = LatentSampling(**{"num_diffusion_steps": STEPS, **GUIDED, **each})
        batch.begin(Images([seed], model.take(torch.arange(1)), sampling, torch.tensor([seed])))
        batch.step()
    return batch


@pytest.mark.every(3)
@with_one_of("other", {"temperature": 0.5}, {"guidance_scale": 4.0})
def test_images_with_other_settings_join_a_batch_that_runs(decoding, other):
    batch = joined(decoding, {}, other)
    while len(batch.finished()) < 2:
        batch.step()
    model = model_of(GUIDED, **MIXTURE).take(torch.arange(1))
    alone = [generate(model, decoding, GUIDED | each, torch.tensor([i])).tokens for i, each in enumerate(({}, other))]
    torch.testing.assert_close(batch.state.tokens, torch.cat(alone), atol=1e-4, rtol=1e-4)


@by_decoding
def test_images_with_another_number_of_steps_are_refused_in_a_batch_that_runs(decoding):
    with pytest.raises(ValueError, match="num_diffusion_steps is .* in one batch"):
        joined(decoding, {}, {"num_diffusion_steps": STEPS - 1})


@pytest.mark.every(3)
@by_decoding
def test_as_many_images_as_denoising_steps_may_become_fewer(decoding):
    model, seeds = model_of(GUIDED, **MIXTURE), torch.arange(STEPS)
    alone = generate(model.take(seeds[:1]), decoding, GUIDED, seeds[:1]).tokens
    state = decoding.start(model, LatentSampling(num_diffusion_steps=STEPS, **GUIDED), seeds)
    state.select(seeds[:2])
    while not state.finished.all():
        decoding.step(state)
    torch.testing.assert_close(state.tokens[:1], alone)


def test_autoregressive_decoding_is_a_window_of_one():
    model = model_of({})
    expected = generate(model, AutoregressiveDecoding(), {}, torch.arange(4))
    assert expected.forward_passes == 4 and expected.head_calls == 4 * STEPS
    for decoding in (
        PathJacobiDecoding(1),
        PathJacobiDecoding(1, "path"),
        decoding_from_name("sjd-coupled", window=1),
    ):
        torch.testing.assert_close(generate(model, decoding, {}, torch.arange(4)).tokens, expected.tokens)


@pytest.mark.parametrize("coupling", ["reflection", "path"])
def test_tokens_that_do_not_depend_on_others_take_three_passes(coupling):
    # The prefill, one forward pass that samples all other tokens, and one that keeps them.
    state = generate(model_of({}, slope=0.0, num_tokens=9), PathJacobiDecoding(8, coupling), {}, torch.arange(50))
    assert state.forward_passes == 3


def test_a_drafter_that_is_the_model_is_always_right():
    model = model_of({}, drafter_slope=0.9, num_tokens=9)
    state = generate(model, PathSpeculativeDecoding(3), {}, torch.arange(50))
    # The prefill decides one token, and each pass three drafts and one more.
    assert state.forward_passes == 3 and state.accepted[:3, 0].tolist() == [1, 4, 4]
    drafts_and_test = 2 * (3 * STEPS + 1)
    assert state.head_calls == STEPS + drafts_and_test + STEPS * 2


def test_other_decodings_and_models_are_refused():
    model = model_of({})
    model.drafter = None
    with pytest.raises(ValueError, match="no drafter"):
        decode(model, PathSpeculativeDecoding(), LatentSampling(), torch.arange(2))
    for name in ("sjd", "zipar", "mar", "next-scale", "few-step"):
        with pytest.raises(ValueError, match="its tokens are continuous"):
            decode(model, decoding_from_name(name), Sampling(), torch.arange(2))


def test_tokens_that_are_not_finite_are_an_error():
    for decoding in DECODINGS.values():
        with pytest.raises(ValueError, match="not finite"):
            generate(model_of({}, offsets=((torch.inf,),)), decoding, {}, torch.arange(2))


@pytest.mark.parametrize(
    ("schedule", "scales"),
    [
        ("linear", [1, 1.5, 2, 2.5]),
        ("half-linear", [1.5, 1.5, 2, 2.5]),
        ("falling", [3, 2.5, 2, 1.5]),
        ("constant", [3, 3, 3, 3]),
    ],
)
@pytest.mark.parametrize("stacked", [False, True])
def test_guidance_follows_its_schedule(schedule, scales, stacked):
    sampling = LatentSampling(3.0, guidance_schedule=schedule)
    if stacked:
        sampling = LatentSampling.stack([sampling, sampling.replaced(guidance_scale=1.0)], "cpu")
    found = sampling.guidance_at(torch.arange(4).expand(2, -1) / 4)
    assert found[0].tolist() == scales and found[1].tolist() == ([1] * 4 if stacked else scales)
