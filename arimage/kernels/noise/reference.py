"""The definition of the random numbers, in torch."""

import torch


_MASK = 0xFFFFFFFF


def philox(counter: list[torch.Tensor], key: list[torch.Tensor]) -> torch.Tensor:
    """Four 32-bit words [..., 4] for a counter of four and a key of two tensors of 32-bit words, all int64."""
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


def _words(seeds, positions, steps, purpose, count) -> torch.LongTensor:
    """Words [B, Q, count]."""
    seeds = seeds[:, None, None]
    blocks = torch.arange((count + 3) // 4, device=seeds.device)
    counter = [positions[..., None] & _MASK, steps[:, None, None], torch.full_like(blocks, purpose), blocks]
    return philox(counter, [seeds & _MASK, seeds >> 32 & _MASK]).flatten(-2)[..., :count]


def uniforms(
    seeds: torch.LongTensor, positions: torch.LongTensor, steps: torch.LongTensor, purpose: int, count: int
) -> torch.FloatTensor:
    return (_words(seeds, positions, steps, purpose, count) >> 8).float() * 2.0**-24


def exponentials(
    seeds: torch.LongTensor, positions: torch.LongTensor, steps: torch.LongTensor, purpose: int, count: int
) -> torch.FloatTensor:
    uniform = (_words(seeds, positions, steps, purpose, count).float() + 0.5) * 2.0**-32
    return -torch.log1p(-uniform.clamp(max=1 - 2.0**-24))
