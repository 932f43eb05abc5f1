"""From the published files of VAR (https://github.com/FoundationVision/VAR) to a `VARPipeline`."""

import math
import re
from pathlib import Path

import torch

from ...convert.checkpoint import NORM_NUM_GROUPS, WRAPPINGS, OriginalTensors, load_original, pipeline_of, save_whole
from ...convert.imagenet import class_names
from ...convert.paths import CheckpointError, check_vacant
from ...convert.vqgan import vqgan_names
from ...tokenizers.vq_var import VARVQModel
from .pipeline_var import VARPipeline
from .transformer_var import VARTransformer


# The published cfg is what the scale adds to 1.
VAR_SAMPLING = {"guidance_scale": 2.5, "temperature": 1.0, "top_k": 900, "top_p": 0.96}
# Ours and the original's, replaced from top to bottom.
TRANSFORMER_NAMES = (
    ("start_position", "pos_start"),
    ("position_embedding", "pos_1LC"),
    ("level_embedding.", "lvl_embed."),
    ("input_projection.", "word_embed."),
    ("class_embedding.", "class_emb."),
    ("shared_modulation.", "shared_ada_lin.1."),
    ("head_modulation.", "head_nm.ada_lin.1."),
    (".attention.qkv_proj.", ".attn.mat_qkv."),
    (".attention.out_proj.", ".attn.proj."),
    (".attention.log_query_scale", ".attn.scale_mul_1H11"),
    (".feed_forward.", ".ffn."),
)
TOKENIZER_NAMES = (
    ("codebook.", "quantize.embedding."),
    ("encoder.levels.", "encoder.down."),
    (".res.", ".block."),
    (".mid.0.", ".mid.block_1."),
    (".mid.1.", ".mid.attn_1."),
    (".mid.2.", ".mid.block_2."),
    (".shortcut.", ".nin_shortcut."),
    (".to_out.", ".proj_out."),
)


def var_transformer_from_original(
    state: dict[str, torch.Tensor],
    *,
    dtype: torch.dtype | None = None,
    source: str | Path = "the transformer's file",
) -> VARTransformer:
    """The transformer whose tensors are `state`, in evaluation mode. Its scales are those of the file.

    Args:
        dtype: of the weights; by default that of the head.
    """
    state = OriginalTensors(state, "VAR transformer", source)
    vocab_size, hidden_size = state.shape("head.weight")
    qk_norm = "blocks.0.attn.scale_mul_1H11" in state
    # Without it the tensors do not show the heads; the original makes heads of 64 in every size.
    heads = state.shape("blocks.0.attn.scale_mul_1H11", 4)[1] if qk_norm else hidden_size // 64
    if heads < 1 or hidden_size % heads:
        raise CheckpointError(
            f"{source} has width {hidden_size}, which {heads} heads cannot share: give the file of an unaltered model"
        )
    state.shape("lvl_1L")
    num_layers = state.count("blocks.")
    shared_adaln = "shared_ada_lin.1.weight" in state
    with torch.device("meta"):
        transformer = VARTransformer(
            num_classes=state.shape("class_emb.weight")[0] - 1,
            vocab_size=vocab_size,
            codebook_dim=state.shape("word_embed.weight")[1],
            scales=scales_of(state["lvl_1L"], source),
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_attention_heads=heads,
            mlp_ratio=state.shape("blocks.0.ffn.fc1.weight")[0] / hidden_size,
            shared_adaln=shared_adaln,
            qk_norm=qk_norm,
        )

    for layer in range(num_layers):
        attention = f"blocks.{layer}.attn"
        biases = [f"{attention}.{name}" for name in ("q_bias", "zero_k_bias", "v_bias")]
        for key in biases:
            state.shape(key, 1)
        state[f"{attention}.mat_qkv.bias"] = torch.cat([state.pop(key) for key in biases])
        if qk_norm:
            state.shape(f"{attention}.scale_mul_1H11", 4)
            state[f"{attention}.scale_mul_1H11"] = state[f"{attention}.scale_mul_1H11"].squeeze(0)
        if shared_adaln:
            state.shape(f"blocks.{layer}.ada_gss", 4)
            state[f"blocks.{layer}.ada_gss"] = state[f"blocks.{layer}.ada_gss"].flatten()

    modulation = (".modulation.bias", ".ada_gss") if shared_adaln else (".modulation.", ".ada_lin.1.")
    dtype = dtype or state["head.weight"].dtype
    return state.fill(
        transformer, (*TRANSFORMER_NAMES, modulation), dtype=dtype, ignored="lvl_1L|attn_bias_for_masking"
    )


def scales_of(levels: torch.Tensor, source: str | Path) -> tuple[int, ...]:
    """The sides of the maps, from the level of every code."""
    level, counts = levels.flatten().unique_consecutive(return_counts=True)
    counts = counts.tolist()
    sides = tuple(math.isqrt(count) for count in counts)
    if len(sides) < 2 or level.tolist() != [*range(len(sides))] or [side**2 for side in sides] != counts:
        raise CheckpointError(
            f"{source} has 'lvl_1L' with levels {level.tolist()} of {counts} codes, expected two or more square maps "
            "in order: give the file of an unaltered model"
        )
    return sides


def var_tokenizer_from_original(
    state: dict[str, torch.Tensor],
    *,
    scales: tuple[int, ...],
    source: str | Path = "the tokenizer's file",
) -> VARVQModel:
    """The visual tokenizer whose tensors are `state`, in float32 and in evaluation mode. Half of every map is
    convolved, as in the original.

    Args:
        scales: sides of the maps, from coarse to fine; one file serves several.
    """
    state = OriginalTensors(state, "VAR tokenizer", source)
    codebook_size, codebook_dim = state.shape("quantize.embedding.weight")
    channels, *widths = state.encoder_widths("encoder.down.", "block.0")
    num_phi, phi = state.count("quantize.quant_resi.qresi_ls."), ("phi.", "quantize.quant_resi.qresi_ls.")
    if "quantize.quant_resi.qresi.weight" in state:
        num_phi, phi = 1, ("phi.0.", "quantize.quant_resi.qresi.")
    elif num_phi == 0:
        phi = ("phi.", "quantize.quant_resi.")
    with torch.device("meta"):
        vq = VARVQModel(
            channels=channels,
            channel_multipliers=tuple(width // channels for width in widths),
            layers_per_block=state.count("encoder.down.0.block."),
            codebook_size=codebook_size,
            codebook_dim=codebook_dim,
            scales=scales,
            num_phi=num_phi,
            norm_num_groups=NORM_NUM_GROUPS,
        )

    for key in [key for key in state if ".qkv." in key]:
        state.shape(key, 4 if key.endswith("weight") else 1)
        parts = state.pop(key).tensor_split(3)
        state |= {f"{key} ({name})": part for name, part in zip("qkv", parts, strict=True)}

    names = vqgan_names((phi, *TOKENIZER_NAMES), len(widths))

    def original_name(name: str) -> str:
        return re.sub(r"\.to_([qkv])\.(\w+)", r".qkv.\2 (\1)", names(name))

    return state.fill(vq, original_name, dtype=torch.float32, ignored=r"quantize\.ema_vocab_hit_SV")


def convert_var(
    transformer: str | Path,
    tokenizer: str | Path,
    *,
    ema: bool = False,
    out: str | Path | None = None,
    dtype: torch.dtype | None = None,
) -> VARPipeline:
    """The pipeline of two published files, with the published sampling defaults. A thousand classes are those of
    ImageNet.

    Args:
        transformer, tokenizer: files such as `var_d16.pth` and `vae_ch160v4096z32.pth`. A trainer's `ar-ckpt-best.pth`
            holds both and may be given for either.
        ema: take the averaged weights (EMA) of a trainer's checkpoint for the transformer.
        out: a new or empty folder to save the pipeline to. It appears when all of it is written, or not at all.
        dtype: of the transformer's weights, by default that of the file. The tokenizer is float32.

    Raises:
        CheckpointError: if a file cannot be read or does not fit the other, or `out` is taken.
    """
    check_vacant(out)
    model = var_transformer_from_original(
        load_original(transformer, (*WRAPPINGS, "trainer", "var_wo_ddp"), ema=ema), dtype=dtype, source=transformer
    )
    vq = var_tokenizer_from_original(
        load_original(tokenizer, (*WRAPPINGS, "trainer", "vae_local")), scales=model.config.scales, source=tokenizer
    )
    source, labels = f"{transformer} with {tokenizer}", class_names(model.config.num_classes)
    pipeline = pipeline_of(VARPipeline, source, model, vq, id2label=labels)
    pipeline.generation_config.update(VAR_SAMPLING)
    save_whole(pipeline.save_pretrained, out)
    return pipeline
