"""Random numbers that are keyed by where they are used, so that an image never depends on the rest of its batch."""

from enum import IntEnum

import torch

from ...kernels.noise import exponentials, normals, uniforms


__all__ = ["Purpose", "exponentials", "normals", "random_orders", "uniforms"]


class Purpose(IntEnum):
    """What a random number is used for: numbers of different purposes are independent."""

    SAMPLE = 0
    VERIFY = 1
    REFRESH = 2
    START = 3
    GUMBEL = 4
    SIBLING = 5
    ORDER = 6
    NOISE = 7
    DENOISE = 8
    CANDIDATE = 9
    LATENTS = 10


def random_orders(seeds: torch.LongTensor, count: int) -> torch.LongTensor:
    """A random order of `count` positions per image, int64 [B, count]."""
    positions = torch.arange(count, device=seeds.device).expand(len(seeds), -1)
    return uniforms(seeds, positions, None, Purpose.ORDER, 1)[..., 0].argsort(dim=1, stable=True)
