"""From the published files of InfinityStar (https://github.com/FoundationVision/InfinityStar)."""

import re
from pathlib import Path

import torch

from ...convert.checkpoint import OriginalTensors, with_plain_layers
from .transformer_infinitystar import InfinityStarTransformer
from .vq_infinitystar import InfinityStarVideoTokenizer


# Ours and the original's, replaced from top to bottom.
TRANSFORMER_NAMES = (
    ("null_embedding", "cfg_uncond"),
    ("text_projection.", "text_proj."),
    ("input_projection.", "word_embed."),
    ("coarse_head.", "semantic_head2."),
    ("output_norm.", "norm_hidden_sates."),
    ("attention_norm.", "input_layernorm."),
    ("feed_forward_norm.", "post_attention_layernorm."),
    (".attention.out_proj.", ".attn.o_proj."),
    (".attention.", ".attn."),
    (".feed_forward.", ".mlp."),
)
# Patterns of ours and the original's names, replaced from top to bottom.
TOKENIZER_NAMES = (
    (r"\.mid\.", ".mid_block."),
    (r"^encoder\.levels\.", "encoder.down_blocks."),
    (r"^decoder\.levels\.", "decoder.up_blocks."),
    (r"\.res\.", ".resnets."),
    # The original wraps every convolution in a module of its own.
    (r"\.(conv\w*)\.(weight|bias)$", r".\1.conv.\2"),
    (r"^encoder(.*)\.resample\.", r"encoder\1.downsamplers.0.conv."),
    (r"^decoder(.*)\.resample\.", r"decoder\1.upsamplers.0.conv."),
    (r"\.norm\.weight$", ".norm.gamma"),
    (r"\.scale\.(weight|bias)$", r".conv_y.conv.\1"),
    (r"\.shift\.(weight|bias)$", r".conv_b.conv.\1"),
    (r"(norm1|norm2|norm_out)\.norm\.gamma$", r"\1.norm_layer.gamma"),
    (r"(norm1|norm2|norm_out)\.weight$", r"\1.gamma"),
    (r"^scale$", "scale_learnable_parameters"),
)


def infinitystar_tokenizer_from_original(
    state: dict[str, torch.Tensor], *, source: str | Path = "the tokenizer's file"
) -> InfinityStarVideoTokenizer:
    """The video tokenizer whose tensors are `state`, in float32 and in evaluation mode.

    Args:
        state: tensors by their original names, see `load_original`.
        source: what errors call the file.

    Raises:
        CheckpointError: if a tensor is missing, unknown or of an unexpected shape.
    """
    state = OriginalTensors(state, "InfinityStar tokenizer", source)
    levels = range(state.count("encoder.down_blocks."))
    widths = [state.shape(f"encoder.down_blocks.{level}.resnets.0.conv1.conv.weight", 5)[0] for level in levels]
    latent_channels = state.shape("decoder.conv_in.conv.weight", 5)[1]
    with torch.device("meta"):
        vq = InfinityStarVideoTokenizer(tuple(widths), state.count("encoder.down_blocks.0.resnets."), latent_channels)
    # One entry per quantiser of the original's training; the first serves.
    state.shape("scale_learnable_parameters", 1)
    state["scale_learnable_parameters"] = state["scale_learnable_parameters"][0]
    for key in state:
        if key.endswith(".gamma"):
            state[key] = state[key].flatten()
    ignored = r"proj_(down|up)_two\..*|quantizer?\.lfq_(semantic|detail)\.mask"
    return state.fill(vq, _tokenizer_name, dtype=torch.float32, ignored=ignored)


def _tokenizer_name(name: str) -> str:
    for ours, original in TOKENIZER_NAMES:
        name = re.sub(ours, original, name)
    return name


def infinitystar_transformer_from_original(
    state: dict[str, torch.Tensor],
    *,
    dtype: torch.dtype | None = None,
    source: str | Path = "the transformer's file",
) -> InfinityStarTransformer:
    """The transformer whose tensors are `state`, in evaluation mode.

    Args:
        state: tensors by their original names, see `load_original`.
        dtype: of the weights; by default that of the head.
        source: what errors call the file.

    Raises:
        CheckpointError: if a tensor is missing, unknown or of an unexpected shape.
    """
    state = OriginalTensors(with_plain_layers(state), "InfinityStar transformer", source)
    num_text_tokens, caption_dim = state.shape("cfg_uncond")
    hidden_size, latent_channels = state.shape("word_embed.weight")
    head_dim = state.shape("blocks.0.attn.q_norm.weight", 1)[0]
    num_layers = state.count("blocks.")
    with torch.device("meta"):
        transformer = InfinityStarTransformer(
            caption_dim=caption_dim,
            num_text_tokens=num_text_tokens,
            latent_channels=latent_channels,
            bits=tuple(state.shape(f"{name}.weight")[0] // 2 for name in ("semantic_head2", "head")),
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_attention_heads=hidden_size // head_dim,
            num_key_value_heads=state.shape("blocks.0.attn.k_proj.weight")[0] // head_dim,
            intermediate_size=state.shape("blocks.0.mlp.gate_proj.weight")[0],
        )
    for layer in range(num_layers):
        attention = f"blocks.{layer}.attn"
        keys = [f"{attention}.{name}_proj.weight" for name in "qkv"]
        for key in keys:
            state.shape(key)
        state[f"{attention}.qkv_proj.weight"] = torch.cat([state.pop(key) for key in keys])
    dtype = dtype or state["head.weight"].dtype
    return state.fill(transformer, TRANSFORMER_NAMES, dtype=dtype, ignored="sos_token")
