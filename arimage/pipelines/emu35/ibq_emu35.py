"""The image tokenizer of Emu3.5: index backpropagation quantisation, IBQ (https://arxiv.org/abs/2412.02692)."""

import functools
from typing import Any

import torch
from diffusers import VQModel

from ...models.layers import refine_norms
from ...models.mixin import ModelMixin
from ...tokenizers.tiling import TilingMixin


# Scores of 4096 positions against 131,072 vectors would take 2.1 GB.
POSITIONS = 256


class IBQModel(TilingMixin, ModelMixin, VQModel):
    """A `VQModel` whose codes are the vectors with the largest inner product, not the nearest ones.

    Encoder and codebook stay in float32 when the model is loaded in half precision, which would change one code in
    twelve. `encode` returns latents, as in `VQModel`; `encode_codes` and `decode_codes` are what pipelines call.
    """

    _keep_in_fp32_modules = ["encoder", "quant_conv", "quantize"]

    @functools.wraps(VQModel.__init__)
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        refine_norms(self)

    @property
    def scale_factor(self) -> int:
        """Pixels per token along each side."""
        return 2 ** (len(self.config.block_out_channels) - 1)

    def codebook(self, device: torch.device) -> torch.Tensor:
        """The vectors of all codes [V, D]. Where weights are offloaded, only a call brings them."""
        return self.quantize.embedding(torch.arange(self.config.num_vq_embeddings, device=device))

    def encode_codes(self, pixels: torch.Tensor) -> torch.LongTensor:
        """The codes [B, h, w] of images [B, 3, H, W] in [-1, 1]."""
        pixels = pixels.to(self.encoder.conv_in.weight.dtype)
        latents = self.encoded(lambda images: self.encode(images).latents, pixels)
        vectors = latents.permute(0, 2, 3, 1)
        parts = vectors.flatten(0, 2).float().split(POSITIONS)
        codebook = self.codebook(vectors.device).float().T
        return torch.cat([(part @ codebook).argmax(-1) for part in parts]).view(vectors.shape[:3])

    def decode_codes(self, codes: torch.LongTensor) -> torch.Tensor:
        """Pixels [B, 3, H, W], nominally in [-1, 1], of codes [B, h, w]."""
        return self.in_tiles(self._decode_codes, codes, before=1, after=self.scale_factor)

    def _decode_codes(self, codes: torch.LongTensor) -> torch.Tensor:
        vectors = self.quantize.embedding(codes).permute(0, 3, 1, 2)
        return self.decode(vectors.to(self.post_quant_conv.weight.dtype), force_not_quantize=True).sample
