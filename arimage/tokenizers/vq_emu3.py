"""Encoding and decoding of single images by Emu3's image tokenizer, which is one of videos."""

import torch
import torch.nn.functional as F
from transformers import Emu3VQVAE


def encode_latents(vq: Emu3VQVAE, pixels: torch.Tensor) -> torch.Tensor:
    """What `vq.encode` quantises of images [B, 3, H, W] in [-1, 1], by `vq.quantize(latents[:, None])[:, 0]`: [B, D, h, w]."""
    frames = pixels[:, None].repeat(1, vq.config.temporal_downsample_factor, 1, 1, 1)
    hidden = vq.encoder(frames.to(vq.dtype)).permute(0, 2, 1, 3, 4)
    return vq.quant_conv(hidden)[:, :, 0]


def decode_image(vq: Emu3VQVAE, tokens: torch.LongTensor) -> torch.Tensor:
    """Pixels [B, 3, H, W], nominally in [-1, 1], of tokens [B, h, w]: what `vq.decode` returns, for a quarter of its work.

    The tokenizer is one of videos, whose tokens are four frames each. Its convolutions in time do not see later frames, and
    everything else works frame by frame, so the image, which is the first frame, needs none of the others.
    """
    decoder = vq.decoder
    vectors = vq.quantize.embedding(tokens).permute(0, 3, 1, 2)[:, :, None]
    frames = torch.cat([vq.post_quant_conv(vectors), vectors])
    for layer in decoder.time_res_stack:
        frames = layer(frames)
    for layer in decoder.time_conv:
        frames = F.silu(layer(frames))
    hidden, vectors = frames[:, :, 0].chunk(2)
    hidden = decoder.middle_block(decoder.conv_in(hidden), vectors)
    hidden = decoder.norm_out(decoder.up_block(hidden, vectors), vectors)
    return decoder.conv_out(F.silu(hidden))
