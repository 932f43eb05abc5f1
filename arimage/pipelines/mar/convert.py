"""From the published files of MAR (https://github.com/LTH14/mar) to a `MARPipeline`."""

import math
from pathlib import Path

import torch

from ...convert.checkpoint import OriginalTensors, load_original, save_whole
from ...convert.continuous import autoencoder_from_original, denoising_head_from_original
from ...convert.imagenet import class_names
from ...convert.paths import CheckpointError, check_vacant
from ...models.denoising_head import DenoisingHead
from .pipeline_mar import MARPipeline
from .transformer_mar import MARTransformer


# Guidance by the width of the transformer: those that the authors evaluated MAR-B, MAR-L and MAR-H with.
GUIDANCE = {768: 2.9, 1024: 3.0, 1280: 3.2}
# The tensors do not show the heads.
NUM_HEADS = {768: 12, 1024: 16, 1280: 16}
SCALING_FACTOR = 0.2325
# Ours and the original's, replaced from top to bottom.
TRANSFORMER_NAMES = (
    ("class_embedding.", "class_emb."),
    ("null_vector", "fake_latent"),
    ("input_projection.", "z_proj."),
    ("input_norm.", "z_proj_ln."),
    ("encoder_position", "encoder_pos_embed_learned"),
    ("decoder_projection.", "decoder_embed."),
    ("decoder_position", "decoder_pos_embed_learned"),
    ("output_position", "diffusion_pos_embed_learned"),
    (".qkv_proj.", ".attn.qkv."),
    (".out_proj.", ".attn.proj."),
    (".fc", ".mlp.fc"),
)


def _side(area: int, name: str, source: str | Path) -> int:
    side = math.isqrt(area)
    if side < 1 or side**2 != area:
        raise CheckpointError(f"{source} has {name}, which is not a square: give the file of an unaltered model")
    return side


def mar_from_original(
    state: dict[str, torch.Tensor],
    *,
    channels: int,
    num_heads: int | None = None,
    dtype: torch.dtype | None = None,
    source: str | Path = "the checkpoint",
) -> tuple[MARTransformer, DenoisingHead]:
    """The transformer and the head whose tensors are `state`, in evaluation mode; the head is float32.

    Args:
        channels: of the image tokenizer.
        num_heads: attention heads, if the width is not that of a published size.
        dtype: of the transformer's weights; by default that of the file.

    Raises:
        CheckpointError: if a tensor is missing, unknown or of an unexpected shape, or the heads are not known.
    """
    state = OriginalTensors(state, "MAR checkpoint", source)
    num_classes, width = state.shape("class_emb.weight")
    decoder_width = state.shape("decoder_embed.weight")[0]
    heads = [num_heads or NUM_HEADS.get(size, 0) for size in (width, decoder_width)]
    if any(count < 1 or size % count for count, size in zip(heads, (width, decoder_width), strict=True)):
        raise CheckpointError(
            f"{source} has the widths {width} and {decoder_width}, and num_heads is {num_heads}: give the number of "
            "attention heads, which no file holds"
        )
    num_tokens, token_dim = state.shape("diffusion_pos_embed_learned", 3)[1], state.shape("z_proj.weight")[1]
    if token_dim % channels:
        raise CheckpointError(
            f"{source} has tokens of width {token_dim}, and the image tokenizer {channels} channels: give the "
            "tokenizer that this transformer was trained with"
        )
    with torch.device("meta"):
        transformer = MARTransformer(
            num_classes=num_classes,
            token_dim=token_dim,
            patch_size=_side(token_dim // channels, f"patches of {token_dim // channels} places", source),
            grid_size=_side(num_tokens, f"{num_tokens} tokens", source),
            num_buffers=state.shape("encoder_pos_embed_learned", 3)[1] - num_tokens,
            hidden_size=width,
            num_layers=state.count("encoder_blocks."),
            num_attention_heads=heads[0],
            decoder_hidden_size=decoder_width,
            num_decoder_layers=state.count("decoder_blocks."),
            num_decoder_attention_heads=heads[1],
            mlp_ratio=state.shape("encoder_blocks.0.mlp.fc1.weight")[0] / width,
        )
    head = denoising_head_from_original(state, "diffloss.net.")
    state.fill(transformer, TRANSFORMER_NAMES, dtype=dtype or state["z_proj.weight"].dtype)
    return transformer, head


def convert_mar(
    checkpoint: str | Path,
    vae: str | Path,
    *,
    num_heads: int | None = None,
    out: str | Path | None = None,
    dtype: torch.dtype | None = None,
) -> MARPipeline:
    """The pipeline of two published files, with the published sampling defaults and 64 forward passes. A thousand
    classes are those of ImageNet.

    Args:
        checkpoint: `checkpoint-last.pth`, whose averaged weights (`model_ema`) are taken, or a file of tensors
            alone.
        vae: the image tokenizer, `kl16.ckpt` or `.safetensors`.
        num_heads: attention heads, if the width of the transformer is not that of a published size.
        out: a new or empty folder to save the pipeline to. It appears when all of it is written, or not at all.
        dtype: of the transformer's weights, by default that of the file. Head and tokenizer are float32.

    Raises:
        CheckpointError: if a file cannot be read or does not fit the other, or `out` is taken.
    """
    check_vacant(out)
    tokenizer = autoencoder_from_original(
        load_original(vae), scaling_factor=SCALING_FACTOR, kind="MAR image tokenizer", source=vae
    )
    transformer, head = mar_from_original(
        load_original(checkpoint, ()),
        channels=tokenizer.config["latent_channels"],
        num_heads=num_heads,
        dtype=dtype,
        source=checkpoint,
    )
    pipeline = MARPipeline(transformer, head, tokenizer, id2label=class_names(transformer.config.num_classes))
    pipeline.generation_config["guidance_scale"] = GUIDANCE.get(transformer.config.hidden_size, 1.0)
    save_whole(pipeline.save_pretrained, out)
    return pipeline
