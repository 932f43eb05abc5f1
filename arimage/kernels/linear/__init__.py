"""Linear layers, which use oneDNN on CPUs where it is faster than PyTorch's default."""

import math
import threading
import time

import torch
import torch.nn.functional as F

from ..timings import describe_device, read_table, write_table


TABLE = "linear_seconds"
# With fewer multiplications the call itself takes longer.
_LEAST = 1 << 20
# Products of more rows are like those of so many.
_MOST_ROWS = 128
_REPEATS = 5

_lock = threading.Lock()
_known: dict[tuple[int, ...], bool] = {}


def _onednn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


_FORMS = {"default": F.linear, "oneDNN": _onednn}


def _prefers_onednn(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether oneDNN multiplies these float32 matrices faster than PyTorch's default (MKL on x86).

    Which one does depends on the processor, the shape and the rows: on an Intel processor with AMX, MKL took 0.26 ms
    for [2, 768] x [768, 2304] and oneDNN 0.45, and for 16 rows 1.28 and 0.80. So both are measured, once per shape,
    number of threads and power of two of rows (rounded up). The two round differently, so the times are stored in
    `table_path(TABLE)`: the same machine takes the same one again, for the same images.
    """
    rows = min(1 << (x.numel() // x.shape[-1] - 1).bit_length(), _MOST_ROWS)
    key = (rows, *weight.shape, torch.get_num_threads())
    if key not in _known:
        with _lock:
            if key not in _known:
                seconds = _stored_seconds(x.new_ones(rows, x.shape[-1]), weight)
                _known[key] = seconds["oneDNN"] < seconds["default"]
    return _known[key]


def _stored_seconds(x: torch.Tensor, weight: torch.Tensor) -> dict[str, float]:
    device, product = describe_device(x.device), f"{list(x.shape)} x {list(weight.T.shape)}"
    stored = read_table(TABLE).get(device, {})
    if product not in stored:
        measured = _measure(x, weight)
        # Another process may have stored its own meanwhile.
        table = read_table(TABLE)
        stored = table.setdefault(device, {})
        if product not in stored:
            stored[product] = measured
            write_table(TABLE, table)
    return stored[product]


def _measure(x: torch.Tensor, weight: torch.Tensor) -> dict[str, float]:
    """Seconds of each form, the least of several after a first call, in turns so that other work slows both."""
    seconds = dict.fromkeys(_FORMS, math.inf)
    for turn in range(1 + _REPEATS):
        for name, form in _FORMS.items():
            began = time.perf_counter()
            form(x, weight)
            if turn:
                seconds[name] = min(seconds[name], time.perf_counter() - began)
    return seconds


def _takes_onednn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    trained = x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    return (
        not torch.compiler.is_compiling()
        # Not fake and not quantised.
        and type(x) is torch.Tensor
        and type(weight) in (torch.Tensor, torch.nn.Parameter)
        and x.device.type == weight.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and x.numel() * len(weight) >= _LEAST
        and not (trained and torch.is_grad_enabled())
        and not torch.is_autocast_enabled("cpu")
        and torch.backends.mkldnn.is_available()
        and torch.backends.mkldnn.enabled
        and _prefers_onednn(x, weight)
    )


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`F.linear` of `x` [..., D] with `weight` [N, D] and `bias` [N]: [..., N]."""
    if _takes_onednn(x, weight, bias):
        return _onednn(x, weight, bias)
    return F.linear(x, weight, bias)
