"""Encoding and decoding of single images with Emu3's video tokenizer."""

import torch
import torch.nn.functional as F
from transformers import Emu3VQVAE


def encode_latents(vq: Emu3VQVAE, pixels: torch.Tensor) -> torch.Tensor:
    """The latents [B, D, h, w] of images [B, 3, H, W] in [-1, 1] that `vq.encode` quantises."""
    frames = pixels[:, None].repeat(1, vq.config.temporal_downsample_factor, 1, 1, 1)
    hidden = vq.encoder(frames.to(vq.dtype)).permute(0, 2, 1, 3, 4)
    return vq.quant_conv(hidden)[:, :, 0]


def decode_image(vq: Emu3VQVAE, tokens: torch.LongTensor) -> torch.Tensor:
    """Pixels [B, 3, H, W], nominally in [-1, 1], of tokens [B, h, w]: the first frame of `vq.decode`, at a quarter of
    its work.

    A token of this video tokenizer stands for four frames. An image is the first of them. The convolutions in time do
    not see later frames, and all other layers work frame by frame, so the other frames need not be computed.
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
