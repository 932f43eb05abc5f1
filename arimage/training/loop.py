"""The training loop that every recipe shares: float32 master weights, moving average, checkpoints, curve and
samples."""

import dataclasses
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from diffusers.training_utils import EMAModel
from torch import nn
from tqdm import tqdm

from ..eval.runs.files import to_lines, write_whole
from ..settings.schema import COMPLETE, Count, Decay, Positive, Rate, Share, Steps, Text
from .muon import Muon
from .processes import average, mean_of, processes, seed_networks, wait_for_all
from .resuming import alone_in, check_resumed


# The newest checkpoint of a run, and the one before.
CHECKPOINT, BEFORE = "checkpoint.pt", "checkpoint-before.pt"
# Steps in a row without a finite loss and gradient that end a run.
MOST_SKIPPED = 10

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW with a linear warm-up, and then a `schedule` that ends at the share `final_share` of `learning_rate`; both
    begin again at each of `restarts`, a step and its learning rate. A step adds the gradients of `accumulate` batches.
    `ema_decay` is the decay of the averaged weights.

    Matrices whose names begin like one of `muon` are updated by Muon (https://kellerjordan.github.io/posts/muon/),
    scaled so that learning rate and weight decay mean what they mean to AdamW.
    """

    steps: Steps
    learning_rate: Rate
    weight_decay: Share = 0.05
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    warmup_steps: Steps = 50
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    final_share: Share = 0.05
    accumulate: Count = 1
    restarts: tuple[tuple[Steps, Rate], ...] = ()
    gradient_clip: Positive = 1.0
    ema_decay: Share = 0.999
    muon: tuple[Text, ...] = ()
    __pydantic_config__ = COMPLETE

    def __post_init__(self):
        steps = [step for step, _ in self.restarts]
        if steps != sorted(set(steps)):
            raise ValueError(f"restarts begin at the steps {steps}: give them in ascending order, each once")

    def learning_rate_at(self, step: int) -> float:
        start, highest, end = 0, self.learning_rate, self.steps
        for restart, learning_rate in reversed(self.restarts):
            if restart > step:
                end = restart
            else:
                start, highest = restart, learning_rate
                break
        warmup = min(1.0, (step - start + 1) / min(self.warmup_steps, end - start))
        progress = min(1.0, (step - start) / (end - start))
        left = {"cosine": 0.5 * (1 + math.cos(math.pi * progress)), "linear": 1 - progress, "constant": 1.0}
        return highest * warmup * (self.final_share + (1 - self.final_share) * left[self.schedule])


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


class MasterWeights:
    """float32 copies of a module's parameters for the optimizer, and their exponential moving average (diffusers'
    `EMAModel`).

    `learning_rate_scales` maps the beginnings of parameters' names to factors of their learning rate.
    """

    def __init__(
        self, module: nn.Module, settings: OptimizerSettings, learning_rate_scales: dict[str, float] | None = None
    ):
        self.settings = settings
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self.parameters = [p for _, p in named]
        # `EMAModel` averages what requires gradients.
        self.masters = [nn.Parameter(p.detach().float().clone()) for p in self.parameters]
        self._moving = EMAModel(self.masters, decay=settings.ema_decay, foreach=True)
        groups: dict[bool, dict[tuple[float, float], list[torch.Tensor]]] = {False: {}, True: {}}
        for (name, _), master in zip(named, self.masters, strict=True):
            decay = settings.weight_decay if master.ndim > 1 else 0.0
            scale = math.prod(scale for start, scale in (learning_rate_scales or {}).items() if name.startswith(start))
            by_muon = master.ndim == 2 and name.startswith(tuple(settings.muon))
            groups[by_muon].setdefault((decay, scale), []).append(master)
        adam, muon = (
            [{"params": it, "weight_decay": decay, "scale": scale} for (decay, scale), it in of.items()]
            for of in groups.values()
        )
        self.optimizers = [torch.optim.AdamW(adam, betas=settings.betas, fused=True)]
        if muon:
            self.optimizers.append(Muon(muon))

    @torch.no_grad()
    def collect(self) -> None:
        """Add the gradients of the parameters to those of the masters, in float32."""
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            # Not every step need reach every parameter.
            if parameter.grad is None:
                continue
            gradient, parameter.grad = parameter.grad.float(), None
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)

    @torch.no_grad()
    def step(self, step: int) -> bool:
        """Take a step by the gradients, and clear them. If one of them is not finite, nothing else changes. Returns
        whether it was taken, which processes that train together agree on."""
        self.collect()
        if processes()[1] > 1:
            # A parameter that this process did not reach may have a gradient in another.
            for master in self.masters:
                master.grad = torch.zeros_like(master) if master.grad is None else master.grad
            average([master.grad for master in self.masters])
        finite = bool(nn.utils.clip_grad_norm_(self.masters, self.settings.gradient_clip).isfinite())
        if finite:
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = self.settings.learning_rate_at(step) * group["scale"]
                optimizer.step()
            torch._foreach_copy_(self.parameters, self.masters)
            # It depends on the step alone, also in a run that is resumed.
            self._moving.optimization_step = step
            self._moving.step(self.masters)
        self.clear()
        return finite

    def clear(self) -> None:
        """Forget the gradients, which take memory."""
        for weight in (*self.parameters, *self.masters):
            weight.grad = None

    def check(self, path: Path) -> None:
        """Refuse to write weights that are not finite.

        Raises:
            ValueError: naming the checkpoint `path`.
        """
        if not all(weight.isfinite().all() for weight in (*self.masters, *self.averages)):
            raise ValueError(f"the weights are not finite any more: {_remedy(path)}")

    @property
    def averages(self) -> list[torch.Tensor]:
        return self._moving.shadow_params

    @torch.no_grad()
    def load(self, averaged: bool) -> None:
        """Put the averaged weights, or the current ones, into the module."""
        torch._foreach_copy_(self.parameters, self.averages if averaged else self.masters)

    def state_dict(self) -> dict:
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        masters = [master.detach() for master in self.masters]
        return {"masters": masters, "averages": self.averages, "optimizers": optimizers}

    @torch.no_grad()
    def load_state_dict(self, state: dict) -> None:
        torch._foreach_copy_(self.masters, state["masters"])
        torch._foreach_copy_(self.averages, state["averages"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.load(averaged=False)


def save_checkpoint(path: Path, state: dict) -> None:
    """Write `state` so that an interruption leaves either the old file or the new one, and keep the old one too."""

    def write(file: Path) -> None:
        # Given a path, torch does not say that the disk is full.
        with open(file, "wb") as opened:
            torch.save(state, opened)

    write_whole(path, write, before=path.with_name(BEFORE))


def newest_checkpoint(out: Path) -> tuple[Path, dict | None]:
    """The newest checkpoint of a run that can be read, and what it holds; None if there are none.

    Raises:
        ValueError: if all are damaged.
    """
    damaged = None
    for path in (out / CHECKPOINT, out / BEFORE):
        if not path.exists():
            continue
        try:
            state = load_checkpoint(path)
        except ValueError as error:
            damaged = damaged or error
            continue
        if damaged is not None and processes()[0] == 0:
            logger.warning(f"{out / CHECKPOINT} is damaged: the run goes on from {path.name}, step {state['step']}")
        return path, state
    if damaged is not None:
        raise damaged
    return out / CHECKPOINT, None


def load_checkpoint(path: Path) -> dict:
    """What a checkpoint holds.

    Raises:
        ValueError: if the file is damaged, or was written by another version.
    """
    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
        _shapes(state["weights"], state["buffers"])
        if not isinstance(state["step"], int) or not isinstance(state["log"], list):
            raise TypeError("step or log")
    except (OSError, MemoryError):
        raise
    # A damaged file can raise anything.
    except Exception as error:
        raise ValueError(f"{path} is damaged: delete it to train from the start") from error
    return state


def restore(state: dict, weights: MasterWeights, buffers: dict[str, torch.Tensor], where: Path) -> None:
    """Take over what the checkpoint `where` holds.

    Raises:
        ValueError: if it was written by another recipe.
    """
    if _shapes(state["weights"], state["buffers"]) != _shapes(weights.state_dict(), buffers):
        raise ValueError(
            f"{where} was written by a recipe with another model or optimizer: give that recipe or another --out"
        )
    weights.load_state_dict(state["weights"])
    for name, buffer in buffers.items():
        buffer.copy_(state["buffers"][name])


def _shapes(weights: dict, buffers: dict[str, torch.Tensor]) -> tuple:
    """What the weights and buffers of a checkpoint and of a task must have in common."""
    groups = [[group["params"] for group in optimizer["param_groups"]] for optimizer in weights["optimizers"]]
    shapes = [[one.shape for one in weights[name]] for name in ("masters", "averages")]
    return shapes, groups, {name: it.shape for name, it in buffers.items()}


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
    """A tracker of accelerate for the run in `out`.

    Raises:
        ValueError: if there is none of this name, or it is not installed.
    """
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
) -> dict | None:
    """The checkpoint that `fit` resumes from, None without one, after a check that the run began with these settings.

    Raises:
        ValueError: if it did not, or the checkpoint is damaged or past `settings.steps`.
    """
    path, state = newest_checkpoint(out)
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
) -> None:
    """Train `task` to `settings.steps` steps and leave the averaged weights in it.

    `out` receives `checkpoint.pt` (every minute, at every report, at an interrupt, and where a process that prepares
    batches ends; a run that finds one resumes from it and ends as if it had never been interrupted),
    `checkpoint-before.pt`, the one before, which takes its place if it is damaged, `settings.json`, `log.jsonl`,
    `log.png` and the task's pictures. `on_report` is called at each report, while the averaged weights are in `task`;
    `learning_rate_scales` are those of `MasterWeights`; dropout and the like follow from `seed`.

    A step whose loss or gradient is not finite changes nothing, and the log counts it. Several in a row end the run.

    A run resumes with the settings that it began with, and the same number of processes. More `steps`, `restarts` that
    are still to come, and another device are fine. `about` says what else the result depends on, by name: settings,
    and digests of the data and of the networks that the task begins with or reads.

    `log_with` is the name of a tracker of accelerate, as in "tensorboard" or "wandb", that gets the figures too.

    Processes that `torchrun` starts, and that called `join_processes`, train together: each takes its own batches, the
    gradients are averaged, and the first one reports.

    Raises:
        ValueError: if the tracker is unknown or not installed, `torchrun` started several that did not, another
            command trains in `out`, the checkpoint is damaged, of another recipe or past `settings.steps`, the run
            began with other settings, or steps or weights are not finite.
        ChildProcessError: if a process that prepares batches ended.
        FullDisk: if no space is left in `out`.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) != processes()[1]:
        raise ValueError(f"{type(task).__name__} trains in one process: start it without torchrun")
    out = Path(out)
    first = processes()[0] == 0
    tracker = new_tracker(log_with, out) if first and log_with is not None else None
    with alone_in(out):
        state = begin(task, settings, out, learning_rate_scales, about)
        start, log = (0, []) if state is None else (state["step"], list(map(finite, state["log"])))
        # Steps that were skipped, and how many of them were the last ones.
        skipped, in_a_row = (0 if state is None else state.get("skipped", 0)), 0
        weights = MasterWeights(task, settings, learning_rate_scales)
        buffers = dict(task.named_buffers())
        checkpoint = out / CHECKPOINT
        if state is not None:
            restore(state, weights, buffers, checkpoint)

        def keep(step: int) -> None:
            weights.check(checkpoint)
            if first:
                state = {"step": step, "log": log, "skipped": skipped}
                save_checkpoint(checkpoint, {**state, "weights": weights.state_dict(), "buffers": buffers})
                write_whole(out / "log.jsonl", lambda file: file.write_bytes(to_lines(log)))

        def note(row: dict[str, float]) -> None:
            log.append(finite(row))
            if tracker is not None:
                figures = {name: value for name, value in row.items() if name not in ("step", "seconds")}
                tracker.log(figures, step=row["step"])

        def report(step: int) -> None:
            weights.check(checkpoint)
            if not first:
                return
            weights.load(averaged=True)
            task.eval()
            # Images are generated in other shapes than a model is trained in, too few to compile for.
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                note({"step": step, **task.report(step, out)})
                if on_report is not None:
                    on_report()
            weights.load(averaged=False)
            task.train()
            keep(step)
            plot_log(log, out / "log.png")

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
                loss, figures, ended = torch.zeros((), device=weights.masters[0].device), [], None
                with enough_memory():
                    try:
                        for part in range(settings.accumulate):
                            one, found = task.loss(step * settings.accumulate + part)
                            (one / settings.accumulate).backward()
                            weights.collect()
                            loss += one.detach() / settings.accumulate
                            figures.append(found)
                    except ChildProcessError as error:
                        ended = error
                    said = torch.stack([loss, *map(loss.new_tensor, map(float, (bool(interrupted), bool(ended))))])
                    average([said])
                    mean, stopping, incomplete = said.tolist()
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
                if stopping or time.monotonic() - last_report > report_every_seconds:
                    report(step + 1)
                    last_checkpoint = last_report = time.monotonic()
                # After the last step a checkpoint would say that the report is there too.
                elif step + 1 < settings.steps and time.monotonic() - last_checkpoint > checkpoint_every_seconds:
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
        weights.load(averaged=True)
        task.eval()
        if tracker is not None:
            tracker.finish()


def _remedy(checkpoint: Path) -> str:
    kept = f"{checkpoint} has the weights of before, " if checkpoint.exists() else ""
    return f"{kept}give a lower learning rate or correct the data, and another --out"
