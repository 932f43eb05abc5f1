"""From the published files of Infinity (https://github.com/FoundationVision/Infinity) to an `InfinityPipeline`."""

import re
from pathlib import Path

import torch

from ...convert.checkpoint import (
    NORM_NUM_GROUPS,
    WRAPPINGS,
    OriginalTensors,
    load_original,
    save_whole,
    with_plain_layers,
)
from ...convert.folder import load_original_folder, load_t5_encoder
from ...convert.paths import CheckpointError, check_vacant
from ...convert.vqgan import vqgan_names
from .bsq_infinity import InfinityVQModel
from .pipeline_infinity import InfinityPipeline
from .schedules import PixelClass
from .transformer_infinity import InfinityTransformer


# Of the published notebooks. The 2B, which is 2048 wide, samples at temperature 0.5.
SAMPLING = {"guidance_scale": 3.0, "temperature": 1.0, "top_k": 0, "top_p": 0.97}
WIDTH_OF_2B, TEMPERATURE_OF_2B = 2048, 0.5
# Ours and the original's, replaced from top to bottom.
TRANSFORMER_NAMES = (
    ("null_embedding", "cfg_uncond"),
    ("text_pool.query", "text_proj_for_sos.ca.mat_q"),
    ("text_pool.", "text_proj_for_sos.ca."),
    ("text_fc1.", "text_proj_for_ca.0."),
    ("text_fc2.", "text_proj_for_ca.2."),
    ("start_position", "pos_start"),
    ("input_projection.", "word_embed."),
    ("level_embedding.", "lvl_embed."),
    ("shared_modulation.", "shared_ada_lin.1."),
    ("head_modulation.", "head_nm.ada_lin.1."),
    (".modulation.bias", ".ada_gss"),
    (".cross_attention.norm.", ".ca_norm."),
    (".cross_attention.q_proj.", ".ca.mat_q."),
    (".cross_attention.", ".ca."),
    (".attention.log_query_scale", ".sa.scale_mul_1H11"),
    (".attention.", ".sa."),
    (".feed_forward.", ".ffn."),
    (".qkv_proj.", ".mat_qkv."),
    (".kv_proj.", ".mat_kv."),
    (".out_proj.", ".proj."),
)
TOKENIZER_NAMES = (
    ("encoder.levels.", "encoder.down."),
    (".res.", ".block."),
    (".mid.0.", ".mid.block_1."),
    (".mid.2.", ".mid.block_2."),
    (".shortcut.", ".nin_shortcut."),
)
# The original wraps every convolution and norm in a module of its own.
_WRAPPED = re.compile(r"\.(conv_in|conv_out|conv\d?|nin_shortcut|norm\d|norm_out)\.(?:conv|norm)\.(weight|bias)$")


def infinity_transformer_from_original(
    state: dict[str, torch.Tensor],
    *,
    pixels: PixelClass = "1M",
    dtype: torch.dtype | None = None,
    source: str | Path = "the transformer's file",
) -> InfinityTransformer:
    """The transformer whose tensors are `state`, in evaluation mode.

    Args:
        pixels: the pixel class that it was trained at, which the tensors do not show.
        dtype: of the weights; by default that of the head.
    """
    state = OriginalTensors(with_plain_layers(state), "Infinity transformer", source)
    num_layers = state.count("blocks.")
    hidden_size, bits = state.shape("word_embed.weight")
    num_unconditional, caption_dim = state.shape("cfg_uncond")
    heads = state.shape("blocks.0.sa.scale_mul_1H11", 4).numel()
    state.check_heads(heads, hidden_size)
    pool = "text_proj_for_sos.ca"
    with torch.device("meta"):
        transformer = InfinityTransformer(
            caption_dim=caption_dim,
            num_text_tokens=num_unconditional,
            bits=bits,
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_attention_heads=heads,
            intermediate_size=state.shape("blocks.0.ffn.fc1.weight")[0],
            num_pool_heads=state.shape(f"{pool}.mat_q", 3)[1],
            num_levels=state.shape("lvl_embed.weight")[0],
            pixels=pixels,
        )

    def with_biases(module: str, weight: str, *parts: str | None) -> None:
        """Make one bias of the parts; None is the keys', which are zero."""
        biases = [state.pop(f"{module}.{part}") for part in parts if part and state.shape(f"{module}.{part}", 1)]
        zeros = torch.zeros_like(biases[0])
        state[f"{module}.{weight}.bias"] = torch.cat([zeros if part is None else biases.pop(0) for part in parts])

    def flatten(key: str, dimensions: int, start: int = 0) -> None:
        state.shape(key, dimensions)
        state[key] = state[key].flatten(0, start) if start else state[key].flatten()

    with_biases(pool, "mat_kv", None, "v_bias")
    flatten(f"{pool}.mat_q", 3, start=1)
    flatten("pos_start", 3)
    for layer in range(num_layers):
        block = f"blocks.{layer}"
        with_biases(f"{block}.sa", "mat_qkv", "q_bias", None, "v_bias")
        with_biases(f"{block}.ca", "mat_kv", None, "v_bias")
        flatten(f"{block}.sa.scale_mul_1H11", 4)
        flatten(f"{block}.ada_gss", 4)
    return state.fill(
        transformer,
        TRANSFORMER_NAMES,
        dtype=dtype or state["head.weight"].dtype,
        ignored=r".*\.zero_k_bias|lvl_1L|attn_bias_for_masking|Infinity_visible_kvlen|Infinity_invisible_qlen",
    )


def infinity_tokenizer_from_original(
    state: dict[str, torch.Tensor], *, patchify: bool, source: str | Path = "the tokenizer's file"
) -> InfinityVQModel:
    """The visual tokenizer whose tensors are `state`, in float32 and in evaluation mode.

    Args:
        patchify: whether the transformer sees 2 x 2 cells of the latents as one.
    """
    plain = {_WRAPPED.sub(r".\1.\2", key): value for key, value in state.items()}
    state = OriginalTensors(plain, "Infinity tokenizer", source)
    levels = state.count("encoder.down.")
    channels = state.shape("encoder.conv_in.weight", 4)[0]
    widths = [state.shape(f"encoder.down.{level}.block.0.conv1.weight", 4)[0] for level in range(levels)]
    groups = NORM_NUM_GROUPS if channels % NORM_NUM_GROUPS == 0 else 24
    if not widths or any(width % channels for width in widths) or channels % groups:
        raise CheckpointError(
            f"{source} has an encoder of widths {[channels, *widths]}, expected multiples of the first, itself a "
            f"multiple of {groups}: give the file of an unaltered tokenizer"
        )
    with torch.device("meta"):
        vq = InfinityVQModel(
            channels=channels,
            channel_multipliers=tuple(width // channels for width in widths),
            layers_per_block=state.count("encoder.down.0.block."),
            latent_channels=state.shape("encoder.conv_out.weight", 4)[0],
            patchify=patchify,
            norm_num_groups=groups,
        )

    names = vqgan_names(TOKENIZER_NAMES, levels)
    return state.fill(vq, names, dtype=torch.float32, ignored=r"quantizer?\.lfq\.mask")


def convert_infinity(
    transformer: str | Path,
    vae: str | Path,
    *,
    pixels: PixelClass = "1M",
    subfolder: str | None = None,
    text_encoder: str | Path | None = None,
    ema: bool = False,
    out: str | Path | None = None,
    dtype: torch.dtype | None = None,
) -> InfinityPipeline:
    """The pipeline of published files, with the published sampling defaults.

    Args:
        transformer: a file such as `infinity_2b_reg.pth`, a folder of safetensors such as `infinity_8b_weights`, or a
            trainer's `ar-ckpt-*.pth`.
        vae: the file of the image tokenizer. It must be the one that the transformer was trained with:
            `infinity_vae_d32reg.pth` for the 2B, `infinity_vae_d56_f8_14_patchify.pth` for the 8B,
            `infinity_vae_d16.pth` for the 125M. With another of the same shape the pictures are poor.
        pixels: the pixel class of the training images: "0.06M" for the 125M, "0.25M" for the 8B of 512 pixels.
        subfolder: the folder with the weights inside of the folder `transformer`.
        text_encoder: a local folder with flan-t5-xl and its tokenizer. Without it the pipeline takes `prompt_embeds`.
        ema: take the averaged weights (EMA) of a trainer's checkpoint.
        out: a new or empty folder to save the pipeline to. It appears when all of it is written, or not at all.
        dtype: of the transformer's weights, by default that of the file, float32. bfloat16 halves their memory.

    Raises:
        CheckpointError: if a file cannot be read or does not fit the other, or `out` is taken.
    """
    check_vacant(out)
    source = Path(transformer) / (subfolder or "")
    if source.is_dir():
        state = load_original_folder(source)
    else:
        state = load_original(source, (*WRAPPINGS, "trainer", "gpt_fsdp"), ema=ema)
    model = infinity_transformer_from_original(state, pixels=pixels, dtype=dtype, source=source)
    encoder = load_original(vae, ("vae", *WRAPPINGS))
    channels = {len(value) for key, value in encoder.items() if re.fullmatch(r"encoder\.conv_out\..*bias", key)}
    if not {model.config.bits, model.config.bits // 4} & channels:
        raise CheckpointError(
            f"{source} predicts {model.config.bits} bits per cell and {vae} has latents of {sorted(channels)} "
            "channels: give the tokenizer that this transformer was trained with"
        )
    vq = infinity_tokenizer_from_original(encoder, patchify=model.config.bits not in channels, source=vae)
    width = model.config.caption_dim
    text = (None, None) if text_encoder is None else load_t5_encoder(Path(text_encoder), width, source)
    pipeline = InfinityPipeline(model, vq, *text)
    pipeline.generation_config.update(SAMPLING)
    if model.config.hidden_size == WIDTH_OF_2B:
        pipeline.generation_config["temperature"] = TEMPERATURE_OF_2B
    save_whole(pipeline.save_pretrained, out)
    return pipeline
