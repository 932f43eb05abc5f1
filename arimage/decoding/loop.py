"""The loop that runs a decoding until every image is finished."""

from collections.abc import Callable

import torch

from .distribution import Sampling
from .interface import Decoding, ScaleModel, TokenModel
from .presets import check_kind
from .state import DecodingState


def decode(
    model: TokenModel | ScaleModel,
    decoding: Decoding,
    sampling: Sampling,
    seeds: torch.LongTensor,
    on_step: Callable[[DecodingState], bool] | None = None,
) -> DecodingState:
    """Run `decoding` until every image is finished, or until `on_step`, called after every pass, returns True.

    `seeds` is int64 [B] on the model's device; an image depends on its own seed only, up to the rounding of differently
    shaped matrix products.

    Raises:
        ValueError: if `decoding` is for the other kind of model.
    """
    check_kind(model, decoding)
    # On an accelerator, asking whether the images are finished waits for it.
    patience = 1 if model.device.type == "cpu" else 8
    state = decoding.start(model, sampling, seeds)
    while True:
        if on_step is not None and on_step(state):
            return state
        if state.forward_passes == state.max_passes:
            return state
        if state.forward_passes % patience == 0 and bool(state.finished.all()):
            return state
        state = decoding.step(state)
