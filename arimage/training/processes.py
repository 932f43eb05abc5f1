"""Processes that train together, started by `torchrun`: each takes batches of its own, and the gradients are
averaged."""

import os
from collections.abc import Sequence
from datetime import timedelta
from statistics import fmean

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather_object
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
        # Without `cpu`, on a machine without a GPU, each process would count as the only one. The others wait for the
        # reports of the first one, which may take long; `torchrun` ends them if one fails.
        PartialState(cpu=not torch.cuda.is_available(), timeout=timedelta(days=1))


def batch_generator(seed: int, step: int) -> torch.Generator:
    """The random numbers of a step's batch, which differ between processes that train together."""
    rank, count = processes()
    return torch.Generator().manual_seed(seed * 1_000_003 + step * count + rank)


def mixed_seed(*numbers: int) -> int:
    """A seed that follows from some numbers, unlike those of `batch_generator` and of other numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])


def seed_networks(seed: int, step: int) -> None:
    """Seed what has no generator of its own, such as dropout, for a step: otherwise in every step, every process that
    trains together and every run of another seed."""
    # Trailing zeros change nothing.
    torch.manual_seed(mixed_seed(seed, step, 1 + processes()[0]))


def wait_for_all() -> None:
    """Wait until every process that trains together is here."""
    if processes()[1] > 1:
        distributed.barrier()


def mean_of(figures: Sequence[dict[str, torch.Tensor]]) -> dict[str, float]:
    """The mean of each figure over the parts of a step that have it, of all processes that train together."""
    found = [{name: float(value) for name, value in one.items()} for one in figures]
    if processes()[1] > 1:
        found = gather_object(found)
    names = dict.fromkeys(name for one in found for name in one)
    return {name: fmean(one[name] for one in found if name in one) for name in names}
