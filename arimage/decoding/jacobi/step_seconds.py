"""The duration of a step at each window size: measured once per device and network, and stored on disk."""

import time
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ...kernels.timings import describe_device, read_table, write_table
from ..contract.models import TokenModel


TABLE = "step_seconds"
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
# Larger windows are not measured once a step takes longer than size ** this times a step of one token: no known model
# decides as many tokens per step.
_MOST = 0.8
_REPEATS = 4

_measured: WeakKeyDictionary[object, dict] = WeakKeyDictionary()


def step_seconds(
    model: TokenModel, batch_size: int, guided: bool, how: str, start: Callable[[], Callable[[int], None]]
) -> dict[int, float]:
    """Seconds per step at each of `SIZES` that fits the image and may be worthwhile, measured once.

    They are stored in `arimage/step_seconds.json` in the Hugging Face cache, by device, network, dtype, tokens per
    image, batch size, guidance and `how`; for a network without parameters they are kept in memory, as long as the
    network exists.

    Args:
        how: how steps are compiled; "" if they are not.
        start: returns a function that takes a step with a window of the given size.
    """
    # It may have moved, or have another dtype, since it was measured.
    network = _describe(model)
    measured = _measured.setdefault(model.network, {}).setdefault(network, {})
    key = f"{batch_size} images of {model.num_tokens} tokens{', guided' if guided else ''}{how and f', {how}'}"
    if key not in measured:
        table = {} if network is None else read_table(TABLE)
        # JSON keys are strings.
        if network is None or key not in table.get(network, {}):
            measured[key] = _measure(model, start())
            if network is not None:
                table.setdefault(network, {})[key] = measured[key]
                write_table(TABLE, table)
        else:
            measured[key] = {int(size): seconds for size, seconds in table[network][key].items()}
    return measured[key]


def _describe(model: TokenModel) -> str | None:
    """A description of device and network, used as a key; None for a network without parameters."""
    network: Any = model.network
    if not isinstance(network, nn.Module):
        return None
    parameters = list(network.parameters())
    count = sum(parameter.numel() for parameter in parameters)
    return f"{describe_device(model.device)}: {type(network).__name__}, {count} parameters, {parameters[0].dtype}"


def _measure(model: TokenModel, step: Callable[[int], None]) -> dict[int, float]:
    seconds: dict[int, float] = {}
    for size in SIZES:
        if size > max(model.num_tokens - 1, 1):
            break
        # Compiled steps are captured and replayed within the repetitions.
        step(size)
        seconds[size] = min(_time(step, size, model.device) for _ in range(_REPEATS))
        if seconds[size] > seconds[1] * size**_MOST:
            break
    return seconds


def _time(step: Callable[[int], None], size: int, device: torch.device) -> float:
    def now() -> float:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return time.perf_counter()

    began = now()
    step(size)
    return now() - began
