"""The discrete video tokenizers of Cosmos (https://arxiv.org/abs/2501.03575): causal convolutions, and finite scalar
quantisation (https://arxiv.org/abs/2309.15505) in place of a learned codebook."""

import math
from typing import Annotated

import torch
import torch.nn.functional as F
from diffusers import ConfigMixin
from diffusers.configuration_utils import register_to_config
from diffusers.models.autoencoders.autoencoder_kl_cosmos import (
    CosmosCausalAttention,
    CosmosCausalConv3d,
    CosmosConvProjection3d,
    CosmosDecoder3d,
    CosmosEncoder3d,
    CosmosResnetBlock3d,
    CosmosUpsample3d,
)
from diffusers.utils.accelerate_utils import apply_forward_hook
from pydantic import Field
from torch import nn

from ...models.layers import refine_norms
from ...models.mixin import ModelMixin
from ...settings.schema import Count, Layers, Side, Width, Widths, checked
from ...tokenizers.tiling import TilingMixin, check_sides


# A channel of one value would say nothing.
Level = Annotated[int, Field(strict=True, ge=2, le=2**16)]


class FiniteScalarQuantizer(nn.Module):
    """Rounds every channel to one of a few levels. A code is the number of a combination of levels, the first channel
    varying fastest."""

    def __init__(self, levels: tuple[int, ...]):
        super().__init__()
        self.codebook_size = math.prod(levels)
        sizes = torch.tensor(levels)
        basis = torch.cat([torch.ones(1, dtype=torch.long), sizes.cumprod(0)[:-1]])
        self.register_buffer("levels", sizes, persistent=False)
        self.register_buffer("basis", basis, persistent=False)

    def encode(self, latents: torch.Tensor) -> torch.LongTensor:
        """Codes [...] of latents [..., D], computed in float32. Latents may have any magnitude."""
        levels, basis = self._on(latents.device)
        half = (levels - 1).float() * 1.001 / 2
        offset = (levels % 2 == 0).float() / 2
        bounded = (latents.float() + (offset / half).atanh()).tanh() * half - offset
        return ((bounded.round().long() + levels // 2) * basis).sum(-1)

    def decode(self, codes: torch.LongTensor) -> torch.Tensor:
        """The vectors [..., D] of codes [...], float32 in [-1, 1]."""
        levels, basis = self._on(codes.device)
        return (codes[..., None] // basis % levels - levels // 2) / (levels // 2).float()

    def _on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Levels and basis. Hooks that bring offloaded weights see `forward` alone."""
        return self.levels.to(device), self.basis.to(device)


class _Encoder(CosmosEncoder3d):
    """In half precision on a CPU it computes in float32, because PyTorch has no other `avg_pool3d` there."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        dtype = hidden_states.dtype
        if hidden_states.device.type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
            return super().forward(hidden_states)
        tensors = {name: tensor.float() for name, tensor in (*self.named_parameters(), *self.named_buffers())}
        return torch.func.functional_call(self, tensors, hidden_states.float()).to(dtype)


class CosmosVideoTokenizer(TilingMixin, ModelMixin, ConfigMixin):
    """Encodes videos to token maps and decodes them. The defaults are the published DV8x16x16.

    A video of 1 + k * f frames, f = `temporal_compression_ratio`, becomes 1 + k maps: the first map is the first frame
    alone, and each other map is the next f frames. A single image is a video of one frame. Both directions are causal:
    encoding the first frames gives the first maps of the whole video, and decoding the first maps gives its first
    frames.

    Args:
        encoder_block_out_channels (`tuple[int, ...]`), decoder_block_out_channels (`tuple[int, ...]`): widths of the
            first convolution and of the resolution levels, from pixels to latents.
        latent_channels (`int`): channels between the convolutions and the projection to the levels.
        num_layers (`int`): residual blocks per level in the encoder; the decoder has one more.
        attention_resolutions (`tuple[int, ...]`), resolution (`int`): the sizes of the levels with attention, for a
            video of `resolution` pixels.
        patch_size (`int`): side of the wavelet patches.
        spatial_compression_ratio (`int`), temporal_compression_ratio (`int`): pixels per token along each side, and
            frames per map.
        levels (`tuple[int, ...]`): how many values each channel of a token may have; 64,000 tokens by default.
    """

    _no_split_modules = ["CosmosResnetBlock3d", "CosmosCausalAttention"]
    use_framewise_decoding = False

    @register_to_config
    @checked
    def __init__(
        self,
        encoder_block_out_channels: Widths = (128, 256, 512, 512),
        decoder_block_out_channels: Widths = (256, 512, 512, 512),
        latent_channels: Width = 16,
        num_layers: Layers = 2,
        attention_resolutions: Widths = (32,),
        resolution: Count = 1024,
        patch_size: Side = 4,
        spatial_compression_ratio: Side = 16,
        temporal_compression_ratio: Side = 8,
        levels: Annotated[tuple[Level, ...], Field(min_length=1, max_length=20)] = (8, 8, 8, 5, 5, 5),
    ):
        super().__init__()
        shared = {
            "num_resnet_blocks": num_layers,
            "attention_resolutions": tuple(attention_resolutions),
            "resolution": resolution,
            "patch_size": patch_size,
            "spatial_compression_ratio": spatial_compression_ratio,
            "temporal_compression_ratio": temporal_compression_ratio,
        }
        self.encoder = _Encoder(
            out_channels=latent_channels, block_out_channels=tuple(encoder_block_out_channels), **shared
        )
        self.quant_conv = nn.Conv3d(latent_channels, len(levels), 1)
        self.quantizer = FiniteScalarQuantizer(tuple(levels))
        self.post_quant_conv = nn.Conv3d(len(levels), latent_channels, 1)
        self.decoder = CosmosDecoder3d(
            in_channels=latent_channels, block_out_channels=tuple(decoder_block_out_channels), **shared
        )
        refine_norms(self)

    @property
    def scale_factor(self) -> int:
        """Pixels per token along each side."""
        return self.config.spatial_compression_ratio

    @property
    def codebook_size(self) -> int:
        """How many tokens there are."""
        return self.quantizer.codebook_size

    def num_maps(self, frames: int) -> int:
        """How many maps a video of `frames` frames has.

        Raises:
            ValueError: if it is not 1 more than a multiple of `temporal_compression_ratio`.
        """
        factor = self.config.temporal_compression_ratio
        if frames < 1 or frames % factor != 1 % factor:
            raise ValueError(f"{frames} frames do not fit this tokenizer: give 1, {factor + 1}, {2 * factor + 1}, ...")
        return (frames - 1) // factor + 1

    def num_frames(self, maps: int) -> int:
        """How many frames `maps` maps have."""
        return (maps - 1) * self.config.temporal_compression_ratio + 1

    @apply_forward_hook
    def encode(self, video: torch.Tensor) -> torch.LongTensor:
        """Tokens [B, t, h, w] of videos [B, 3, T, H, W] in [-1, 1], with T = 1 + (t - 1) * f and H and W multiples of
        `scale_factor`.

        In bfloat16, which the authors use, tokens next to a rounding boundary differ from those in float32.

        Raises:
            ValueError: if the number of frames, the height or the width does not fit.
        """
        self.num_maps(video.shape[2])
        check_sides(video, self.scale_factor, "frames")
        encoded = self.encoded(self.encoder, video)
        return self.quantizer.encode(self.quant_conv(encoded).movedim(1, -1))

    def code_vectors(self) -> torch.Tensor:
        """The vectors of all tokens [V, len(levels)], float32."""
        return self.quantizer.decode(torch.arange(self.codebook_size, device=self.quantizer.levels.device))

    def lookup(self, codes: torch.LongTensor) -> torch.Tensor:
        """The decoder's inputs [B, latent_channels, t, h, w] for tokens [B, t, h, w]."""
        return self.post_quant_conv(self.quantizer.decode(codes).movedim(-1, 1).to(self.dtype))

    def enable_framewise_decoding(self) -> None:
        """Decode one map after the other, in the memory of one map. The frames are the same up to rounding (1e-5)."""
        self.use_framewise_decoding = True

    def disable_framewise_decoding(self) -> None:
        """Decode all maps at once."""
        self.use_framewise_decoding = False

    @apply_forward_hook
    def decode(self, codes: torch.LongTensor) -> torch.Tensor:
        """Videos [B, 3, 1 + (t - 1) * f, h * s, w * s] of tokens [B, t, h, w], nominally in [-1, 1], not clamped."""
        network = self._decode_framewise if self.use_framewise_decoding else self.decoder
        return self.in_tiles(network, self.lookup(codes), before=1, after=self.scale_factor)

    def _decode_framewise(self, latents: torch.Tensor) -> torch.Tensor:
        stream = self.stream()
        return torch.cat([stream.decode_latents(part) for part in latents.split(1, dim=2)], dim=2)

    def stream(self) -> "CosmosFrameStream":
        """A decoder for maps that are generated one after another, see `CosmosFrameStream`."""
        return CosmosFrameStream(self)


class CosmosFrameStream:
    """Decodes maps to frames as soon as they are generated. The frames equal those of `decode` for the whole video up
    to rounding, since no frame depends on later maps. It keeps the activations that the next maps need."""

    def __init__(self, vq: CosmosVideoTokenizer):
        self._vq, self._decoder = vq, vq.decoder
        # The last inputs of the layers that look back.
        self._past: dict[nn.Module, torch.Tensor] = {}

    @torch.no_grad()
    def decode(self, codes: torch.LongTensor) -> torch.Tensor:
        """The frames [B, 3, T, h * s, w * s] of the next t >= 1 maps [B, t, h, w] of the same B videos. T = t * f,
        where the first map of a video counts as one frame."""
        return self.decode_latents(self._vq.lookup(codes))

    def decode_latents(self, latents: torch.Tensor) -> torch.Tensor:
        """The frames of the next latents [B, C, t, h, w]."""
        decoder, middle = self._decoder, self._decoder.mid_block
        begins = not self._past
        hidden = self._residual(middle.resnets[0], self._project(decoder.conv_in, latents))
        for attention, over_time, resnet in zip(
            middle.attentions, middle.temp_attentions, middle.resnets[1:], strict=True
        ):
            hidden = self._residual(resnet, self._attend(over_time, attention(hidden)))
        for block in decoder.up_blocks:
            for resnet, attention, over_time in zip(
                block.resnets, block.attentions, block.temp_attentions, strict=True
            ):
                hidden = self._residual(resnet, hidden)
                if attention is not None:
                    hidden = self._attend(over_time, attention(hidden))
            for upsampler in block.upsamplers or ():
                hidden = self._upsample(upsampler, hidden, begins)
        hidden = self._project(decoder.conv_out, F.silu(decoder.norm_out(hidden)))
        if begins:
            return decoder.unpatch_embed(hidden)
        # The first of its latents becomes one frame.
        return decoder.unpatch_embed(torch.cat([hidden[:, :, :1], hidden], dim=2))[:, :, 1:]

    def _convolve(self, conv: CosmosCausalConv3d, hidden: torch.Tensor) -> torch.Tensor:
        count = conv.temporal_pad
        if count == 0:
            return conv(hidden)
        past = self._past.get(conv)
        if past is None:
            past = hidden[:, :, :1].expand(-1, -1, count, -1, -1)
        hidden = torch.cat([past, hidden], dim=2)
        # A view would keep all frames.
        self._past[conv] = hidden[:, :, -count:].clone()
        return conv(hidden)[:, :, count:]

    def _project(self, projection: CosmosConvProjection3d, hidden: torch.Tensor) -> torch.Tensor:
        return self._convolve(projection.conv_t, self._convolve(projection.conv_s, hidden))

    def _residual(self, block: CosmosResnetBlock3d, hidden: torch.Tensor) -> torch.Tensor:
        inner = self._project(block.conv1, F.silu(block.norm1(hidden)))
        return block.conv_shortcut(hidden) + self._project(block.conv2, F.silu(block.norm2(inner)))

    def _attend(self, attention: CosmosCausalAttention, hidden: torch.Tensor) -> torch.Tensor:
        count = hidden.shape[2]
        if attention in self._past:
            hidden = torch.cat([self._past[attention], hidden], dim=2)
        self._past[attention] = hidden
        length = hidden.shape[2]
        mask = torch.ones(length, length, dtype=torch.bool, device=hidden.device).tril()
        return attention(hidden, mask)[:, :, -count:]

    def _upsample(self, upsampler: CosmosUpsample3d, hidden: torch.Tensor, begins: bool) -> torch.Tensor:
        if upsampler.temporal_upsample:
            hidden = hidden.repeat_interleave(2, dim=2)[:, :, int(begins) :]
            hidden = self._convolve(upsampler.conv1, hidden) + hidden
        if upsampler.spatial_upsample:
            hidden = hidden.repeat_interleave(2, dim=3).repeat_interleave(2, dim=4)
            hidden = upsampler.conv2(hidden) + hidden
        return upsampler.conv3(hidden)
