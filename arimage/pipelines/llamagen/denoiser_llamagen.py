"""A denoiser for LlamaGen, with which the transformer reads drafts that are still noise, as in SJD2
(https://arxiv.org/abs/2510.08994)."""

import math

import torch
import torch.nn.functional as F
from diffusers import ConfigMixin
from diffusers.configuration_utils import register_to_config
from torch import nn

from ...models.layers import Linear
from ...models.mixin import ModelMixin
from ...settings.schema import Epsilon, Layers, Width, checked
from .transformer_llamagen import LlamaGenTransformer


# How many frequencies encode the noise level.
_WAVES = 4


class Adapter(nn.Module):
    """A low-rank branch next to a block, from the block's input to its output. It starts as zero."""

    def __init__(self, hidden_size: int, rank: int, eps: float):
        super().__init__()
        self.norm = nn.RMSNorm(hidden_size, eps)
        self.down_proj = Linear(hidden_size, rank, bias=False)
        self.up_proj = Linear(rank, hidden_size, bias=False)
        nn.init.zeros_(self.up_proj.weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.up_proj(F.silu(self.down_proj(self.norm(hidden))))


class LlamaGenDenoiser(ModelMixin, ConfigMixin):
    """Embeds noisy vectors for the transformer and adapts its blocks at their positions. Other positions are not
    changed.

    Args:
        codebook_dim (`int`): width of the vectors in the image tokenizer's codebook.
        hidden_size, num_layers (`int`): the transformer's.
        rank (`int`): width of the adapters.
    """

    @register_to_config
    @checked
    def __init__(
        self,
        codebook_dim: Width = 8,
        hidden_size: Width = 768,
        num_layers: Layers = 12,
        rank: Width = 64,
        norm_eps: Epsilon = 1e-5,
    ):
        super().__init__()
        self.vector_proj = Linear(codebook_dim + 2 * _WAVES, hidden_size, bias=False)
        self.out_proj = Linear(hidden_size, hidden_size)
        self.adapters = nn.ModuleList(Adapter(hidden_size, rank, norm_eps) for _ in range(num_layers))

    @classmethod
    def for_transformer(
        cls, transformer: LlamaGenTransformer, codebook_dim: int, rank: int = 64
    ) -> "LlamaGenDenoiser":
        """A denoiser to train."""
        names = ("hidden_size", "num_layers", "norm_eps")
        return cls(codebook_dim=codebook_dim, rank=rank, **{name: transformer.config[name] for name in names})

    def embed(self, vectors: torch.FloatTensor, noise: torch.FloatTensor) -> torch.Tensor:
        """Embeddings [B, Q, hidden_size] of vectors [B, Q, codebook_dim] whose noise levels are `noise` [B, Q] in (0,
        1]."""
        angles = math.pi * noise[..., None] * 2.0 ** torch.arange(_WAVES, device=noise.device, dtype=torch.float32)
        inputs = torch.cat([vectors, angles.cos(), angles.sin()], dim=-1).to(self.dtype)
        return self.out_proj(F.silu(self.vector_proj(inputs)))
