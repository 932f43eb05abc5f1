"""Steps that are captured or compiled, and kept between calls."""

from collections.abc import Container, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from ..decoding import Decoding
from ..decoding.run.captured_steps import KEPT_BYTES, WARM_UP, CapturedSteps
from ..models.mixin import keeping_float32
from .offload import OffloadMixin


class CompileMixin(OffloadMixin):
    """How a pipeline takes the steps of its calls. On a CUDA device they are captured in CUDA graphs and replayed;
    `compile` also compiles them, and `run_eagerly` is the switch that turns both off. On other devices steps run
    eagerly unless they are compiled. Whether a call's steps were eager, captured or compiled is in `stats.steps`."""

    # The name of the argument for the number of images or videos per prompt.
    per_prompt: str
    num_classes: int | None
    decoding: Decoding

    # None takes steps eagerly.
    _compiled: CapturedSteps | None = None

    def capture(self, *, kept_bytes: int = KEPT_BYTES) -> None:
        """Capture the steps of calls on a CUDA device: forward pass, sampling and bookkeeping of a step become one
        CUDA graph, which takes a single launch. Every new pipeline does so; call it for another `kept_bytes`, or after
        `run_eagerly` or `compile`.

        The graphs belong to a decoding, batch size, image size or window, set of sampling settings, and to prompts of
        a language model of the same length, rounded up to 32 tokens. A call takes two steps of a shape eagerly, and
        captures the third. Capturing launches nothing: the kernels of a first call are those of an eager one, and per
        graph (up to four of an image of tokens, one per attention limit) the host waits once for the device. Steps of
        which an image has only one (a scale, a group, a set of tokens) are captured in the second call of their kind,
        so that a single call does not pay for graphs that it would not replay.

        The graphs and the cache of a call are kept for the next one of the same kind, which then captures nothing, see
        `warm_up`; moving or replacing weights drops them. The images are the same as without graphs, up to the
        rounding of attention, whose limits are coarser. Prefill and image decoding stay eager; the steps do too while
        hooks move the weights of a component (offloading, several devices), where a layer has forward hooks, where
        weights are divided among processes, and where a capture fails, with a warning. `from_pipe` and
        `save_pretrained` do not keep this setting.

        Args:
            kept_bytes: how much memory kept caches and graphs may take, at most half of the memory that is left; those
                that were not used for the longest time are freed first.
        """
        self._compiled = CapturedSteps(compiles=False, kept_bytes=kept_bytes)

    def compile(self, *, kept_bytes: int = KEPT_BYTES, **options) -> None:
        """Compile the steps of calls with `torch.compile`: forward pass, sampling and bookkeeping of a step become one
        graph of fused operators. On a CUDA device the compiled step is then captured, see `capture`.

        A decoding is compiled when a call first uses it, and again for every new batch size, image size or window, and
        for every 32 tokens that the prompts of a language model become longer; VAR compiles every scale. That takes
        minutes, and pays for wide language models that generate many images.
        The images are the same as without compilation, up to the rounding of fused operators. `from_pipe` and
        `save_pretrained` do not keep this setting; `capture` and `run_eagerly` take it back.

        Args:
            kept_bytes: see `capture`.
            options: passed to `torch.compile`, for example `mode="max-autotune"`; by default `fullgraph` is True and
                `dynamic` is False.
        """
        self._compiled = CapturedSteps(kept_bytes=kept_bytes, **options)

    def run_eagerly(self) -> None:
        """Take the steps of calls eagerly from now on, neither captured nor compiled, and free what is kept: graphs
        and caches. The environment variable ARIMAGE_EAGER=1 does so for every new pipeline. Modules that `compile` of
        MAR and of continuous tokens in turn compiles stay compiled."""
        self._compiled = None

    def to(self, *args, **kwargs):
        before = self._execution_device, self.dtype
        with ExitStack() as stack:
            for part in self.components.values():
                if isinstance(part, torch.nn.Module):
                    stack.enter_context(keeping_float32(part))
            pipe = super().to(*args, **kwargs)
        if self._compiled is not None and before != (self._execution_device, self.dtype):
            # What is kept reads the weights where they were.
            self._compiled.clear()
        return pipe

    def warm_up(
        self,
        *args,
        batch_sizes: int | Sequence[int] = 1,
        decodings: Decoding | str | Sequence[Decoding | str] | None = None,
        **kwargs,
    ) -> None:
        """Make calls, so that later ones of the same kinds compile and capture nothing. On a CUDA device a call is
        made again while some of its steps are not captured, see `capture`.

        Args:
            batch_sizes: the number of images that are generated at a time, or several.
            decodings: the decoding of these calls, or several; None is the default one.
            args, kwargs: arguments of the calls, such as height or guidance_scale; what the model cannot do without is
                added, such as a prompt or a class.
        """
        if not args:
            kwargs = self._example(kwargs) | kwargs
        sizes = [batch_sizes] if isinstance(batch_sizes, int) else batch_sizes
        for decoding in decodings if isinstance(decodings, list | tuple) else [decodings]:
            for size in sizes:
                for _ in self.until_captured():
                    generator = torch.Generator().manual_seed(0)
                    self(*args, **{self.per_prompt: size, "decoding": decoding, "generator": generator} | kwargs)

    @property
    def captures(self) -> bool:
        """Whether steps of the default decoding are captured: on a CUDA device, unless they run eagerly."""
        return self._execution_device.type == "cuda" and self.steps_of(self.decoding) is not None

    def until_captured(self) -> Iterator[None]:
        """Yield for a call, and again while steps of it have not come often enough to be captured."""
        steps = self._compiled
        before = 0 if steps is None else steps.uncaptured
        for _ in range(WARM_UP + 1):
            yield
            if steps is None or steps.uncaptured <= before:
                return

    def _example(self, given: Container[str]) -> dict[str, Any]:
        """The arguments of an example that a call needs besides the `given` ones."""
        if any(name in given for name in ("prompt", "class_labels", "prompt_embeds", "input_ids")):
            return {}
        return {"prompt": "a red heart"} if self.num_classes is None else {"class_labels": 0}

    def steps_of(self, decoding: Decoding) -> CapturedSteps | None:
        """What captures and compiles the steps of calls with `decoding`, with the weights that there are now; None
        where steps run eagerly."""
        steps = self._compiled
        if steps is None:
            return None
        if not steps.compiles and self.weight_devices == {torch.device("cpu")}:
            # Calls with a callback ask before every step, so modules are not asked for hooks. Weights that hooks
            # offload need the memory of what is kept.
            steps.clear()
            return None
        if not (steps.compiles or self._execution_device.type == "cuda"):
            return None
        parts = [*self.components.values(), *vars(decoding).values()]
        networks = (part for part in parts if isinstance(part, torch.nn.Module))
        if self.has_hooks or steps.use(networks).needs_python:
            # The memory of what is kept is needed now.
            steps.clear()
            return None
        return steps
