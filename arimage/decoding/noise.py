"""Random numbers as a function of where they are used, so that an image never depends on its neighbours in a batch."""

from enum import IntEnum

import torch


class Purpose(IntEnum):
    """What a number is for: numbers of different purposes are independent."""

    SAMPLE = 0
    VERIFY = 1
    REFRESH = 2
    START = 3
    GUMBEL = 4
    SIBLING = 5


_MASK = 0xFFFFFFFF


def _philox(counter: list[torch.Tensor], key: list[torch.Tensor]) -> torch.Tensor:
    """Philox4x32-10 (Salmon et al. 2011): 32-bit words in int64 tensors; returns [..., 4]."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            (product1 >> 32 & _MASK) ^ c1 ^ k0,
            product1 & _MASK,
            (product0 >> 32 & _MASK) ^ c3 ^ k1,
            product0 & _MASK,
        )
        k0, k1 = k0 + 0x9E3779B9 & _MASK, k1 + 0xBB67AE85 & _MASK
    return torch.stack(torch.broadcast_tensors(c0, c1, c2, c3), dim=-1)


def _words(
    seeds: torch.LongTensor, positions: torch.LongTensor, purpose: Purpose, step: int | torch.LongTensor, count: int
) -> torch.LongTensor:
    seeds = seeds[:, None, None]
    if isinstance(step, torch.Tensor):
        step = step[:, None, None]
    blocks = torch.arange((count + 3) // 4, device=seeds.device)
    zero = torch.zeros_like(blocks)
    counter = [positions[..., None] & _MASK, zero + step, zero + int(purpose), blocks]
    return _philox(counter, [seeds & _MASK, seeds >> 32 & _MASK]).flatten(-2)[..., :count]


def uniforms(
    seeds: torch.LongTensor, positions: torch.LongTensor, purpose: Purpose, step: int | torch.LongTensor, count: int
) -> torch.FloatTensor:
    """Uniform numbers [B, Q, count] in [0, 1), float32, for seeds [B] and positions [B, Q] >= 0 at step `step`, one for all
    images or one per image [B]."""
    return (_words(seeds, positions, purpose, step, count) >> 8).float() * 2.0**-24


def exponentials(
    seeds: torch.LongTensor, positions: torch.LongTensor, purpose: Purpose, step: int | torch.LongTensor, count: int
) -> torch.FloatTensor:
    """Exponential numbers [B, Q, count], float32, positive and finite; the arguments are those of `uniforms`.

    They resolve 2 ** -33, so that in a race of p / e tokens far rarer than float32's 2 ** -24 can win as well.
    """
    uniform = (_words(seeds, positions, purpose, step, count).float() + 0.5) * 2.0**-32
    return -torch.log1p(-uniform.clamp(max=1 - 2.0**-24))
