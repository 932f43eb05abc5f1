"""Which images of a token cache are held out of a training: no step sees them, nor another row of the same picture."""

import hashlib
import logging
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from .cache import TokenCache


# The most images that are held out.
HELD_OUT = 512
# The squared distance of two roundings of one picture is less than this share of its square.
NEAR = 1e-5
# Rows whose fingerprints are computed at a time.
CHUNK = 1024

logger = logging.getLogger(__name__)


class Part:
    """Some images of a cache, by their numbers in ascending order, or with `without` all others; read like a cache."""

    def __init__(self, cache: TokenCache, numbers: np.ndarray, *, without: bool = False):
        self.cache, self.numbers, self.without = cache, numbers, without
        self.index, self.views = cache.index, cache.views
        # How many of the others come before each of these.
        self._before = numbers - np.arange(len(numbers))
        about = f"{cache.digest} {without}".encode() + numbers.astype("<i8").tobytes()
        self.digest = hashlib.sha256(about).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self.cache) - len(self.numbers) if self.without else len(self.numbers)

    def read(
        self, images: list[int], views: list[int], variants: list[float] | None = None
    ) -> tuple[torch.Tensor, list[str]]:
        """`TokenCache.read`."""
        places = np.array(images, dtype=np.int64)
        if self.without:
            numbers = places + np.searchsorted(self._before, places, side="right")
        else:
            numbers = self.numbers[places]
        return self.cache.read(numbers.tolist(), views, variants)


def hold_out(cache: TokenCache) -> tuple[TokenCache | Part, Part | None]:
    """The images of a cache to train on, and those that are held out: a tenth of its pictures, at most `HELD_OUT`, or
    None of fewer than ten. They are always the same ones, and mostly so after the cache has grown. Each class keeps a
    picture to train on."""
    marks = _fingerprints(cache)
    order = np.argsort(marks, kind="stable")
    bounds = np.concatenate([[0], np.flatnonzero(np.diff(marks[order]) != 0) + 1, [len(order)]])
    count, labels = min(HELD_OUT, (len(bounds) - 1) // 10), cache.labels if cache.index.labelled else None
    left = None if labels is None else np.bincount(labels)
    held: list[np.ndarray] = []
    for start, end in pairwise(bounds):
        rows = order[start:end]
        if len(held) == count:
            break
        if labels is not None and left is not None:
            of, counts = np.unique(labels[rows], return_counts=True)
            if (left[of] <= counts).any():
                continue
            left[of] -= counts
        held.append(rows)
    if not held:
        return cache, None
    every, kept = np.concatenate(held), Part(cache, np.sort([rows[0] for rows in held]))
    return Part(cache, np.union1d(every, _copies(cache, kept)), without=True), kept


def apart(cache: TokenCache, heldout: Sequence[TokenCache]) -> TokenCache | Part:
    """The images of a cache to train on: those that are in none of `heldout` too."""
    marks, every = _fingerprints(cache), np.empty(0, np.int64)
    for held in heldout:
        found = np.union1d(np.flatnonzero(np.isin(marks, _fingerprints(held))), _copies(cache, held))
        if len(found):
            logger.warning(
                f"{len(found)} of {len(cache)} images of {cache.folder} are in {held.folder} too: not trained"
            )
        every = np.union1d(every, found)
    if len(every) == len(cache):
        folders = " and ".join(str(held.folder) for held in heldout)
        raise ValueError(
            f"all images of {cache.folder} are in {folders} too: give others as --heldout, or leave it out"
        )
    return Part(cache, every, without=True) if len(every) else cache


def reported(heldout: TokenCache | Part, most: int = HELD_OUT) -> torch.Tensor:
    """The numbers of the images that reports are on: all, or `most` at equal distances, since classes may come one
    after the other."""
    return torch.linspace(0, len(heldout) - 1, min(len(heldout), most)).long()


def _copies(cache: TokenCache, heldout: TokenCache | Part) -> np.ndarray:
    """The images whose continuous tokens are nearly those of one that reports are on: in another batch the same
    picture is rounded otherwise. None of images whose tokens are whole numbers."""
    numbers = reported(heldout).tolist()
    of = heldout.read(numbers, [0] * len(numbers))[0].flatten(1)
    found, before = [np.empty(0, np.int64)], 0
    for shard in cache.shards() if of.is_floating_point() else ():
        for rows in torch.from_numpy(shard.tokens[:, 0]).flatten(1).split(CHUNK):
            tokens = rows.float()
            squares = tokens.square().sum(1)[:, None] + of.square().sum(1) - 2 * tokens @ of.T
            found.append(before + (squares < NEAR * of.square().sum(1)).any(1).nonzero()[:, 0].numpy())
            before += len(rows)
    return np.concatenate(found)


def _fingerprints(cache: TokenCache) -> np.ndarray:
    """A number uint64 for each image, which follows from the tokens of its first view: equal where these are."""
    factors = np.random.default_rng(0).integers(2**63, size=int(np.prod(cache.index.shape)), dtype=np.uint64) * 2 + 1
    found = []
    for shard in cache.shards():
        for start in range(0, len(shard.tokens), CHUNK):
            tokens = shard.tokens[start : start + CHUNK, 0]
            tokens = tokens.view(np.uint16) if tokens.dtype == np.float16 else tokens
            sums = (tokens.reshape(len(tokens), -1).astype(np.uint64) * factors).sum(1)
            # Sums of few tokens are not spread evenly.
            found.append((sums ^ (sums >> np.uint64(32))) * np.uint64(0x9E3779B97F4A7C15))
    return np.concatenate(found)
