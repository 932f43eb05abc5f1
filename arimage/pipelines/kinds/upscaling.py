"""What pipelines with an upscaler share: two sizes of images, both from the same tokens."""

import torch
import torch.nn.functional as F

from ...tokenizers.upscaler import ImageUpscaler
from ..call import GenerationCall
from .class_or_text import ClassOrTextPipeline


class UpscalingPipeline(ClassOrTextPipeline):
    """Base of pipelines with the component `vq` and the optional component `upscaler`: images are upscaled unless
    a call asks for the size that the image tokenizer decodes. Unless a family says otherwise, they have one grid of
    tokens."""

    # Not all families have the component.
    upscaler: ImageUpscaler | None = None

    @property
    def decoded_size(self) -> tuple[int, int]:
        """Height and width in pixels of the images that the image tokenizer decodes."""
        return (self.transformer.config.grid_size * self.vq.scale_factor,) * 2

    @property
    def image_sizes(self) -> list[tuple[int, int]]:
        height, width = self.decoded_size
        if self.upscaler is None:
            return [(height, width)]
        scale = self.upscaler.config.scale
        return [(height * scale, width * scale), (height, width)]

    def num_tokens(self, size: tuple[int, int]) -> int:
        return self.transformer.config.grid_size**2

    def upscaled(self, call: GenerationCall, pixels: torch.Tensor) -> torch.Tensor:
        """Decoded pixels [B, 3, h, w] at the size of the call; one image or one tile at a time where the image
        tokenizer works so."""
        if self.upscaler is None or call.size == self.decoded_size:
            return pixels
        factor, scale = self.vq.scale_factor, self.upscaler.config.scale
        pixels = pixels.to(self.upscaler.dtype)
        return self.vq.in_tiles(self.upscaler.upscale, pixels, before=factor, after=factor * scale)

    def to_decoded_size(self, pixels: torch.Tensor) -> torch.Tensor:
        """Given images [B, 3, H, W] at the size that the image tokenizer encodes: upscaled ones are averaged."""
        if self.upscaler is None or tuple(pixels.shape[-2:]) != self.image_sizes[0]:
            return pixels
        return F.avg_pool2d(pixels, self.upscaler.config.scale)

    def encode_image(self, pixels: torch.Tensor) -> torch.LongTensor:
        """The tokens [B, h, w] of images [B, 3, H, W] in [-1, 1]."""
        return self.vq.encode(self.to_decoded_size(pixels).to(self.vq.dtype))

    @torch.no_grad()
    def decode_tokens(self, call: GenerationCall, tokens: torch.LongTensor) -> torch.Tensor:
        """Pixels [B, 3, H, W], nominally in [-1, 1], of the tokens [B, N] of a call, drafts included; -1 is not known
        yet."""
        tokens = tokens.to(self._execution_device).clamp(min=0)
        return self.upscaled(call, self.vq.decode(self.whole_tokens(call, tokens)))
