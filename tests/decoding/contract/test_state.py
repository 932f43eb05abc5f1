"""What a run promises whatever the decoding: broken logits are an error, finished images stop, buffers are written in
place."""

import pytest
import torch
from decoding.pairwise import each_once
from decoding.test_next_scale import ScaleTable
from presets import FOR_SCALES, FOR_TOKENS, quick

from arimage.decoding import (
    Sampling,
    decode,
    decoding_from_name,
)


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
