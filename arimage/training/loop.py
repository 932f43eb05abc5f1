"""The training loop that every recipe shares, on accelerate: float32 master weights, moving average, checkpoints,
curve and samples."""

import dataclasses
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from torch import nn
from tqdm import tqdm

from ..eval.runs.files import to_lines, write_whole
from .checkpoints import (
    BEFORE,
    CHECKPOINT,
    chosen_checkpoint,
    keep_checkpoint,
    newest_checkpoint,
    restore,
    save_checkpoint,
)
from .optimizer import MasterWeights, OptimizerSettings
from .processes import mean_of, processes, seed_networks, wait_for_all
from .resuming import alone_in, check_resumed
from .sharding import Shards, gathered


# Steps in a row without a finite loss and gradient that end a run.
MOST_SKIPPED = 10
# `DistributedDataParallel` reduces gradients while the backward pass runs. Not every process need reach every
# parameter; buffers that a task computes are its own business.
TOGETHER = DistributedDataParallelKwargs(
    find_unused_parameters=True, broadcast_buffers=False, gradient_as_bucket_view=True
)

logger = logging.getLogger(__name__)


class Task(Protocol):
    """The module that a recipe gives to `fit`: its trainable parameters and its buffers are what is trained and
    kept."""

    def loss(self, step: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss of the batch of `step`, which depends on nothing but the step, and figures for the log. Where steps
        accumulate gradients, these are their parts, which are counted through."""
        ...

    def report(self, step: int, out: Path) -> dict[str, float]:
        """Write sample pictures into `out` and return held-out figures; runs with the averaged weights."""
        ...


class Step(nn.Module):
    """The loss of a task as a forward pass, which is what accelerate knows how to spread over processes. Weights that
    the task holds in the dtype `half`, not None, are in float32 while they are trained: it computes under autocast."""

    def __init__(self, task: nn.Module, half: torch.dtype | None):
        super().__init__()
        self.task, self.half = task, half

    def forward(self, step: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        device = next(self.task.parameters()).device.type
        with torch.autocast(device, self.half, enabled=self.half is not None):
            return self.task.loss(step)


def half_of(task: nn.Module) -> torch.dtype | None:
    """The dtype of the weights that a task trains and holds in half precision; None if there are none."""
    return next((p.dtype for p in task.parameters() if p.requires_grad and p.dtype != torch.float32), None)


@contextmanager
def delayed_interrupt() -> Iterator[list[float]]:
    """Collect the time of the first Ctrl-C or SIGTERM in the list it gives, so that the work in hand can be saved. One
    that comes a second later acts: `torchrun` repeats to its processes what they have got already."""
    received: list[float] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def receive(number: int, frame) -> None:
        received.append(time.monotonic())
        if received[-1] > received[0] + 1:
            restore()
            signal.raise_signal(number)

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    for number in previous:
        signal.signal(number, receive)
    try:
        yield received
    finally:
        restore()


@contextmanager
def enough_memory() -> Iterator[None]:
    """Say what to do where a step needs more memory than there is."""
    try:
        yield
    except RuntimeError as error:
        # The allocator of the CPU has no error of its own.
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        raise ValueError("a step of the training needs more memory than there is: give a lower batch_size") from error


def plot_log(log: list[dict], path: Path) -> None:
    """One panel for every figure of the log, over the steps; no file as long as there are no figures."""
    points = {name: [] for name in sorted({name for row in log for name in row} - {"step", "seconds"})}
    for row in log:
        for name in row.keys() & points.keys():
            # Of figures that are not finite there is None.
            if row[name] is not None:
                points[name].append((row["step"], row[name]))
    points = {name: found for name, found in points.items() if found}
    if not points:
        return
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(points), figsize=(3.5 * len(points), 3), squeeze=False)
    for panel, (name, found) in zip(panels[0], points.items(), strict=True):
        panel.plot(*zip(*found, strict=True))
        panel.set(title=name, xlabel="step")
    figure.tight_layout()
    write_whole(path, lambda file: figure.savefig(file, format="png"))
    pyplot.close(figure)


def finite(row: dict[str, Any]) -> dict[str, Any]:
    """A row of the log, with None for what is not finite, which JSON cannot hold."""
    return {name: value if value is not None and math.isfinite(value) else None for name, value in row.items()}


def new_tracker(name: str, out: Path) -> GeneralTracker:
    """A tracker of accelerate for the run in `out`."""
    if name not in LOGGER_TYPE_TO_CLASS:
        raise ValueError(f"unknown tracker {name!r}: choose among {', '.join(sorted(LOGGER_TYPE_TO_CLASS))}")
    kind: Any = LOGGER_TYPE_TO_CLASS[name]
    try:
        tracker = kind(out.name, logging_dir=out) if kind.requires_logging_directory else kind(out.name)
        tracker.start()
    except ImportError as error:
        raise ValueError(f"the tracker {name} is not installed ({error}): run `pip install {name}`") from error
    return tracker


def begin(
    task: Task,
    settings: OptimizerSettings,
    out: Path,
    learning_rate_scales: dict[str, float] | None = None,
    about: dict[str, Any] | None = None,
    resume_from: str | None = None,
) -> dict | None:
    """The checkpoint that `fit` resumes from, or None, after a check that the run began with these settings."""
    path, state = newest_checkpoint(out) if resume_from is None else chosen_checkpoint(out, resume_from)
    optimizer = {name: value for name, value in dataclasses.asdict(settings).items() if name != "steps"}
    every = {
        "task": type(task).__name__,
        **(about or {}),
        "optimizer": optimizer,
        "learning_rate_scales": learning_rate_scales or {},
        "processes": processes()[1],
    }
    done = None if state is None else state["step"]
    if done is not None and done > settings.steps:
        raise ValueError(
            f"{path} has taken {done} steps, and steps is {settings.steps}: give at least {done}, or another --out"
        )
    check_resumed(out, every, done)
    if state is not None and path.name == BEFORE and processes()[0] == 0:
        # In the place of the damaged one.
        os.replace(path, out / CHECKPOINT)
    return state


def fit(
    task: Task,
    settings: OptimizerSettings,
    out: str | Path,
    *,
    report_every_seconds: float = 900.0,
    checkpoint_every_seconds: float = 60.0,
    log_every: int = 25,
    learning_rate_scales: dict[str, float] | None = None,
    on_report: Callable[[], None] | None = None,
    about: dict[str, Any] | None = None,
    log_with: str | None = None,
    seed: int = 0,
    sharded: bool = False,
    checkpoint_every: int | None = None,
    checkpoints_total_limit: int | None = None,
    resume_from: str | None = None,
) -> None:
    """Train `task` to `settings.steps` steps and leave the averaged weights in it.

    `out` receives `checkpoint.pt` (every minute, at every report, at an interrupt, and where a process that prepares
    batches ends; a run that finds one resumes from it and ends as if it had never been interrupted),
    `checkpoint-before.pt`, the one before, which takes its place if it is damaged, `settings.json`, `log.jsonl`,
    `log.png` and the task's pictures. `on_report` is called at each report, while the averaged weights are in `task`;
    `learning_rate_scales` are those of `MasterWeights`; dropout and the like follow from `seed`.

    Every `checkpoint_every` steps the checkpoint is also kept as `checkpoint-STEP.pt`, the newest
    `checkpoints_total_limit` of them. A run resumes from its newest checkpoint, or from the kept one that is called
    `resume_from`.

    A step whose loss or gradient is not finite changes nothing, and the log counts it. Several in a row end the run.

    A run resumes with the settings that it began with, and the same number of processes. More `steps`, `restarts` that
    are still to come, and another device are fine. `about` says what else the result depends on, by name: settings,
    and digests of the data and of the networks that the task begins with or reads.

    `log_with` is the name of a tracker of accelerate, as in "tensorboard" or "wandb", that gets the figures too.

    Processes that `torchrun` starts, and that called `join_processes`, train together: each takes its own batches, the
    gradients are averaged, and the first one reports. If `sharded`, the networks of the task, its children, are
    divided over them, see `Shards`; for a report `task.show` gets whole copies of them by name.

    Raises:
        ValueError: if the tracker is unknown or not installed, `torchrun` started several that did not, another
            command trains in `out`, the checkpoint is damaged, of another recipe or past `settings.steps`, the run
            began with other settings, or steps or weights are not finite.
        ChildProcessError: if a process that prepares batches ended.
        FullDisk: if no space is left in `out`.
    """
    out = Path(out)
    first = processes()[0] == 0
    tracker = new_tracker(log_with, out) if first and log_with is not None else None
    with alone_in(out):
        state = begin(task, settings, out, learning_rate_scales, about, resume_from)
        start, log = (0, []) if state is None else (state["step"], list(map(finite, state["log"])))
        # Steps that were skipped, and how many of them were the last ones.
        skipped, in_a_row = (0 if state is None else state.get("skipped", 0)), 0
        half = half_of(task)
        model = Step(task, half)
        shards = Shards(model, task, half) if sharded else None
        weights = MasterWeights(task, settings, learning_rate_scales)
        device = weights.masters[0].device
        buffers = dict(task.named_buffers())
        checkpoint = out / CHECKPOINT
        if state is not None:
            restore(state, weights, buffers, checkpoint)
        accelerator = Accelerator(
            gradient_accumulation_steps=settings.accumulate,
            cpu=device.type == "cpu",
            device_placement=False,
            kwargs_handlers=[TOGETHER],
        )

        def use_masters() -> None:
            if shards is None:
                weights.use_masters()
            else:
                task.show(dict(task.named_children()))
                shards.empty()

        def use_averages() -> None:
            if shards is None:
                weights.use_averages()
            else:
                shards.fill(weights)
                task.show(shards.copies)

        def keep(step: int) -> None:
            weights.check(_remedy(checkpoint))
            every = gathered(weights.state_dict())
            if first:
                state = {"step": step, "log": log, "skipped": skipped}
                save_checkpoint(checkpoint, {**state, "weights": every, "buffers": buffers})
                write_whole(out / "log.jsonl", lambda file: file.write_bytes(to_lines(log)))
                if checkpoint_every is not None and step % checkpoint_every == 0:
                    keep_checkpoint(out, step, checkpoints_total_limit)

        def note(row: dict[str, float]) -> None:
            log.append(finite(row))
            if tracker is not None:
                figures = {name: value for name, value in row.items() if name not in ("step", "seconds")}
                tracker.log(figures, step=row["step"])

        def report(step: int) -> None:
            weights.check(_remedy(checkpoint))
            if first or sharded:
                use_averages()
            if first:
                task.eval()
                # Images are generated in other shapes than a model is trained in, too few to compile for.
                with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                    note({"step": step, **task.report(step, out)})
                    if on_report is not None:
                        on_report()
                task.train()
            if first or sharded:
                use_masters()
                keep(step)
            if first:
                plot_log(log, out / "log.png")

        use_masters()
        if not sharded:
            model = accelerator.prepare(model)
        task.train()
        last_checkpoint = last_report = began = time.monotonic()
        with (
            tqdm(
                total=settings.steps, initial=start, unit="step", mininterval=5, disable=None if first else True
            ) as progress,
            delayed_interrupt() as interrupted,
        ):
            for step in range(start, settings.steps):
                # The random numbers of a step must not depend on an interruption before it.
                seed_networks(seed, step)
                before = {name: buffer.clone() for name, buffer in buffers.items()}
                losses, figures, ended = [torch.zeros((), device=device)], [], None
                with enough_memory():
                    try:
                        for part in range(settings.accumulate):
                            last = part == settings.accumulate - 1
                            with nullcontext() if last else accelerator.no_sync(model):
                                loss, found = model(step * settings.accumulate + part)
                                losses.append(loss.detach().float() / settings.accumulate)
                                figures.append(found)
                                if not last:
                                    accelerator.backward(loss)
                    except ChildProcessError as error:
                        # The others wait for its part of the weights: `torchrun` ends them.
                        if sharded:
                            raise
                        ended = error
                    # Before the gradients of all processes are averaged, which is while the last part of the backward
                    # pass runs, all must have come so far.
                    now = time.monotonic()
                    asked = (
                        bool(interrupted),
                        bool(ended),
                        now - last_report > report_every_seconds,
                        now - last_checkpoint > checkpoint_every_seconds
                        or (checkpoint_every is not None and (step + 1) % checkpoint_every == 0),
                    )
                    said = torch.stack([sum(losses), *map(losses[0].new_tensor, map(float, asked))])
                    mean, stopping, incomplete, reporting, keeping = accelerator.reduce(said, "mean").tolist()
                    if not incomplete:
                        accelerator.backward(loss)
                    taken = not incomplete and math.isfinite(mean) and weights.step(step)
                if not taken:
                    weights.clear()
                    for name, buffer in buffers.items():
                        buffer.copy_(before[name])
                if incomplete:
                    keep(step)
                    wait_for_all()
                    raise ended or ChildProcessError("a process that trains together has ended: run the command again")
                in_a_row = 0 if taken else in_a_row + 1
                skipped += not taken
                if not taken and first:
                    logger.warning(f"step {step + 1} was skipped: its loss or gradient is not finite")
                if in_a_row == MOST_SKIPPED:
                    log = [row for row in log if row["step"] <= step + 1 - MOST_SKIPPED]
                    skipped -= MOST_SKIPPED
                    keep(step + 1 - MOST_SKIPPED)
                    wait_for_all()
                    raise ValueError(
                        f"the loss or gradient of {MOST_SKIPPED} steps up to {step + 1} is not finite: "
                        f"{_remedy(checkpoint)}"
                    )
                progress.update()
                if (step + 1) % log_every == 0:
                    row = {name: round(value, 5) for name, value in mean_of(figures).items()}
                    row |= {"skipped": skipped} if skipped else {}
                    note({"step": step + 1, "seconds": round(time.monotonic() - began, 1), **row})
                    progress.set_postfix(row)
                if stopping:
                    # A report may last longer than the system waits.
                    keep(step + 1)
                if stopping or reporting:
                    report(step + 1)
                    last_checkpoint = last_report = time.monotonic()
                # After the last step a checkpoint would say that the report is there too.
                elif step + 1 < settings.steps and keeping:
                    keep(step + 1)
                    last_checkpoint = time.monotonic()
                if stopping:
                    wait_for_all()
                    if first:
                        logger.warning(
                            f"stopped after step {step + 1}: run the command again, which resumes from there"
                        )
                    raise KeyboardInterrupt
        if start < settings.steps:
            report(settings.steps)
        use_averages()
        task.eval()
        if tracker is not None:
            tracker.finish()


def measured_step(task: Task, settings: OptimizerSettings, count: int = 10) -> tuple[float, int]:
    """How long a step of `fit` takes in this process, without the others: the mean of at most `count` of them, after
    one that is not counted; and the bytes that a batch keeps for the backward pass. It changes the weights of the
    task."""
    weights = MasterWeights(task, settings)
    model = Step(task, half_of(task))
    weights.use_masters()
    task.train()
    first = int(settings.steps > 1)
    taken = min(count + first, settings.steps)
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with enough_memory():
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(0)
        for parameter in task.parameters():
            kept.pop(parameter.untyped_storage().data_ptr(), None)
        began = time.monotonic()
        for step in range(taken):
            if step == first:
                began = time.monotonic()
            for part in range(settings.accumulate):
                loss, _ = model(step * settings.accumulate + part)
                (loss / settings.accumulate).backward()
            weights.step(step)
    return (time.monotonic() - began) / (taken - first), sum(kept.values())


def _remedy(checkpoint: Path) -> str:
    kept = f"{checkpoint} has the weights of before, " if checkpoint.exists() else ""
    return f"{kept}give a lower learning rate or correct the data, and another --out"
