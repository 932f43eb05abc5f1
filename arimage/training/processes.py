"""Processes that train together, started by `torchrun`: each takes batches of its own, and the gradients are
averaged."""

import os

import torch
from torch import distributed


def processes() -> tuple[int, int]:
    """The number of this process and how many train together (`torchrun`)."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def join_processes() -> None:
    """Let the processes that `torchrun` started train together."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not distributed.is_initialized():
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        distributed.init_process_group()


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
    count = processes()[1]
    if count > 1:
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        distributed.all_reduce(flat)
        parts = (flat / count).split([tensor.numel() for tensor in tensors])
        torch._foreach_copy_(tensors, [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)])


def any_process(flag: bool) -> bool:
    """Whether `flag` is true in one of the processes that train together."""
    if processes()[1] == 1:
        return flag
    flags = torch.tensor(float(flag))
    distributed.all_reduce(flags)
    return bool(flags > 0)
