"""Orders in which an any-order model learns the tokens of images."""

from dataclasses import dataclass
from functools import cache

import torch

from ..decoding import order_of
from ..settings.schema import Share, Whole


# Farthest orders to choose from, and the numbers that they have together at most. To find one takes a step per place.
FARTHEST_ORDERS, MOST = 4096, 2**20


@dataclass(frozen=True)
class Orders:
    """Each image has an order of its own: raster for `raster_share` of them, farthest for `farthest_share`, and random
    for the others. `first_places` random places are also predicted as if they were the first of an order: the
    condition alone decides them, and with them what the image is of."""

    raster_share: Share = 0.0
    farthest_share: Share = 0.0
    first_places: Whole = 0

    def __post_init__(self):
        if self.raster_share + self.farthest_share > 1:
            raise ValueError("raster_share and farthest_share are more than 1 together: give less")

    def sample(self, count: int, side: int, generator: torch.Generator) -> torch.LongTensor:
        """The places by rank [B, N] of `count` images of `side` tokens along each side."""
        share = torch.rand(count, 1, generator=generator)
        order = torch.rand(count, side * side, generator=generator).argsort(1)
        if self.farthest_share:
            farthest = _farthest(side)
            chosen = torch.randint(len(farthest), (count,), generator=generator)
            order = torch.where(share < self.farthest_share, farthest[chosen], order)
        return torch.where(share > 1 - self.raster_share, torch.arange(side * side), order)


@cache
def _farthest(side: int) -> torch.LongTensor:
    """Farthest orders [M, N]."""
    found = order_of("farthest", (side, side), torch.arange(max(1, min(FARTHEST_ORDERS, MOST // side**2))))
    assert found is not None
    return found
