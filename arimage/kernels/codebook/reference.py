"""The definition of the nearest code, in torch."""

import torch


# Scores held at a time: 64 MiB in float32.
_SCORES = 1 << 24


def nearest_code(latents: torch.Tensor, codebook: torch.Tensor) -> torch.LongTensor:
    codebook = codebook.float()
    # |l - c|^2 is smallest where l c - |c|^2 / 2 is largest.
    offset = codebook.pow(2).sum(-1) / 2
    chunks = latents.float().split(max(1, _SCORES // len(codebook)))
    return torch.cat([(chunk @ codebook.T - offset).argmax(-1) for chunk in chunks])
