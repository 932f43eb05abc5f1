"""From the published tensors of a VQGAN to diffusers' `VQModel`."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from diffusers import VQModel

from ..models.original_names import rename
from ..tokenizers.vq_llamagen import LlamaGenVQModel
from .checkpoint import NORM_NUM_GROUPS, OriginalTensors


Model = TypeVar("Model", bound=VQModel)
KIND = "VQGAN"
# diffusers' names and the original's, replaced from top to bottom.
DIFFUSERS_NAMES = (
    ("mid_block.resnets.0.", "mid.block_1."),
    ("mid_block.resnets.1.", "mid.block_2."),
    ("mid_block.attentions.0.", "mid.attn_1."),
    ("down_blocks.", "down."),
    (".resnets.", ".block."),
    (".attentions.", ".attn."),
    (".downsamplers.0.", ".downsample."),
    (".upsamplers.0.", ".upsample."),
    ("conv_shortcut.", "nin_shortcut."),
    ("conv_norm_out.", "norm_out."),
    (".group_norm.", ".norm."),
    (".spatial_norm.", ".norm."),
    (".to_q.", ".q."),
    (".to_k.", ".k."),
    (".to_v.", ".v."),
    (".to_out.0.", ".proj_out."),
)


def vqgan_names(names: Sequence[tuple[str, str]], levels: int) -> Callable[[str], str]:
    """A function from the names of one of our or diffusers' image tokenizers to the original's: `names`, replaced from
    top to bottom, and the levels of the decoder, which the original numbers from the finest."""

    def original_name(name: str) -> str:
        name = rename(name, names)
        decoder = r"^decoder\.(?:levels|up_blocks)\.(\d+)"
        name = re.sub(decoder, lambda match: f"decoder.up.{levels - 1 - int(match[1])}", name)
        return name.replace(".resample.", ".downsample." if name.startswith("encoder.") else ".upsample.")

    return original_name


def flatten_attention(state: OriginalTensors) -> None:
    """Make matrices of the 1x1 convolutions of attention, which are linear layers in diffusers."""
    for key in state:
        if re.search(r"\battn.*\.(q|k|v|proj_out)\.weight", key):
            state[key] = state[key].flatten(1)


def vq_model_from_original(
    state: dict[str, torch.Tensor], *, model: type[Model] = VQModel, source: str | Path = "the tokenizer's file"
) -> Model:
    """The image tokenizer of a VQGAN (https://arxiv.org/abs/2012.09841) or MoVQGAN (https://arxiv.org/abs/2209.09002)
    whose tensors are `state`, in float32 and in evaluation mode.

    Args:
        model: the class, `VQModel` or one derived from it.
    """
    state = OriginalTensors(state, KIND, source)
    codes, dimension = state.shape("quantize.embedding.weight")
    _, *widths = state.encoder_widths("encoder.down.", "block.0")
    levels = len(widths)
    with_attention = [any(key.startswith(f"encoder.down.{level}.attn.") for key in state) for level in range(levels)]
    with torch.device("meta"):
        vq = model(
            down_block_types=[
                "AttnDownEncoderBlock2D" if attends else "DownEncoderBlock2D" for attends in with_attention
            ],
            up_block_types=[
                "AttnUpDecoderBlock2D" if attends else "UpDecoderBlock2D" for attends in with_attention[::-1]
            ],
            block_out_channels=widths,
            layers_per_block=state.count("encoder.down.0.block."),
            latent_channels=state.shape("quant_conv.weight", 4)[1],
            vq_embed_dim=dimension,
            num_vq_embeddings=codes,
            norm_num_groups=NORM_NUM_GROUPS,
            norm_type="spatial" if "decoder.norm_out.conv_y.weight" in state else "group",
        )

    flatten_attention(state)
    names = vqgan_names(DIFFUSERS_NAMES, levels)
    return state.fill(vq, names, dtype=torch.float32, ignored=r"loss\..*|ema_.*")


# Ours and the original's, replaced from top to bottom.
LLAMAGEN_NAMES = (
    ("codebook.", "quantize.embedding."),
    (".levels.", ".conv_blocks."),
    (".shortcut.", ".nin_shortcut."),
    (".to_q.", ".q."),
    (".to_k.", ".k."),
    (".to_v.", ".v."),
    (".to_out.", ".proj_out."),
)


def llamagen_tokenizer_from_original(
    state: dict[str, torch.Tensor], *, source: str | Path = "the tokenizer's file"
) -> LlamaGenVQModel:
    """The visual tokenizer whose tensors are `state`, in float32 and in evaluation mode."""
    state = OriginalTensors(state, "LlamaGen tokenizer", source)
    codebook_size, codebook_dim = state.shape("quantize.embedding.weight")
    channels, *widths = state.encoder_widths("encoder.conv_blocks.", "res.0")
    with torch.device("meta"):
        vq = LlamaGenVQModel(
            channels=channels,
            channel_multipliers=tuple(width // channels for width in widths),
            layers_per_block=state.count("encoder.conv_blocks.0.res."),
            latent_channels=state.shape("encoder.conv_out.weight", 4)[0],
            codebook_size=codebook_size,
            codebook_dim=codebook_dim,
            norm_num_groups=NORM_NUM_GROUPS,
        )
    names = vqgan_names(LLAMAGEN_NAMES, len(widths))
    return state.fill(vq, names, dtype=torch.float32, ignored=r"quantize\.codebook_used")
