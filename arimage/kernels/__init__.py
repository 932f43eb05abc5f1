"""Kernels: one folder per operation, with a reference in torch and an implementation in Triton. Inference only."""

from importlib.util import find_spec

import torch


_TRITON = find_spec("triton") is not None


def runs_triton(tensor: torch.Tensor) -> bool:
    """Whether an operation on this tensor runs its Triton implementation: on a GPU, if Triton is installed."""
    return tensor.is_cuda and _TRITON
