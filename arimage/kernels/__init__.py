"""Kernels: one folder per operation, with its definition in torch and its form in Triton. Inference only."""

from importlib.util import find_spec

import torch


_TRITON = find_spec("triton") is not None


def runs_triton(tensor: torch.Tensor) -> bool:
    """Whether an operation on this tensor takes its Triton form: on a GPU, where Triton is installed."""
    return tensor.is_cuda and _TRITON
