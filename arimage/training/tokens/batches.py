"""Batches of a token cache, prepared in processes of their own while a step is computed."""

import signal
import threading
import traceback
import weakref
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from ..processes import mixed_seed, processes
from .cache import TokenCache
from .heldout import Part


# What says that a process has ended, where there is such a signal.
CHILDREN = [signal.SIGCHLD] if hasattr(signal, "SIGCHLD") else []
# How long a process goes on after SIGTERM.
SECONDS = 20
# Batches that each process prepares ahead.
AHEAD = 4


class TokenBatch(NamedTuple):
    """Tokens [B, ...] with the captions of their images, or the ids of their classes in digits, and which images are
    learned without them, bool [B]."""

    tokens: torch.Tensor
    captions: list[str]
    dropped: torch.BoolTensor


class TokenBatches(Dataset):
    """The batch of every step: each image once per epoch in a new order, in a random view. A batch depends on nothing
    but the step, and processes that train together take parts of the one that a single process would take."""

    def __init__(
        self, cache: TokenCache | Part, batch_size: int, dropout: float, seed: int, primary_share: float = 0.5
    ):
        self.cache, self.batch_size, self.dropout, self.seed = cache, batch_size, dropout, seed
        self.primary_share = primary_share
        self.rank, self.count = processes()
        self.epochs = Epochs(len(cache), seed)

    def __getitem__(self, step: int) -> TokenBatch:
        every = self.batch_size * self.count
        part = slice(self.rank * self.batch_size, (self.rank + 1) * self.batch_size)
        images = self.epochs.images(range(step * every, (step + 1) * every)[part])
        generator = torch.Generator().manual_seed(mixed_seed(self.seed, step))
        views = torch.randint(self.cache.views, (every,), generator=generator)[part]
        dropped = torch.rand(every, generator=generator)[part] < self.dropout
        primary, variants = torch.rand(2, every, generator=generator)[:, part]
        variants = variants.masked_fill(primary < self.primary_share, 0)
        return TokenBatch(*self.cache.read(images, views.tolist(), variants.tolist()), dropped)

    def from_step(self, start: int, steps: int, workers: int) -> Iterator[TokenBatch]:
        """The batches from the step `start` on, prepared by `workers` processes, or by this one if 0."""
        return Prepared(self, range(start, steps), workers)


class Epochs:
    """The order in which the images of a data set are learned: each once per epoch, in a new order, which takes four
    bytes of memory per image, or eight where there are over 2**31."""

    def __init__(self, count: int, seed: int):
        self.count, self.seed = count, seed
        self._order: tuple[int, torch.Tensor] | None = None

    def images(self, places: range) -> list[int]:
        """The images at some places of the order, counted through all epochs."""
        found: list[int] = []
        while places:
            epoch, first = divmod(places.start, self.count)
            found += self._epoch(epoch)[first : first + len(places)].tolist()
            places = places[self.count - first :]
        return found

    def _epoch(self, epoch: int) -> torch.Tensor:
        if self._order is None or self._order[0] != epoch:
            generator = torch.Generator().manual_seed(self.seed + epoch * 7919)
            kind = torch.int32 if self.count <= 2**31 else torch.int64
            self._order = epoch, torch.randperm(self.count, generator=generator).to(kind)
        return self._order[1]


class Prepared(Iterator):
    """The batches of some steps, prepared by `workers` processes, or by this one if 0. The processes end with it, so
    `batches` must not refer to it.

    Raises:
        ChildProcessError: for a batch, if one of the processes has ended.
    """

    def __init__(self, batches: Dataset, steps: range, workers: int):
        loader = DataLoader(
            batches,
            batch_size=None,
            sampler=steps,
            num_workers=workers,
            prefetch_factor=AHEAD if workers else None,
            # Of its own, so that the random numbers of a step do not depend on where a run was resumed.
            generator=torch.Generator(),
            worker_init_fn=_leave_signals,
        )
        handlers = {number: signal.getsignal(number) for number in CHILDREN}
        self._batches = [iter(loader)]
        # The loader looks whether its processes live. Its handler would raise in the middle of a step.
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)
        # Garbage collection would close the queues of the processes before it tells them to end: each would wait for
        # five seconds.
        weakref.finalize(self, self._batches.clear)

    def __next__(self):
        try:
            return next(self._batches[0])
        # The last two where it was ended while its tensors are handed over.
        except (RuntimeError, EOFError, ConnectionError) as error:
            if isinstance(error, RuntimeError) and not str(error).startswith("DataLoader worker"):
                raise
            # The frames of the loader would keep the other processes until this one ends.
            self._batches.clear()
            traceback.clear_frames(error.__traceback__)
            raise ChildProcessError(
                "a process that prepares batches was ended, as a rule since there was no memory left: run the command "
                "again, which resumes the run, with fewer workers"
            ) from error


def _leave_signals(worker: int) -> None:
    """Leave Ctrl-C and SIGTERM, which a terminal, systemd or Slurm send to all processes, to the one that trains: it
    ends the others after the step in hand."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "alarm"):
        # It ends this process where nothing else does.
        signal.signal(signal.SIGTERM, lambda *_: signal.alarm(SECONDS))
