"""Calls the Triton implementations of the kernels, on a GPU or, in a process of its own, by Triton's interpreter.

Triton decides whether kernels are interpreted when they are imported: hence the process.
"""

import importlib
import io
import os
import pickle
import subprocess
import sys
from functools import partial
from unittest.mock import patch

import torch
from torch.utils._pytree import tree_map_only

from arimage.kernels.operation import DEVICES


GUARD = 128


def _poison(tensor):
    if tensor.dtype == torch.bool:
        return tensor.fill_(True)
    return tensor.fill_(torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)


def _guarded(tensor, device):
    """The values of `tensor` on `device`, in the middle of memory that nobody may read where it is contiguous."""
    if not tensor.is_contiguous():
        return tensor.to(device)
    buffer = _poison(torch.empty(tensor.numel() + 2 * GUARD, dtype=tensor.dtype, device=device))
    inside = buffer[GUARD:-GUARD].view(tensor.shape)
    inside.copy_(tensor)
    return inside


def call(operation, function, arguments, device, compiled=False, written=()):
    """The results of a Triton implementation, as a tuple on the CPU, and after them the arguments at the places
    `written`. Memory it allocates holds NaN, or the largest integer, until it is written."""
    function = getattr(importlib.import_module(f"arimage.kernels.{operation}"), function)
    if compiled:
        function = torch.compile(function, backend="aot_eager", fullgraph=True)
    arguments = tree_map_only(torch.Tensor, partial(_guarded, device=device), list(arguments))
    empty, empty_like = torch.empty, torch.empty_like
    with (
        torch.no_grad(),
        patch.object(torch, "empty", lambda *a, **k: _poison(empty(*a, **k))),
        patch.object(torch, "empty_like", lambda *a, **k: _poison(empty_like(*a, **k))),
    ):
        outcome = function(*arguments)
    outcome = outcome if isinstance(outcome, tuple) else () if outcome is None else (outcome,)
    return tuple(t.cpu() for t in (*outcome, *(arguments[place] for place in written)))


class Interpreter:
    """A process that answers `call`."""

    def __enter__(self):
        environment = os.environ | {"TRITON_INTERPRET": "1"}
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        return self

    def call(self, operation, function, arguments, compiled=False, written=()):
        # Pickles have no float8.
        request = io.BytesIO()
        torch.save((operation, function, arguments, "cpu", compiled, written), request)
        pickle.dump(request.getvalue(), self.process.stdin)
        self.process.stdin.flush()
        outcome = pickle.load(self.process.stdout)
        if isinstance(outcome, str):
            raise RuntimeError(outcome)
        return outcome

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.wait()


def _answer():
    torch.set_num_threads(1)
    DEVICES.add("cpu")
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what others print goes elsewhere
    while requests.peek(1):
        try:
            outcome = call(*torch.load(io.BytesIO(pickle.load(requests)), weights_only=False))
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"
        pickle.dump(outcome, answers)
        answers.flush()


if __name__ == "__main__":
    _answer()
