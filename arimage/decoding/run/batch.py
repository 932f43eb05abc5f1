"""The loop that runs a decoding: images pass through the lanes of a batch, and a finished image makes room for one
that is waiting."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ParamSpec, TypeVar

import torch

from ..contract.distribution import Sampling
from ..contract.models import Model
from ..contract.state import DecodingState, captured_multiple
from ..contract.supports import Decoding
from .captured_steps import CapturedState, CapturedSteps


P = ParamSpec("P")
T = TypeVar("T")

# The number of steps between two reads that make the host wait for an accelerator.
INTERVAL = 8
# How many steps the host is ahead of a CUDA device, so that the device always has work. It takes as many steps in vain
# at the end.
AHEAD = 2


@dataclass
class Images:
    """Images that are ready to begin.

    Attributes:
        names: the caller's name for each of the M images.
        model: a model that is bound to these images only. The batch rebinds it when other images take their lanes.
        sampling, seeds: how to sample them, and their seeds, int64 [M], which the batch overwrites too.
    """

    names: Sequence[Hashable]
    model: Model
    sampling: Sampling
    seeds: torch.LongTensor

    def copy(self) -> "Images":
        """The same images with tensors of their own, for a caller that needs the others later."""
        images = torch.arange(len(self.seeds), device=self.seeds.device)
        return Images(self.names, self.model.take(images), self.sampling.take(images), self.seeds.clone())


class Batch:
    """Lanes in which images are generated, each from its own start to its own end. All of them have the same network,
    layout, guidance and decoding.

    On an accelerator, and with compiled steps, there are always `size` lanes, so that shapes never change. On the CPU,
    where an idle lane costs as much as any other, there are as many lanes as images.

    Args:
        size: the largest number of images that run at once.
        captured_steps: compiles and captures the steps; None takes them eagerly.

    Attributes:
        names: the image in each lane, None in an idle one.
        running: the lanes that are not idle.
        state: the state of the decoding; None before the first image.
        begins, steps: the forward passes so far: prefills (one for all images that begin together) and steps.
        calls_per_pass: the number of calls of denoising heads in each of these forward passes.
    """

    def __init__(self, decoding: Decoding, size: int, captured_steps: CapturedSteps | None = None):
        self.decoding, self.size = decoding, size
        self.names: list[Any] = []
        self.running: list[int] = []
        self.state: Any = None
        self.begins = self.steps = 0
        self.calls_per_pass: list[int] = []
        # Where the state is from, and goes back to.
        self._captured_steps = captured_steps
        self._captured: CapturedState | None = None
        self._replayed = False
        # The number of steps taken before the image in each lane began.
        self._began: list[int] = []

    @property
    def room(self) -> int:
        """How many images may begin now. Where a decoding keeps all images at the same step, they must begin
        together."""
        running = len(self.running)
        return 0 if running and not self.state.refillable else self.size - running

    @property
    def forward_passes(self) -> int:
        return self.begins + self.steps

    @property
    def how(self) -> str:
        """How steps were taken: "compiled"; "captured" if any were replayed from CUDA graphs, and no capture failed;
        else "eager"."""
        if self._captured_steps is not None and self._captured_steps.compiles:
            return "compiled"
        return "captured" if self._replayed else "eager"

    def begin(self, images: Images) -> None:
        """Prefill `images`, at most `room`, and assign lanes to them.

        Raises:
            ValueError: if the decoding does not support their model, or their given tokens are not those of the model.
        """
        reason = self.decoding.supports(images.model)
        if reason is not None:
            raise ValueError(f"{type(self.decoding).__name__} cannot decode this model: {reason}")
        running, count = len(self.running), len(images.names)
        images.sampling.check_forced(count, images.model.num_tokens)
        images.sampling.check_scales(len(images.model.scales) if images.model.kind == "scales" else None)
        if not running:
            # Free the memory of the finished images before the prefill.
            self.state = self._captured = None
        if self._captured_steps is not None:
            # Another call may write its images over these, while this one decodes tokens to pixels.
            images = images.copy()
        images.model.compact = True
        decoding = self.state.starter(self.decoding) if running else self.decoding
        state = self.with_room(decoding.start, images.model, images.sampling, images.seeds)
        if self._captured_steps is not None:
            state.stack_sampling()
        self.begins += 1
        self.calls_per_pass.append(state.head_calls)
        lanes, moved = self._admit(state, count)
        for lane, name in zip(lanes, images.names, strict=True):
            self.names[lane], self._began[lane] = name, self.steps
        self._find_running()
        if self._fixed and self.state.refillable:
            self._resize(self.size)
        self.with_room(self.state.allocate)
        # Flags of other images are forgotten.
        self._watch = Watch(self.state.finished)
        if moved and self._captured is not None:
            self._captured.forget()
        if not running:
            step = partial(self.decoding.step, self.state) if self._captured is None else self._captured.step
            self.state.time_steps(step, "" if self._captured is None else str(self._captured_steps))
        self._limit_attention(self._patience - self.steps % self._patience)

    def _admit(self, state: Any, count: int) -> tuple[Sequence[int], bool]:
        """Assign lanes to the `count` images of a state. Returns these lanes, and whether tensors that captured steps
        use were replaced."""
        device = state.seeds.device
        if running := len(self.running):
            self._resize(max(len(self.names), running + count))
            lanes = [lane for lane, name in enumerate(self.names) if name is None][:count]
            return lanes, self.state.put(torch.tensor(lanes, device=device), state)
        self.state = state
        if self._captured_steps is not None:
            size = self.size if state.refillable else count
            self._captured = self._captured_steps.take(self.decoding, size, state)
            self.state = self._captured.state
        self.names, self._began = [None] * len(self.state.seeds), [0] * len(self.state.seeds)
        return range(count), self.state is not state and self.state.restart(torch.arange(count, device=device), state)

    def step(self) -> None:
        """One forward pass of the running images."""
        if len(self.running) < len(self.names) and not self._fixed and self.state.refillable:
            self._resize(len(self.running))
        # With others in the batch, the rounding of an image would depend on how far they are.
        if not self._fixed and len(self.names) == 1:
            self.state.shrink()
        before = self.state.head_calls
        if self._captured is None:
            self.decoding.step(self.state)
        else:
            self._replayed |= self._captured.step()
            self._replayed &= not self._captured.failed
        self.calls_per_pass.append(self.state.head_calls - before)
        self.steps += 1
        if self.steps % INTERVAL == 0:
            self.state.adapt()
        if self.steps % self._patience == 0:
            self._limit_attention(self._patience)

    def finished(self) -> list[int]:
        """The running lanes whose images are known to be finished. Must be called once after every forward pass."""
        if self.state.over:
            return self.running
        finished = self._watch.look().tolist()
        return [lane for lane in self.running if finished[lane]]

    def passes_of(self, lanes: list[int]) -> list[int]:
        """How many forward passes the images in `lanes` took. Reads the device."""
        passes = self.state.steps.tolist()
        return [passes[lane] for lane in lanes]

    def release(self, lanes: list[int]) -> None:
        """Make lanes idle, whether or not their images are finished. Once all lanes are idle, the steps after the end
        of the last image, which an accelerator takes before the host sees the end, are subtracted. Reads the device
        then."""
        for lane in lanes:
            self.names[lane] = None
        self._find_running()
        if lanes and not self.running:
            ends = [self._began[lane] + passes - 1 for lane, passes in zip(lanes, self.passes_of(lanes), strict=True)]
            idle = self.steps - max(ends)
            self.steps -= idle
            del self.calls_per_pass[self.forward_passes :]
            if self._captured is not None and self._captured_steps is not None:
                self._captured_steps.give_back(self._captured)
                self._captured = None

    def with_room(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `function` returns. If memory runs out, the states of other calls are freed, and it is called again."""
        try:
            return function(*args, **kwargs)
        except torch.OutOfMemoryError:
            if self._captured_steps is None or not self._captured_steps.clear():
                raise
        return function(*args, **kwargs)

    def use(self, captured_steps: CapturedSteps | None) -> None:
        """Take the further steps with `captured_steps`, which captures them again if they run another program now."""
        if captured_steps is not self._captured_steps:
            self._captured_steps, self._captured = captured_steps, None
            if captured_steps is not None and self.running:
                self.state.stack_sampling()
                # Nothing of it was copied for other calls.
                self._captured = CapturedState(captured_steps, self.decoding, self.state, keeps=False)
        elif self._captured is not None:
            self._captured.renew()

    def _find_running(self) -> None:
        self.running = [lane for lane, name in enumerate(self.names) if name is not None]

    @property
    def _fixed(self) -> bool:
        """Whether the number of lanes stays the same."""
        return self._captured_steps is not None or self.state.finished.device.type != "cpu"

    @property
    def _patience(self) -> int:
        """For how many steps an attention limit holds. Setting one synchronizes with the device."""
        return 1 if self.state.finished.device.type == "cpu" else INTERVAL

    def _resize(self, count: int) -> None:
        """Change the number of lanes to `count`, which must be enough for the running ones."""
        if count == len(self.names):
            return
        running = self.running
        idle = count - len(running)
        self.state.select(torch.tensor(running + running[:1] * idle, device=self.state.finished.device))
        self.names = [self.names[lane] for lane in running] + [None] * idle
        self._began = [self._began[lane] for lane in running] + [0] * idle
        self._find_running()
        self._watch = Watch(self.state.finished)

    def _limit_attention(self, steps: int) -> None:
        if self._captured_steps is None:
            self.state.limit_attention(steps)
        else:
            self.state.limit_attention(steps, captured_multiple(self.state.model.num_tokens))


class Watch:
    """Tracks which images are finished.

    Reading a tensor waits for everything launched before. On a CUDA device the flags are therefore copied to the host
    after every step, and the host reads the copy made `AHEAD` steps earlier. It waits for that copy, so it is never
    further ahead.

    Args:
        finished: bool [B], which steps write in place.
    """

    def __init__(self, finished: torch.BoolTensor):
        self._finished, self._looks = finished, 0
        if finished.is_cuda:
            self._copies = torch.zeros(AHEAD, len(finished), dtype=torch.bool, device="cpu", pin_memory=True)
            self._events = [torch.cuda.Event() for _ in range(AHEAD)]

    def look(self) -> torch.BoolTensor:
        """Bool [B] on the CPU, called once after every step: images known to be finished."""
        self._looks += 1
        if self._finished.is_cuda:
            return self._exchange(self._looks % AHEAD)
        if self._finished.device.type == "cpu" or self._looks % INTERVAL == 0:
            return self._finished.cpu()
        return torch.zeros(len(self._finished), dtype=torch.bool)

    def _exchange(self, turn: int) -> torch.BoolTensor:
        """Read a copy of the flags, and start a new copy in its place."""
        self._events[turn].synchronize()
        seen = self._copies[turn].clone() if self._looks > AHEAD else torch.zeros_like(self._copies[turn])
        self._copies[turn].copy_(self._finished, non_blocking=True)
        self._events[turn].record(torch.cuda.current_stream(self._finished.device))
        return seen


def run_batch(
    batch: Batch,
    waiting: Callable[[int], Images | None],
    on_finished: Callable[[list[int]], None],
    on_step: Callable[[], bool],
) -> None:
    """Run until no images are left, or until `on_step` returns True.

    Args:
        waiting: called with the number of images that may begin; returns images that begin now, or None.
        on_finished: called with the lanes of finished images, before the lanes are assigned to other images.
        on_step: called after every forward pass.

    Raises:
        ValueError: if the decoding does not support a model.
    """
    while True:
        images = waiting(batch.room) if batch.room else None
        if images is not None:
            batch.begin(images)
        elif batch.running:
            batch.step()
        else:
            return
        if on_step():
            return
        lanes = batch.finished()
        if lanes:
            on_finished(lanes)
            batch.release(lanes)


def decode(
    model: Model,
    decoding: Decoding,
    sampling: Sampling,
    seeds: torch.LongTensor,
    on_step: Callable[[DecodingState, int], bool] | None = None,
    captured_steps: CapturedSteps | None = None,
) -> DecodingState:
    """Decode images that all begin together, until all of them are finished or `on_step` returns True.

    Args:
        seeds: int64 [B] on the model's device. An image depends on its own seed only, up to the rounding of
            differently shaped matrix products.
        on_step: called after every forward pass with the state and the number of forward passes so far, prefill
            included.
        captured_steps: compiles and captures the steps; by default `decoding.step` takes them.

    Returns:
        The state of all B images, in the order of `seeds`.

    Raises:
        ValueError: if `decoding` does not support this model, or logits of the model were not finite.
    """
    batch = Batch(decoding, len(seeds), captured_steps)
    batch.begin(Images(range(len(seeds)), model, sampling, seeds))
    while not (on_step is not None and on_step(batch.state, batch.forward_passes)):
        if len(batch.finished()) == len(seeds):
            break
        batch.step()
    batch.state.check()
    return batch.state
