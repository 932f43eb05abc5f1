"""More images than rows: every image equals its own run, with every decoding and after any other image in its row."""

import pytest
import torch
from decoding.contract.test_state import EVERY_PRESET, model_for
from decoding.test_next_scale import ScaleTable
from presets import FOR_TOKENS, quick

from arimage.decoding import (
    AutoregressiveDecoding,
    Sampling,
    SpeculativeJacobiDecoding,
    decode,
    decoding_from_name,
    decoding_from_text,
)
from arimage.decoding.jacobi import speculative_jacobi
from arimage.decoding.run.batch import Batch, Images, run_batch


SEEDS = torch.arange(11) * 7


def run(model, decoding, sampling, seeds, size, *, at_once=None, stop=None):
    """Tokens, steps and accepted tokens of each image, and the batch, of `seeds` that wait in order. At most `at_once`
    begin together; `stop(batch)` ends the run."""
    batch, waiting, found = Batch(decoding, size), list(range(len(seeds))), {}

    def begin(room):
        names, waiting[:] = waiting[: at_once or room][:room], waiting[min(at_once or room, room) :]
        if not names:
            return None
        rows = torch.tensor(names)
        return Images(names, model.take(rows), sampling.take(rows), seeds[rows])

    def keep(rows):
        for row in rows:
            state, steps = batch.state, int(batch.state.steps[row])
            assert batch.names[row] not in found
            accepted = state.accepted[:steps, row].tolist()
            found[batch.names[row]] = state.tokens[row].clone(), steps, accepted

    run_batch(batch, begin, keep, lambda: stop is not None and stop(batch))
    return found, batch


def alone(model, decoding, sampling, seeds):
    found = []
    for image in range(len(seeds)):
        rows = torch.tensor([image])
        state = decode(model.take(rows), decoding, sampling.take(rows), seeds[rows])
        found.append((state.tokens[0], state.forward_passes, state.accepted_per_step()[:, 0].tolist()))
    return found


def check(found, expected):
    assert sorted(found) == list(range(len(expected)))
    for image, (tokens, steps, accepted) in enumerate(expected):
        assert torch.equal(found[image][0], tokens)
        assert found[image][1:] == (steps, accepted)


@pytest.mark.every(4)
@EVERY_PRESET
def test_every_image_is_that_of_its_own_run(table_model, preset):
    model, decoding = model_for(preset, table_model), decoding_from_name(preset)
    expected = alone(model, decoding, Sampling(), SEEDS[:7])
    for size, at_once in [(1, None), (3, None), (4, 1), (20, None)]:
        found, batch = run(model, decoding, Sampling(), SEEDS[:7], size, at_once=at_once)
        check(found, expected)
        assert batch.running == []


@pytest.mark.every(2)
@pytest.mark.parametrize("preset", ["ar", "sjd-coupled", "sjd2", "sjd-tree", "eagle"])
def test_every_image_keeps_its_sampling(table_model, preset):
    model, decoding = table_model(grid=(2, 3), branches=2), decoding_from_name(preset)
    samplings = [
        Sampling(guidance_scale=2.0),
        Sampling(guidance_scale=3.0, top_k=2),
        Sampling(guidance_scale=2.0, temperature=0.3, guided_tokens=3),
        Sampling(guidance_scale=2.0, top_p=0.6, allowed=torch.tensor([True, False, True])),
        Sampling(guidance_scale=2.0, forced=torch.tensor([[-1, 2, -1, 0, -1, 1]])),
        Sampling(guidance_scale=5.0, top_k=1),
        Sampling(guidance_scale=2.0, min_p=0.3),
        Sampling(guidance_scale=2.0),
    ]
    waiting, found, batch = list(range(len(samplings))), {}, Batch(decoding, 3)

    def begin(room):
        if not waiting:
            return None
        image = waiting.pop(0)
        return Images([image], model, samplings[image], SEEDS[[image]])

    def keep(rows):
        found.update({batch.names[row]: batch.state.tokens[row].tolist() for row in rows})

    run_batch(batch, begin, keep, lambda: False)
    for image, sampling in enumerate(samplings):
        assert found[image] == decode(model, decoding, sampling, SEEDS[[image]]).tokens[0].tolist()


def test_images_of_scales_begin_together():
    model, decoding = ScaleTable((1, 1, 2), 3), decoding_from_name("next-scale")
    found, batch = run(model, decoding, Sampling(), SEEDS, 4)
    check(found, alone(model, decoding, Sampling(), SEEDS))
    assert batch.forward_passes == 3 * 3


def test_a_run_stops_when_it_is_told_to(table_model):
    passes = []
    found, batch = run(
        table_model(grid=(2, 4)), SpeculativeJacobiDecoding(2), Sampling(), SEEDS, 3,
        stop=lambda batch: passes.append(batch.forward_passes) or len(passes) == 5,
    )  # fmt: skip
    assert passes == [1, 2, 3, 4, 5] and len(found) + len(batch.running) <= 8
    assert batch.running


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "text",
    [
        *quick(FOR_TOKENS),
        "sjd-coupled:init=left",
        "sjd-coupled:corrections=2",
        "sjd-tree:init=above",
        "sjd-lazy:window=8,chain=4,tokens=4",
    ],
)
def test_two_images_join_one(table_model, text):
    decoding = decoding_from_text(text)
    model = table_model(grid=(2, 3), vocab_size=3, truncated=text in ("zipar", "pjd"))
    waiting = [[0], None, [1, 2]]
    batch, found = Batch(decoding, 4), {}

    def begin(room):
        names = waiting.pop(0) if waiting else None
        return names and Images(names, model, Sampling(), SEEDS[names])

    def keep(rows):
        found.update({batch.names[row]: batch.state.tokens[row].tolist() for row in rows})

    run_batch(batch, begin, keep, lambda: False)
    expected = alone(model, decoding, Sampling(), SEEDS[:3])
    assert found == {image: tokens.tolist() for image, (tokens, *_) in enumerate(expected)}


def test_steps_after_the_last_image_are_not_counted(table_model):
    batch = Batch(decoding_from_name("sjd-coupled"), 3)
    batch.begin(Images(range(3), table_model(grid=(2, 3)), Sampling(), SEEDS[:3]))
    while len(batch.finished()) < 3:
        batch.step()
    passes = batch.forward_passes
    for _ in range(2):
        batch.step()
    batch.release(batch.running)
    assert batch.forward_passes == len(batch.calls_per_pass) == passes == max(batch.state.steps)


def test_the_memory_of_finished_images_is_free_before_others_begin(table_model, monkeypatch):
    batch, model, states = Batch(decoding_from_name("ar"), 2), table_model(grid=(2, 3)), []
    start = AutoregressiveDecoding.start
    monkeypatch.setattr(AutoregressiveDecoding, "start", lambda *inputs: states.append(batch.state) or start(*inputs))
    for _ in range(2):
        batch.begin(Images(range(2), model, Sampling(), SEEDS[:2]))
        while len(batch.finished()) < 2:
            batch.step()
        batch.release(batch.running)
    assert states == [None, None]


@pytest.mark.parametrize(
    "text",
    [
        "sjd-coupled:window=6",
        "sjd",
        "gsd",
        "sjd-gumbel:window=5",
        "sjd-coupled:init=above",
        "sjd-coupled:corrections=2",
        "sjd2:levels=2",
    ],
)
def test_what_lies_after_the_end_is_left_out_and_changes_nothing(table_model, monkeypatch, text):
    model, decoding = table_model(grid=(2, 3), vocab_size=3), decoding_from_text(text)
    with monkeypatch.context() as patch:
        patch.setattr(speculative_jacobi.JacobiState, "shrink", lambda state: None)
        expected = alone(model, decoding, Sampling(), SEEDS[:7])
    monkeypatch.setattr(speculative_jacobi, "SHRINKS_BY", 1)
    windows = set()

    def note(batch):
        windows.add(batch.state.window)
        return False

    check(run(model, decoding, Sampling(), SEEDS[:7], 3, stop=note)[0], expected)
    check(run(model, decoding, Sampling(), SEEDS[:7], 1, stop=note)[0], expected)
    assert len(windows) > 2
