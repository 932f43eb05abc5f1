"""Steps that are compiled, captured, and kept between calls."""

from collections.abc import Container, Sequence
from typing import Any

import torch

from ..decoding import Decoding
from ..decoding.run.capture import KEPT_BYTES, CompiledSteps
from .lora import adapter_state
from .offload import OffloadMixin


class CompileMixin(OffloadMixin):
    """Compiled steps of a pipeline."""

    # The name of the argument for the number of images or videos per prompt.
    per_prompt: str
    num_classes: int | None
    decoding: Decoding

    _compiled: CompiledSteps | None = None

    def compile(self, *, kept_bytes: int = KEPT_BYTES, **options) -> None:
        """Compile the steps of calls with `torch.compile`: forward pass, sampling and bookkeeping of a step become one
        graph. On a CUDA device the step is also captured in a CUDA graph, so that it takes a single launch.

        A decoding is compiled when a call first uses it, and again for every new batch size, image size or window, and
        for every 32 tokens that the prompts of a language model become longer; VAR compiles every scale. The graphs
        and the cache of a call are kept for the next one of the same kind, which then captures nothing, see `warm_up`;
        moving or replacing weights drops them. The images are the same as without compilation, up to the rounding of
        fused operators. Prefill and image decoding stay eager; the steps do too while hooks move the weights of a
        component (offloading, several devices), and where a layer has forward hooks. `from_pipe` and
        `save_pretrained` do not keep this setting, and `uncompile` takes it back.

        Args:
            kept_bytes: how much memory kept caches and graphs may take; those that were not used for the longest time
                are freed first. On a CUDA device they also take at most half of the memory that is left.
            options: passed to `torch.compile`, for example `mode="max-autotune"`; by default `fullgraph` is True and
                `dynamic` is False. `backend="eager"` captures without compiling.
        """
        self._compiled = CompiledSteps(kept_bytes=kept_bytes, **options)

    def uncompile(self) -> None:
        """Take the steps of calls eagerly again, and free what compiled ones keep: graphs and caches. Modules that
        `compile` of MAR and of continuous tokens in turn compiles stay compiled."""
        self._compiled = None

    def warm_up(
        self,
        *args,
        batch_sizes: Sequence[int] = (1,),
        decodings: Sequence[Decoding | str] | None = None,
        **kwargs,
    ) -> None:
        """Make calls once, so that later ones of the same kinds compile and capture nothing.

        Args:
            batch_sizes: the numbers of images that are generated at a time.
            decodings: the decodings of these calls; None is the default one.
            args, kwargs: arguments of the calls, such as height or guidance_scale; what the model cannot do without is
                added, such as a prompt or a class.
        """
        if not args:
            kwargs = self._example(kwargs) | kwargs
        for decoding in [None] if decodings is None else decodings:
            for size in batch_sizes:
                generator = torch.Generator().manual_seed(0)
                self(*args, **{self.per_prompt: size, "decoding": decoding, "generator": generator} | kwargs)

    def _example(self, given: Container[str]) -> dict[str, Any]:
        """The arguments of an example that a call needs besides the `given` ones."""
        if any(name in given for name in ("prompt", "class_labels", "prompt_embeds", "input_ids")):
            return {}
        return {"prompt": "a red heart"} if self.num_classes is None else {"class_labels": 0}

    def steps_of(self, decoding: Decoding) -> CompiledSteps | None:
        """The compiler of the steps of calls with `decoding`, with the weights that there are now; None where steps
        run eagerly."""
        steps = self._compiled
        if steps is None:
            return None
        parts = [part for part in self.components.values() if isinstance(part, torch.nn.Module)]
        own = [value for value in vars(decoding).values() if isinstance(value, torch.nn.Module)]
        hooked = any(each._forward_hooks or each._forward_pre_hooks for part in parts for each in part.modules())
        if hooked or self.has_hooks or not (steps.compiles or self._execution_device.type == "cuda"):
            # Their memory is needed now.
            steps.kept.clear()
            return None
        steps.use_weights([*parts, *own], [*adapter_state(parts), *(part.training for part in parts)])
        return steps

    @property
    def _steps(self) -> CompiledSteps | None:
        return self.steps_of(self.decoding)
