"""Orders in which the tokens of an image can be generated, by name."""

from collections.abc import Sequence

import torch

from .noise import Purpose, uniforms


def order_of(
    name: str,
    shape: tuple[int, int],
    seeds: torch.LongTensor,
    group_sizes: Sequence[int] = (),
    known: torch.BoolTensor | None = None,
) -> torch.LongTensor | None:
    """The place of each rank, int64 [B, N], one order for each of the `seeds` [B]; None for "raster".

    Args:
        name: "raster", row by row; "random"; "farthest", in which each token is as far as possible from all tokens
            before it; or "locality", the order of LPD (https://arxiv.org/abs/2507.01957): the tokens of a group are
            next to many tokens of earlier groups and far from each other.
        shape: (rows, columns).
        group_sizes: for "locality", the number of tokens of each group; they add up to N.
        known: bool [B, N] by place, known tokens, which "farthest" and "locality" put first and treat as generated.
    """
    if name == "raster":
        return None
    count = shape[0] * shape[1]
    noise = uniforms(seeds, torch.arange(count, device=seeds.device).expand(len(seeds), -1), Purpose.ORDER, None, 1)
    noise = noise[..., 0]
    if name == "random":
        return noise.argsort(dim=1)
    # In a single group no token has an earlier neighbour, so each is as far as possible from the others.
    sizes = [count] if name == "farthest" else group_sizes
    return _spread(shape, noise, sizes, torch.zeros_like(noise, dtype=torch.bool) if known is None else known)


def _spread(
    shape: tuple[int, int], noise: torch.FloatTensor, group_sizes: Sequence[int], known: torch.BoolTensor
) -> torch.LongTensor:
    """Choose each token so that it has as many decided neighbours as possible and is not close to another token of its
    group; where every place is close, it is as far as possible from its group. `noise` [B, N] in [0, 1) breaks ties.
    The `known` [B, N] tokens come first.

    A place depends on all places before it, so there is one step per rank, over all images and places at once."""
    rows, columns = shape
    # The distance at which two tokens of a group are too close, as published for grids of 16 and of 32.
    close, largest = max(rows // 8, 1), float(rows**2 + columns**2)
    place = torch.arange(rows * columns, device=noise.device)
    row, column = place // columns, place % columns
    down, right = (row - row[:, None]).abs(), (column - column[:, None]).abs()
    apart, squared = torch.maximum(down, right), (down**2 + right**2).float()
    # A neighbour along a row or column weighs 1, a diagonal one 1 / sqrt(2).
    weight = torch.where(apart == 1, squared.rsqrt(), 0.0)
    # Squared distances differ by 1 at least, and weights of neighbours by 0.12.
    preference = 0.5 * noise + 9 * largest * known.float()
    neighbours, picks = torch.zeros_like(noise), []
    for size in group_sizes:
        nearest = torch.full_like(noise, largest)
        crowded, free = largest * (2 + neighbours), neighbours >= 1
        for _ in range(size):
            score = torch.where(free, crowded, nearest) + preference
            pick = score.argmax(1)
            picks.append(pick)
            preference.scatter_(1, pick[:, None], -torch.inf)
            nearest = torch.minimum(nearest, squared[pick])
            free &= apart[pick] > close
            neighbours += weight[pick]
    return torch.stack(picks, dim=1)
