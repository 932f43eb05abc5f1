"""A training survives what happens to long runs: numbers that are not finite, a full disk, signals, lost processes."""

import json
import os
import resource
import signal
import time
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import typer
from commands import refusal
from pipelines.llamagen import tiny as tiny_llamagen
from safetensors.torch import save_file
from torch import nn
from training.two_processes import together

from arimage.cli import main as cli
from arimage.eval.runs.files import FullDisk, space_in, write_whole
from arimage.training import processes as processes_module
from arimage.training.adapters.lora import add_adapter, save_adapter
from arimage.training.checkpoints import load_checkpoint, save_checkpoint
from arimage.training.loop import MasterWeights, OptimizerSettings, fit
from arimage.training.processes import mean_of, seed_networks
from arimage.training.resuming import alone_in
from arimage.training.saving import save_float16
from arimage.training.tokens.batches import Prepared


SETTINGS = OptimizerSettings(steps=20, learning_rate=0.1, warmup_steps=1, ema_decay=0.9)
EVERY_STEP = {"checkpoint_every_seconds": -1.0, "log_every": 1}


class Line(nn.Module):
    """Learns a line; the loss is not finite in the steps `bad`, and something happens in the step `at`."""

    def __init__(self, bad=(), at=None, happens=None, of="loss"):
        super().__init__()
        self.line, self.bad, self.at, self.happens, self.of = nn.Linear(1, 1), bad, at, happens, of
        nn.init.zeros_(self.line.weight)
        nn.init.zeros_(self.line.bias)
        self.register_buffer("seen", torch.zeros(()))
        self.random = []

    def loss(self, step):
        self.random.append(float(torch.rand(())))
        if step == self.at:
            self.happens()
        x = torch.linspace(-1, 1, 8)[:, None] + torch.rand(1, generator=torch.Generator().manual_seed(step))
        loss = (self.line(x) - 2 * x - 1).square().mean()
        if step in self.bad:
            self.seen += torch.nan
            # A root has no gradient at 0.
            loss = loss * torch.nan if self.of == "loss" else loss + (0 * self.line.weight).sum().sqrt()
        self.seen += 1
        return loss, {"loss": loss.detach()}

    def report(self, step, out):
        return {"slope": float(self.line.weight)}


def rows_in(out):
    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    lines = (out / "log.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def is_finite(state):
    return all(weight.isfinite().all() for name in ("masters", "averages") for weight in state["weights"][name])


# Numbers that are not finite


@pytest.mark.parametrize("of", ["loss", "gradient"])
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(tmp_path, of):
    task = Line(bad=(3, 7), of=of)
    fit(task, SETTINGS, tmp_path, log_every=1)
    state = load_checkpoint(tmp_path / "checkpoint.pt")
    assert is_finite(state) and state["step"] == 20 and task.seen == 18
    rows = rows_in(tmp_path)
    assert [row.get("skipped") for row in rows[:9]] == [None] * 3 + [1] * 4 + [2] * 2
    assert rows[3]["loss"] is None or of == "gradient"


def test_a_run_that_stays_not_finite_ends_with_its_last_good_weights(tmp_path):
    with pytest.raises(ValueError, match=r"checkpoint.pt has the weights of before, .*learning rate.*--out"):
        fit(Line(bad=range(5, 20)), SETTINGS, tmp_path, **EVERY_STEP)
    for name in ("checkpoint.pt", "checkpoint-before.pt"):
        assert is_finite(load_checkpoint(tmp_path / name))
    good = tmp_path / "good"
    with pytest.raises(KeyboardInterrupt):
        fit(Line(at=5, happens=interrupt), SETTINGS, good, **EVERY_STEP)
    ours, theirs = (load_checkpoint(folder / "checkpoint.pt") for folder in (tmp_path, good))
    assert ours["step"] == theirs["step"] == 5 and rows_in(tmp_path)[-1]["step"] == 5
    for one, other in zip(ours["weights"]["masters"], theirs["weights"]["masters"], strict=True):
        assert torch.equal(one, other)


def interrupt():
    raise KeyboardInterrupt


def test_weights_that_are_not_finite_are_never_written(tmp_path, monkeypatch):
    every, collect = [], MasterWeights.collect
    monkeypatch.setattr(MasterWeights, "collect", lambda self: (every.append(self), collect(self)))
    task = Line(at=6, happens=lambda: every[0].masters[0].data.fill_(torch.inf))
    with pytest.raises(ValueError, match="the weights are not finite"):
        fit(task, SETTINGS, tmp_path, **EVERY_STEP)
    state = load_checkpoint(tmp_path / "checkpoint.pt")
    assert is_finite(state) and state["step"] == 6


# Checkpoints


@pytest.mark.parametrize("damage", ["cut", "missing"])
def test_a_damaged_checkpoint_is_replaced_by_the_one_before(tmp_path, damage, caplog):
    whole, again = Line(), Line()
    fit(whole, SETTINGS, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        fit(Line(at=9, happens=interrupt), SETTINGS, tmp_path / "cut", **EVERY_STEP)
    path = tmp_path / "cut" / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:100]) if damage == "cut" else path.unlink()
    fit(again, SETTINGS, tmp_path / "cut")
    assert torch.equal(again.line.weight, whole.line.weight) and again.seen == 20 and len(again.random) == 12
    assert ("checkpoint-before.pt, step 8" in caplog.text) == (damage == "cut")


# A full disk


@contextmanager
def full_disk(most=500):
    """No file may have more bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def adapter(folder):
    pytest.importorskip("peft", reason="the extra `lora` is not installed")
    pipe = tiny_llamagen.class_pipeline()
    add_adapter(pipe.transformer, 2, 2.0, "attention")
    return lambda: save_adapter(pipe, folder / "adapter", base="tiny", captions=[])


def model(folder):
    pipe = tiny_llamagen.class_pipeline()
    return lambda: save_float16(pipe, folder / "model")


WRITERS = {
    "checkpoint": lambda folder: lambda: save_checkpoint(folder / "checkpoint.pt", {"x": torch.ones(10_000)}),
    "tensors": lambda folder: lambda: write_whole(folder / "x", lambda file: save_file({"x": torch.ones(1000)}, file)),
    "adapter": adapter,
    "model": model,
}


@pytest.mark.parametrize("kind", WRITERS)
def test_a_full_disk_is_told_and_leaves_what_was_there(tmp_path, kind):
    write = WRITERS[kind](tmp_path)
    write()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with pytest.raises(FullDisk, match="no space is left in"), space_in(tmp_path), full_disk():
        write()
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert {path for path in after if path.is_file()} == {path for path in before if path.is_file()}


def test_a_full_disk_ends_any_command_in_one_sentence(tmp_path, capsys):
    app = typer.Typer()

    @app.command()
    def write() -> None:
        with full_disk():
            save_file({"x": torch.ones(1000)}, tmp_path / "x")

    with pytest.raises(SystemExit) as end, pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["arimage"])
        cli.main(app)
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.startswith("arimage: no space is left") and said.count("\n") == 1


# Signals and other processes


def test_a_signal_that_comes_twice_at_once_keeps_the_step_in_hand(tmp_path):
    def twice():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        fit(Line(at=6, happens=twice), SETTINGS, tmp_path)
    assert load_checkpoint(tmp_path / "checkpoint.pt")["step"] == 7


def test_a_lost_process_leaves_a_checkpoint_that_resumes(tmp_path):
    def lose():
        raise ChildProcessError("a process that prepares batches was ended")

    whole, again = Line(), Line()
    fit(whole, SETTINGS, tmp_path / "whole")
    with pytest.raises(ChildProcessError, match="prepares batches"):
        fit(Line(at=6, happens=lose), SETTINGS, tmp_path / "cut")
    assert load_checkpoint(tmp_path / "cut" / "checkpoint.pt")["step"] == 6
    fit(again, SETTINGS, tmp_path / "cut")
    assert torch.equal(again.line.weight, whole.line.weight) and again.seen == 20


class Numbers(torch.utils.data.Dataset):
    """Each number with the id of the process that prepared it."""

    def __getitem__(self, step):
        time.sleep(0.01)
        return step, os.getpid()


@pytest.mark.slow
def test_processes_leave_signals_to_the_one_that_trains_and_their_end_is_told():
    batches = Prepared(Numbers(), range(10_000), 2)
    own = {next(batches)[1] for _ in range(8)}
    assert len(own) == 2 and os.getpid() not in own
    for number in (signal.SIGTERM, signal.SIGINT):
        for process in own:
            os.kill(process, number)
    assert [next(batches)[0] for _ in range(40)] == list(range(8, 48))
    os.kill(own.pop(), signal.SIGKILL)
    with pytest.raises(ChildProcessError, match="run the command again"):
        for _ in range(1000):
            next(batches)


# Folders


def test_a_refusal_leaves_no_folder(tmp_path):
    out = tmp_path / "some" / "run"
    with pytest.raises(ValueError, match="the data"), alone_in(out):
        # As `fit` does.
        with alone_in(out), alone_in(out / "transformer"):
            pass
        raise ValueError("the data are wrong")
    assert list(tmp_path.iterdir()) == []
    out.mkdir(parents=True)
    (out.parent / "mine").write_text("x")
    with alone_in(out):
        pass
    assert list(out.iterdir()) == []
    with alone_in(out / "deep" / "run"):
        (out / "deep" / "run" / "checkpoint.pt").write_text("x")
    assert (out / "deep" / "run" / "checkpoint.pt").is_file()


def test_what_a_killed_run_left_is_swept(tmp_path):
    def killed(file):
        file.write_text("x")
        os.link(file, tmp_path / "transformer" / file.name)
        os.link(file, tmp_path / "left")
        raise KeyboardInterrupt

    (tmp_path / "transformer").mkdir()
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "log.jsonl", killed)
    assert len(list((tmp_path / "transformer").iterdir())) == 1
    (tmp_path / "transformer" / ".mine.tmp").write_text("x")
    with alone_in(tmp_path / "transformer"):
        assert {path.name for path in (tmp_path / "transformer").iterdir()} == {".lock", ".mine.tmp"}


def test_other_folders_next_to_a_model_stay(tmp_path):
    for name in ("partial", "model.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").write_text("x")
    for _ in range(2):
        model(tmp_path)()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "model.old", "partial"]
    assert all((tmp_path / name / "mine").is_file() for name in ("partial", "model.old"))


@pytest.mark.parametrize(
    "words",
    [
        ["drafter", "--tokens", "t", "--model"],
        ["neighbours", "--tokens", "t", "--model"],
        ["upscaler", "--data", "d", "--heldout", "h", "--model"],
        ["model", "--tokens", "t", "--recipe", "imagenet-llamagen-b", "--start-from"],
    ],
)
def test_no_training_replaces_the_model_that_it_begins_with(words, tmp_path, capsys):
    model(tmp_path / "run")()
    said = refusal(capsys, "train", *words, tmp_path / "run" / "model", "--out", tmp_path / "run")
    assert said.endswith("which what is trained would replace: give another --out")


# Random numbers, gradients and figures


def test_steps_seeds_and_processes_have_dropout_of_their_own(tmp_path, monkeypatch):
    first, second = Line(), Line()
    for seed, task in enumerate((first, second)):
        fit(task, SETTINGS, tmp_path / str(seed), seed=seed)
    found = [*first.random, *second.random]
    for rank in (0, 1):
        monkeypatch.setattr(processes_module, "processes", lambda rank=rank: (rank, 2))
        seed_networks(0, 0)
        found.append(float(torch.rand(())))
    # The first of two processes has the numbers of a single one.
    assert len(set(found)) == len(found) - 1 and found[-2] == found[0]


def test_gradients_of_parts_are_added_in_float32():
    layer = nn.Linear(64, 1, bias=False).bfloat16()
    weights = MasterWeights(layer, OptimizerSettings(steps=1, learning_rate=0.1))
    parts = torch.rand(256, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    for part in parts:
        layer(part).sum().backward()
        weights.collect()
    exact = parts.double().sum(0)
    assert ((weights.masters[0].grad[0] - exact) / exact).abs().max() < 1e-6
    assert layer.weight.grad is None


def test_no_gradients_are_held_between_steps():
    layer = nn.Linear(8, 8)
    weights = MasterWeights(layer, OptimizerSettings(steps=1, learning_rate=0.1))
    layer(torch.ones(1, 8)).sum().backward()
    assert weights.step(0)
    assert all(weight.grad is None for weight in (*weights.masters, *weights.parameters))


def test_the_log_has_the_mean_over_the_parts_of_a_step(tmp_path):
    task = Line()
    fit(task, OptimizerSettings(steps=2, learning_rate=0.1, accumulate=3), tmp_path, log_every=1)
    losses = [float(Line().loss(part)[0].detach()) for part in range(3)]
    assert rows_in(tmp_path)[0]["loss"] == pytest.approx(np.mean(losses), abs=1e-4)
    assert mean_of([{"a": torch.tensor(1.0)}, {"a": torch.tensor(2.0), "b": torch.tensor(4.0)}]) == {"a": 1.5, "b": 4}


class Half(Line):
    """A line in bfloat16, which a report uses."""

    def __init__(self):
        super().__init__()
        self.line, self.reports = self.line.bfloat16(), []

    def report(self, step, out):
        self.reports.append(self.line(torch.ones(1, 1, dtype=torch.bfloat16)).item())
        return {}


def test_reports_use_averages_and_leave_mixed_precision_as_it_was(tmp_path):
    often, once = Half(), Half()
    fit(often, SETTINGS, tmp_path / "often", report_every_seconds=-1.0)
    fit(once, SETTINGS, tmp_path / "once")
    states = [load_checkpoint(tmp_path / name / "checkpoint.pt")["weights"] for name in ("often", "once")]
    for one, other in zip(*(state["masters"] for state in states), strict=True):
        assert one.dtype == torch.float32 and torch.equal(one, other)
    # In bfloat16, with the averages of that moment.
    assert len(often.reports) == 21 and len(set(often.reports)) > 10
    assert often.line.weight.dtype == torch.bfloat16
    expected = sum(average.bfloat16() for average in states[0]["averages"]).item()
    assert often.reports[-1] == pytest.approx(expected, rel=1e-2) == once.reports[0]


def test_the_second_moment_falls_again(tmp_path):
    layer = nn.Linear(1, 1, bias=False).bfloat16()
    weights = MasterWeights(layer, OptimizerSettings(2000, 1e-6, betas=(0.9, 0.99), warmup_steps=1, weight_decay=0.0))
    for step in range(600):
        layer.weight.grad = torch.full_like(layer.weight, 1.0 if step < 100 else 1e-3)
        weights.step(step)
    (state,) = weights.optimizers[0].state.values()
    # Less than a bfloat16 that stays where it is.
    assert state["exp_avg_sq"].item() < 0.01


@pytest.mark.slow
def test_the_norm_of_a_large_gradient_is_whole(tmp_path):
    layer = nn.Linear(2**14, 2**14, bias=False)
    weights = MasterWeights(layer, SETTINGS)
    assert weights.norm_of([torch.ones_like(layer.weight)]).item() == pytest.approx(2**14, rel=1e-5)


@pytest.mark.slow
def test_processes_that_train_together_agree_on_what_survives(tmp_path):
    together(["training.survive_together"], tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert torch.equal(first["weight"], second["weight"]) and first["seen"] == second["seen"] == 5
    assert "prepares batches" in second["error"] and "trains together" in first["error"]
    assert not set(first["random"]) & set(second["random"])
    state = load_checkpoint(tmp_path / "run" / "checkpoint.pt")
    assert state["step"] == 6 and is_finite(state) and state["skipped"] == 1
    rows = rows_in(tmp_path / "run")
    assert rows[-1]["skipped"] == 1 and "of the second" in rows[-1] and rows[3]["loss"] is None
