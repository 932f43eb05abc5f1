"""What a run promises whatever the decoding: broken logits are an error, finished images stop, buffers are written in
place."""

import dataclasses

import pytest
import torch
from decoding.pairwise import each_once
from decoding.test_next_scale import ScaleTable
from pipelines.llamagen import tiny as tiny_llamagen
from presets import FOR_SCALES, FOR_TOKENS, quick

from arimage.decoding import (
    Layout,
    Sampling,
    decode,
    decoding_from_name,
)
from arimage.pipelines.llamagen.transformer_llamagen import LlamaGenTokenModel


SEEDS = torch.arange(5)
EVERY_PRESET = pytest.mark.parametrize("preset", quick(FOR_TOKENS))
NAN, INF = float("nan"), float("inf")


def model_for(preset, table_model):
    """A model that `preset` can run on."""
    if preset in FOR_SCALES:
        model = ScaleTable((1, 1, 2), 3)
        model.refiner = ScaleTable((1, 1, 2), 3, seed=2)
        return model
    return table_model(grid=(2, 3), vocab_size=3, truncated=preset in ("zipar", "pjd"))


# Logits that are not finite.


def broken_from(model, step, value, row):
    """`model` with broken logits of the image `row` from forward pass `step` on; the prefill is pass 0."""
    prefill, forward, passes = model.prefill, model.forward, iter(range(1000))

    def spoil(logits):
        if next(passes) < step:
            return logits
        logits = logits.clone()
        if value == -INF:
            logits[:, row] = value
        else:
            logits[:, row, ..., 1] = value
        return logits

    def broken_prefill(*inputs, **options):
        cache, logits, *features = prefill(*inputs, **options)
        return cache, spoil(logits), *features

    def broken_forward(*inputs, **options):
        outputs = forward(*inputs, **options)
        return spoil(outputs) if isinstance(outputs, torch.Tensor) else (spoil(outputs[0]), *outputs[1:])

    model.prefill, model.forward = broken_prefill, broken_forward
    return model


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("preset", "value", "step", "sampling"),
    [
        tuple(choice.values())
        for choice in each_once(
            {
                "preset": FOR_TOKENS + FOR_SCALES,
                "value": [NAN, INF, -INF],
                "step": [0, 1, 2],
                "sampling": [{}, {"top_k": 2}, {"top_p": 0.9}, {"guidance_scale": 3.0}],
            },
            # The refiner takes over in the last two steps.
            lambda choice: choice["preset"] != "code" or choice["step"] == 0,
        )
    ],
    ids=str,
)
def test_logits_that_are_not_finite_are_an_error_that_names_the_image(table_model, preset, value, step, sampling):
    model, decoding, row = model_for(preset, table_model), decoding_from_name(preset), 3
    decode(model, decoding, Sampling(**sampling), SEEDS)
    with pytest.raises(ValueError, match=f"finite.*images {row} "):
        decode(broken_from(model, step, value, row), decoding, Sampling(**sampling), SEEDS)


# Finished images.


@pytest.mark.every(3)
@pytest.mark.parametrize("preset", quick(FOR_TOKENS + FOR_SCALES))
def test_steps_after_the_end_change_nothing(table_model, preset):
    model, decoding = model_for(preset, table_model), decoding_from_name(preset)
    state = decode(model, decoding, Sampling(), SEEDS)
    tokens, passes, accepted = state.tokens.clone(), state.forward_passes, state.accepted_per_step()
    for _ in range(10):
        decoding.step(state)
    assert torch.equal(state.tokens, tokens) and state.decided.all() and state.finished.all()
    assert state.forward_passes == passes and torch.equal(state.accepted_per_step(), accepted)
    state.check()


# Buffers.


def tensors_of(state):
    """The tensors of a state and its cache, by name."""
    values = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    values |= {f"cache.{name}": value for name, value in vars(state.cache).items()}
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize(
    ("preset", "settings"),
    [
        *((preset, {}) for preset in FOR_TOKENS),
        *((preset, {"init": "above"}) for preset in ("sjd", "sjd-tree", "sjd-lazy")),
        ("sjd", {"window": "auto"}),
        ("sjd-coupled", {"corrections": 2}),
    ],
    ids=str,
)
def test_a_step_writes_in_place(table_model, preset, settings):
    decoding = decoding_from_name(preset, **settings)
    state = decoding.start(model_for(preset, table_model), Sampling(), SEEDS)
    before = {name: (value.data_ptr(), value.shape, value.stride()) for name, value in tensors_of(state).items()}
    while not state.finished.all():
        decoding.step(state)
        state.adapt()
        now = {name: (value.data_ptr(), value.shape, value.stride()) for name, value in tensors_of(state).items()}
        assert now == before


@pytest.mark.every(3)
@EVERY_PRESET
def test_a_step_depends_on_the_state_alone(table_model, preset):
    model, decoding, sampling = model_for(preset, table_model), decoding_from_name(preset), Sampling(top_p=0.9)
    expected = [decode(model, decoding, sampling, seeds) for seeds in (SEEDS, SEEDS + 50)]
    # Two runs by turns, one of them later than the other.
    first, second = (decoding.start(model, sampling, seeds) for seeds in (SEEDS, SEEDS + 50))
    decoding.step(first)
    while not (first.finished.all() and second.finished.all()):
        decoding.step(second)
        decoding.step(first)
    for state, whole in zip((first, second), expected, strict=True):
        assert torch.equal(state.tokens, whole.tokens) and torch.equal(state.steps, whole.steps)


@pytest.mark.every(2)
@torch.no_grad()
@pytest.mark.parametrize(
    ("preset", "interval"),
    [("ar", 8), ("sjd-coupled", 1), ("sjd-coupled", 2), ("sjd-lazy", 1), ("sjd-tree", 1), ("zipar", 2)]
    + [pytest.param("eagle", 8, marks=pytest.mark.slow)],
)
def test_steps_stay_below_the_limit_of_attention(preset, interval):
    transformer = tiny_llamagen.transformer("class")
    condition = {"class_labels": torch.tensor([1])}
    model = LlamaGenTokenModel(transformer, condition, Layout((10, 10)), drafter=tiny_llamagen.drafter(transformer))
    decoding, limits, forward = decoding_from_name(preset), [], model.forward

    def recorded(tokens, positions, cache, **options):
        limits.append(cache.attended_slots)
        assert int(positions.max()) < cache.attended_slots
        return forward(tokens, positions, cache, **options)

    state = decoding.start(model, Sampling(), SEEDS[:1])
    model.forward = recorded
    while not state.finished.all():
        if len(limits) % interval == 0:
            state.limit_attention(interval)
        decoding.step(state)
    assert min(limits) < 100 <= max(limits)
