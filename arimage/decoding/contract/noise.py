"""Counter-based random numbers, keyed by where they are used, so that an image never depends on the rest of its
batch."""

from enum import IntEnum

import torch

from ...kernels import noise


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


def uniforms(
    seeds: torch.LongTensor,
    positions: torch.LongTensor,
    purpose: Purpose,
    steps: torch.LongTensor | None,
    count: int,
) -> torch.FloatTensor:
    """Uniform numbers [B, Q, count] in [0, 1), float32, for seeds [B], positions [B, Q] and the steps [B] of the
    images; without steps (None) they are the same at every step."""
    return noise.uniforms(seeds, positions, steps, purpose, count)


def exponentials(
    seeds: torch.LongTensor,
    positions: torch.LongTensor,
    purpose: Purpose,
    steps: torch.LongTensor | None,
    count: int,
) -> torch.FloatTensor:
    """Exponential numbers [B, Q, count], float32, positive and finite; the arguments are those of `uniforms`."""
    return noise.exponentials(seeds, positions, steps, purpose, count)


def normals(
    seeds: torch.LongTensor,
    positions: torch.LongTensor,
    purpose: Purpose,
    steps: torch.LongTensor | None,
    count: int,
) -> torch.FloatTensor:
    """Standard normal numbers [B, Q, count], float32; the arguments are those of `uniforms`."""
    return noise.normals(seeds, positions, steps, purpose, count)


def random_orders(seeds: torch.LongTensor, count: int) -> torch.LongTensor:
    """A random order of `count` positions per image, int64 [B, count]."""
    positions = torch.arange(count, device=seeds.device).expand(len(seeds), -1)
    return uniforms(seeds, positions, Purpose.ORDER, None, 1)[..., 0].argsort(dim=1, stable=True)
