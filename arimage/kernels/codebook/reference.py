"""The definition of the nearest code and of the lookup, in torch."""

import torch
import torch.nn.functional as F


# Scores held at a time: 64 MiB in float32.
_SCORES = 1 << 24


def nearest_code(latents: torch.Tensor, codebook: torch.Tensor) -> torch.LongTensor:
    codebook = codebook.float()
    # |l - c|^2 is smallest where l c - |c|^2 / 2 is largest.
    offset = codebook.pow(2).sum(-1) / 2
    chunks = latents.float().split(max(1, _SCORES // len(codebook)))
    return torch.cat([(chunk @ codebook.T - offset).argmax(-1) for chunk in chunks])


def lookup(codes: torch.LongTensor, table: torch.Tensor) -> torch.Tensor:
    return F.embedding(codes, table).permute(0, 3, 1, 2).contiguous()
