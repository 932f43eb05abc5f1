"""From the published files of InfinityStar (https://github.com/FoundationVision/InfinityStar) to an
`InfinityStarPipeline`."""

import re
from pathlib import Path
from typing import Any

import torch

from ...convert.checkpoint import WRAPPINGS, OriginalTensors, load_original, pipeline_of, save_whole, with_plain_layers
from ...convert.folder import damaged_files, load_original_folder, load_t5_encoder
from ...convert.paths import CheckpointError, check_vacant
from .pipeline_infinitystar import InfinityStarPipeline
from .schedules import PixelClass, repetitions_of
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


def convert_infinitystar(
    transformer: str | Path,
    vae: str | Path,
    *,
    text_encoder: str | Path | None = None,
    pixels: PixelClass = "0.40M",
    subfolder: str | None = None,
    semantic_scales: int | None = None,
    image_scale_repetition: tuple[int, ...] | None = None,
    video_scale_repetition: tuple[int, ...] | None = None,
    out: str | Path | None = None,
    dtype: torch.dtype | None = None,
) -> InfinityStarPipeline:
    """The pipeline of published files, with the published sampling defaults.

    Args:
        transformer: a folder of safetensors such as `infinitystar_8b_480p_weights`, or a trainer's checkpoint.
        vae: the file of the video tokenizer, `infinitystar_videovae.pth`.
        text_encoder: a local folder with flan-t5-xl and its tokenizer. Without it the pipeline takes `prompt_embeds`.
        pixels: the pixel class of the training videos: "0.40M" for 480p, "0.90M" for 720p.
        subfolder: the folder with the weights inside of the folder `transformer`.
        semantic_scales, image_scale_repetition, video_scale_repetition: how many grids have few bits, and how many
            passes there are over each grid of the first frame and of a clip; by default those of the published model
            of the pixel class.
        out: a new or empty folder to save the pipeline to. It appears when all of it is written, or not at all.
        dtype: of the transformer's weights, by default that of the file, float32. bfloat16 halves their memory.

    Raises:
        CheckpointError: if a file cannot be read or does not fit the other, or `out` is taken.
    """
    check_vacant(out)
    source = Path(transformer) / (subfolder or "")
    trained = {
        "pixels": pixels,
        "semantic_scales": semantic_scales,
        "image_scale_repetition": image_scale_repetition,
        "video_scale_repetition": video_scale_repetition,
    }
    try:
        repetitions_of(**trained)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    if source.is_dir():
        state = load_original_folder(source)
    else:
        state = load_original(source, (*WRAPPINGS, "trainer", "gpt_fsdp"))
    model = infinitystar_transformer_from_original(state, dtype=dtype, source=source, **trained)
    vq = infinitystar_tokenizer_from_original(load_original(vae, ("vae", *WRAPPINGS)), source=vae)
    width = model.config.caption_dim
    text = (None, None) if text_encoder is None else load_t5_encoder(Path(text_encoder), width, source)
    pipeline = pipeline_of(InfinityStarPipeline, f"{source} with {vae}", model, vq, *text)
    save_whole(pipeline.save_pretrained, out)
    return pipeline


def infinitystar_tokenizer_from_original(
    state: dict[str, torch.Tensor], *, source: str | Path = "the tokenizer's file"
) -> InfinityStarVideoTokenizer:
    """The video tokenizer whose tensors are `state`, in float32 and in evaluation mode."""
    state = OriginalTensors(state, "InfinityStar tokenizer", source)
    levels = range(state.count("encoder.down_blocks."))
    widths = [state.shape(f"encoder.down_blocks.{level}.resnets.0.conv1.conv.weight", 5)[0] for level in levels]
    latent_channels = state.shape("decoder.conv_in.conv.weight", 5)[1]
    with damaged_files(source), torch.device("meta"):
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
    **trained: Any,
) -> InfinityStarTransformer:
    """The transformer whose tensors are `state`, in evaluation mode.

    Args:
        trained: what the tensors do not show, see `convert_infinitystar`.
        dtype: of the weights; by default that of the head.
    """
    state = OriginalTensors(with_plain_layers(state), "InfinityStar transformer", source)
    # As trainers call the head of few bits.
    for part in ("weight", "bias"):
        if f"semantic_head.{part}" in state:
            state[f"semantic_head2.{part}"] = state.pop(f"semantic_head.{part}")
    num_text_tokens, caption_dim = state.shape("cfg_uncond")
    hidden_size, latent_channels = state.shape("word_embed.weight")
    head_dim = state.shape("blocks.0.attn.q_norm.weight", 1)[0]
    num_layers = state.count("blocks.")
    with damaged_files(source), torch.device("meta"):
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
            **trained,
        )
    for layer in range(num_layers):
        attention = f"blocks.{layer}.attn"
        keys = [f"{attention}.{name}_proj.weight" for name in "qkv"]
        for key in keys:
            state.shape(key)
        state[f"{attention}.qkv_proj.weight"] = torch.cat([state.pop(key) for key in keys])
    dtype = dtype or state["head.weight"].dtype
    return state.fill(transformer, TRANSFORMER_NAMES, dtype=dtype, ignored="sos_token")
