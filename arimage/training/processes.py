"""Processes that train together, started by `torchrun`: each takes batches of its own, and the gradients are
averaged."""

import os
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import reduce
from torch import distributed


def processes() -> tuple[int, int]:
    """The number of this process and how many train together (`torchrun`)."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def first_of_machine() -> bool:
    """Whether this process is the only one, or of those that train together the first one on its machine."""
    return processes()[1] == 1 or int(os.environ.get("LOCAL_RANK", 0)) == 0


def join_processes() -> None:
    """Let the processes that `torchrun` started train together."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        # Without `cpu`, on a machine without a GPU, each process would count as the only one.
        PartialState(cpu=not torch.cuda.is_available())


def batch_generator(seed: int, step: int) -> torch.Generator:
    """The random numbers of a step's batch, which differ between processes that train together."""
    rank, count = processes()
    return torch.Generator().manual_seed(seed * 1_000_003 + step * count + rank)


def wait_for_all() -> None:
    """Wait until every process that trains together is here."""
    if processes()[1] > 1:
        distributed.barrier()


@torch.no_grad()
def average(tensors: list[torch.Tensor]) -> None:
    """Replace tensors by their averages over the processes that train together."""
    if processes()[1] > 1:
        for tensor in tensors:
            tensor.copy_(reduce(tensor, "mean"))


def any_process(flag: bool) -> bool:
    """Whether `flag` is true in one of the processes that train together."""
    if processes()[1] == 1:
        return flag
    found: Any = reduce(torch.tensor(float(flag), device=PartialState().device), "sum")
    return bool(found > 0)
