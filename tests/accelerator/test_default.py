"""Steps are captured without being asked to: what a call, a copy of a pipeline and a command do on a CUDA device."""

import copy
import pickle

import card
import pytest
import torch
from accelerator.runs import call, differences, fresh, pipeline
from families import seeded

from arimage import LlamaGenPipeline
from arimage.decoding import AutoregressiveDecoding
from arimage.decoding.run import step_key
from arimage.decoding.run.captured_steps import WARM_UP, CapturedState


def steps_of(pipe, decoding="ar", **given):
    condition = {"prompt": "a red heart"} if pipe.num_classes is None else {"class_labels": 1}
    return pipe(**condition, decoding=decoding, output_type="latent", generator=seeded(0), **given).stats.steps


def test_the_statistics_say_how_steps_ran():
    pipe = fresh()
    with card.card() as device:
        assert steps_of(pipe) == "captured" and device.captures == 1
        replays = device.replays
        pipe.run_eagerly()
        assert steps_of(pipe) == "eager" and device.replays == replays
        pipe.compile()
        assert steps_of(pipe) == "compiled" and device.replays > replays
        pipe.capture()
        assert steps_of(pipe) == "captured"
        assert steps_of(pipe, "sjd-coupled:window=4") == "captured"
    cpu = pipeline("llamagen-text", "cpu")
    out = cpu("a red heart", output_type="latent", generator=seeded(0))
    assert out.stats.steps == "eager" and "eager" not in out.stats.summary


def test_the_first_call_launches_what_an_eager_one_does(monkeypatch):
    """A capture takes the place of a step, which its first replay then launches."""
    monkeypatch.setenv("ARIMAGE_CHECK_GRAPHS", "0")
    passes, launched = [], []

    class Counting(AutoregressiveDecoding):
        def step(self, state):
            passes.append(card.DEVICE.tape)
            super().step(state)

    pipe, plain = fresh(), CapturedState.step
    with card.card() as device, pytest.MonkeyPatch.context() as patch:
        patch.setattr(CapturedState, "step", lambda self: launched.append(1) or plain(self))
        steps_of(pipe, Counting())
        eager = [tape for tape in passes if tape is None]
        assert len(eager) == WARM_UP and len(passes) == WARM_UP + device.captures
        assert len(eager) + device.replays == len(launched)


@pytest.mark.every(2)
@pytest.mark.parametrize(("family", "decoding"), [("var-text", "next-scale"), ("arpg", "groups:groups=4")])
def test_a_single_call_captures_nothing_that_it_does_not_replay(family, decoding):
    expected, pipe, found = call(pipeline(family, "cpu"), decoding), fresh(family), []
    with card.card() as device:
        for _ in range(3):
            assert differences(expected, call(pipe, decoding)) == []
            found.append((device.captures, device.replays))
        (none, _), (captures, replays), last = found
        assert none == 0 < captures == replays and last == (captures, 2 * captures)
        # Another batch size.
        assert [steps_of(pipe, decoding) for _ in range(3)] == ["eager", "captured", "captured"]


def test_each_pipeline_has_steps_of_its_own_and_none_are_saved(tmp_path):
    pipe = fresh()
    with card.card():
        steps_of(pipe)
        assert len(pipe._compiled.kept) == 1
        other = LlamaGenPipeline.from_pipe(pipe)
        assert other._compiled is not pipe._compiled and len(other._compiled.kept) == 0
        # For threads and for quiet copies, the same components with the same graphs.
        assert copy.copy(pipe)._compiled is pipe._compiled
        for made in (copy.deepcopy(pipe._compiled), pickle.loads(pickle.dumps(pipe._compiled))):
            assert len(made.kept) == 0 and not made.compiles
        pipe.to("cuda")
        assert len(pipe._compiled.kept) == 1
        pipe.to(dtype=torch.float64)
        assert len(pipe._compiled.kept) == 0
    plain = pipeline("llamagen-text", "cpu")
    assert copy.deepcopy(plain)._compiled is not plain._compiled
    plain.save_pretrained(tmp_path / "model")
    loaded = LlamaGenPipeline.from_pretrained(tmp_path / "model")
    assert not loaded._compiled.compiles


def test_weights_that_are_divided_among_processes_run_eagerly(monkeypatch):
    pipe = fresh()
    with card.card() as device:
        assert steps_of(pipe) == "captured"
        monkeypatch.setattr(step_key, "is_divided", lambda tensor: isinstance(tensor, card.OnCard))
        captures = device.captures
        assert steps_of(pipe) == "eager" and device.captures == captures and len(pipe._compiled.kept) == 0


@pytest.mark.every(2)
@pytest.mark.parametrize("family", ["var-text", "mar", "llamagen-text"])
def test_a_warm_up_leaves_nothing_to_capture(family):
    pipe = fresh(family)
    with card.card() as device:
        pipe.warm_up(output_type="latent")
        captures, replays = device.captures, device.replays
        pipe.warm_up(output_type="latent")
        assert 0 < captures == device.captures and device.replays > replays
