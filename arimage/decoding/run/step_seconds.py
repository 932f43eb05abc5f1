"""The duration of a step at each window size: measured once per device and network, and stored on disk."""

import json
import logging
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ..contract.models import TokenModel


logger = logging.getLogger(__name__)

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
# Larger windows are not measured once a step takes longer than size ** this times a step of one token: no known model
# decides as many tokens per step.
_MOST = 0.8
_REPEATS = 4

_known: WeakKeyDictionary[object, dict] = WeakKeyDictionary()


def step_seconds(
    model: TokenModel, batch_size: int, guided: bool, how: str, start: Callable[[], Callable[[int], None]]
) -> dict[int, float]:
    """Seconds per step at each of `SIZES` that fits the image and may be worthwhile, measured once.

    They are stored in `table_path()` by device, network, dtype, tokens per image, batch size, guidance and `how`; for
    a network without parameters they are kept in memory, as long as the network exists.

    Args:
        how: how steps are compiled; "" if they are not.
        start: returns a function that takes a step with a window of the given size.
    """
    known = _known.setdefault(model.network, {})
    key = f"{batch_size} images of {model.num_tokens} tokens{', guided' if guided else ''}{how and f', {how}'}"
    if key not in known:
        network = _describe(model)
        table = {} if network is None else _read()
        # JSON keys are strings.
        if network is None or key not in table.get(network, {}):
            known[key] = _measure(model, start())
            if network is not None:
                table.setdefault(network, {})[key] = known[key]
                _write(table)
        else:
            known[key] = {int(size): seconds for size, seconds in table[network][key].items()}
    return known[key]


def table_path() -> Path:
    """`arimage/step_seconds.json` in the Hugging Face cache (`HF_HOME`)."""
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    return Path(os.environ.get("HF_HOME", f"{cache}/huggingface")).expanduser() / "arimage" / "step_seconds.json"


def _describe(model: TokenModel) -> str | None:
    """A description of device and network, used as a key; None for a network without parameters."""
    network: Any = model.network
    if not isinstance(network, nn.Module):
        return None
    parameters = list(network.parameters())
    count = sum(parameter.numel() for parameter in parameters)
    device = f"{device_name(model.device)}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    return f"{device}: {type(network).__name__}, {count} parameters, {parameters[0].dtype}"


def device_name(device: torch.device) -> str:
    """The product name of the GPU or CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        fields = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
        name = next((value.strip() for key, _, value in fields if key.strip() == "model name"), name)
    return name


def _read() -> dict:
    try:
        return json.loads(table_path().read_text())
    # A file that cannot be read is replaced; `_write` warns if that fails too.
    except (OSError, ValueError):
        return {}


def _write(table: dict) -> None:
    path = table_path()
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(table, indent=1))
        part.replace(path)
    except OSError as error:
        logger.warning("%s cannot be written (%s): step times are measured again next time", path, error)


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
