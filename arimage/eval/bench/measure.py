"""Chooses the decodings that run on a pipeline, and describes the machine that measures them."""

import copy
import platform
from typing import TypeVar

import torch

from ... import __version__
from ...decoding import Decoding, decoding_names
from ...decoding.presets import needs_of_preset
from ...kernels.timings import device_name
from ...pipelines.base import ARPipeline


P = TypeVar("P", bound=ARPipeline)


def choose_decodings(
    pipe: ARPipeline, condition: dict[str, list], texts: list[str], sampling: dict
) -> tuple[dict[str, Decoding], dict[str, str]]:
    """The decodings to measure, by the text that names each.

    Args:
        texts: decodings as `parse_decoding` reads them; if empty, every preset that runs on the model of `pipe`.

    Returns:
        The decodings, and the reason why each other preset was left out.
    """
    model = pipe.prepare(**take(condition, 0, 1), **sampling).model
    chosen, left_out = {}, {}
    for text in texts or decoding_names():
        decoding = pipe.as_decoding(text)
        reason = decoding.supports(model)
        if reason is None:
            chosen[text] = decoding
        elif texts:
            raise ValueError(f"{text}: {reason}")
        # Those of other kinds of model are expected.
        elif model.kind in needs_of_preset(text):
            left_out[text] = reason
    if not chosen:
        raise ValueError(f"no decoding runs on this model: {'; '.join(left_out.values())}")
    return chosen, left_out


def quiet(pipe: P) -> P:
    """A copy of a pipeline, with the same components, that shows no progress and does not warn of unknown captions."""
    pipe = copy.copy(pipe)
    pipe.set_progress_bar_config(disable=True)
    pipe.known_captions = None
    return pipe


def machine(device: torch.device) -> dict:
    """The hardware and software that figures were measured on."""
    return {
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "arimage": __version__,
    }


def take(condition: dict[str, list], start: int, count: int) -> dict[str, list]:
    """`count` values of the condition from the `start`-th on, cycling through them."""
    return {name: [values[i % len(values)] for i in range(start, start + count)] for name, values in condition.items()}
