"""Orders in which the tokens of an image can be generated, by name."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

from .noise import Purpose, uniforms


def order_of(
    name: str,
    shape: tuple[int, int],
    seeds: torch.LongTensor,
    group_sizes: Sequence[int] = (),
    given: torch.BoolTensor | None = None,
) -> torch.LongTensor | None:
    """The place of each rank, int64 [B, N], one order for each of the `seeds` [B]; None for "raster".

    Args:
        name: "raster", row by row; "random"; "farthest", in which each token is as far as possible from all tokens
            before it; or "locality", the order of LPD (https://arxiv.org/abs/2507.01957): the tokens of a group are
            next to many tokens of earlier groups and far from each other.
        shape: (rows, columns).
        group_sizes: for "locality", the number of tokens of each group; they add up to N.
        given: bool [B, N] by place, given tokens, which "farthest" and "locality" put first and treat as generated.
    """
    if name == "raster":
        return None
    count = shape[0] * shape[1]
    noise = uniforms(seeds, torch.arange(count, device=seeds.device).expand(len(seeds), -1), None, Purpose.ORDER, 1)
    noise = noise[..., 0]
    if name == "random":
        return noise.argsort(dim=1)
    # Squared distances differ by 1 at least, and weights of neighbours by 0.12.
    preference = 0.5 * noise
    if given is not None:
        preference = preference + 9 * _largest(shape) * given.float()
    # In a single group no token has an earlier neighbour, so each is as far as possible from the others.
    order = _spread(shape, preference.cpu().numpy(), [count] if name == "farthest" else group_sizes)
    return torch.from_numpy(order).to(seeds.device, non_blocking=True)


def _largest(shape: tuple[int, int]) -> float:
    """More than any squared distance."""
    return float(shape[0] ** 2 + shape[1] ** 2)


@lru_cache(maxsize=4)
def _tables(shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each pair of places [N, N]: the squared distance, whether they are far enough apart for one group, and how
    much they weigh as neighbours."""
    rows, columns = shape
    row, column = np.divmod(np.arange(rows * columns), columns)
    down, right = abs(row - row[:, None]), abs(column - column[:, None])
    apart, squared = np.maximum(down, right), (down**2 + right**2).astype(np.float32)
    # The distance at which two tokens of a group are too close, as published for grids of 16 and of 32.
    close = max(rows // 8, 1)
    # A neighbour along a row or column weighs 1, a diagonal one 1 / sqrt(2).
    weight = np.where(apart == 1, 1 / np.sqrt(np.maximum(squared, 1)), np.float32(0))
    return squared, apart > close, weight


def _spread(shape: tuple[int, int], preference: np.ndarray, group_sizes: Sequence[int]) -> np.ndarray:
    """Choose each token so that it has as many decided neighbours as possible and is not close to another token of its
    group; where every place is close, it is as far as possible from its group. The `preference` [B, N] of places
    breaks ties and puts given tokens first; it is overwritten. Returns the place of each rank, int64 [B, N].

    A place depends on all places before it, so there is one step per rank, over all images and places at once. On a
    device each would be several launches, so the host takes them."""
    squared, far, weight = _tables(shape)
    neighbours, images = np.zeros_like(preference), np.arange(len(preference))
    order, rank = np.empty((len(preference), sum(group_sizes)), np.int64), 0
    for size in group_sizes:
        nearest = np.full_like(preference, _largest(shape))
        crowded, free = _largest(shape) * (2 + neighbours), neighbours >= 1
        keeps_apart, end = free.any(), rank + size
        while rank < end:
            score = np.where(free, crowded, nearest) if keeps_apart else nearest
            pick = order[:, rank] = (score + preference).argmax(1)
            preference[images, pick] = -np.inf
            np.minimum(nearest, squared[pick], out=nearest)
            if keeps_apart:
                free &= far[pick]
            if end < order.shape[1]:
                neighbours += weight[pick]
            rank += 1
    return order
