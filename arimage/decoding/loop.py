"""The loop that runs a decoding until every image is finished."""

from collections.abc import Callable

import torch

from .contract.distribution import Sampling
from .contract.models import Decoding, Model
from .contract.state import DecodingState
from .run.watch import INTERVAL, Watch


def decode(
    model: Model,
    decoding: Decoding,
    sampling: Sampling,
    seeds: torch.LongTensor,
    on_step: Callable[[DecodingState, int], bool] | None = None,
    compiled: Callable[[Decoding, DecodingState], Callable[[DecodingState], None]] | None = None,
) -> DecodingState:
    """Run `decoding` until every image is finished, or until `on_step` returns True.

    Args:
        seeds: int64 [B] on the model's device. An image depends on its own seed only, up to the rounding of differently
            shaped matrix products.
        on_step: called after every step with the state and the number of forward passes so far, prefill included.
        compiled: makes the function that takes the steps of a state, such as a `CompiledSteps`; by default it is
            `decoding.step`.

    Raises:
        ValueError: if `decoding` cannot run on this model, or the model's logits were not finite.
    """
    reason = decoding.supports(model)
    if reason is not None:
        raise ValueError(f"{type(decoding).__name__} cannot decode this model: {reason}")
    state, steps = decoding.start(model, sampling, seeds), 1
    step = decoding.step if compiled is None else compiled(decoding, state)
    watch = Watch(state.finished)
    # Reading an accelerator waits for it. Compiled steps would be compiled for every limit.
    patience = 1 if model.device.type == "cpu" else INTERVAL
    if compiled is None:
        state.limit_attention(patience)
    while not (on_step is not None and on_step(state, steps)):
        if steps == state.max_steps or watch.look().all():
            break
        step(state)
        steps += 1
        if steps % INTERVAL == 0:
            state.adapt()
        if compiled is None and steps % patience == 0:
            state.limit_attention(patience)
    state.check()
    return state
