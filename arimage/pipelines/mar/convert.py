"""From the published files of MAR (https://github.com/LTH14/mar) to a `MARPipeline`."""

import math
import re
from pathlib import Path

import torch
from diffusers import AutoencoderKL

from ...convert.checkpoint import NORM_NUM_GROUPS, OriginalTensors, load_original, save_whole
from ...convert.imagenet import class_names
from ...convert.paths import CheckpointError, check_vacant
from ...models.denoising_head import DenoisingHead
from ...models.original_names import rename
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
HEAD_NAMES = (
    ("input_projection.", "input_proj."),
    ("time_fc1.", "time_embed.mlp.0."),
    ("time_fc2.", "time_embed.mlp.2."),
    ("condition_projection.", "cond_embed."),
    ("blocks.", "res_blocks."),
    (".norm.", ".in_ln."),
    (".fc1.", ".mlp.0."),
    (".fc2.", ".mlp.2."),
    ("output_modulation.", "final_layer.adaLN_modulation.1."),
    (".modulation.", ".adaLN_modulation.1."),
    ("output_projection.", "final_layer.linear."),
)
VAE_NAMES = (
    ("conv_norm_out.", "norm_out."),
    ("conv_shortcut.", "nin_shortcut."),
    ("mid_block.attentions.0.", "mid.attn_1."),
    ("mid_block.resnets.0.", "mid.block_1."),
    ("mid_block.resnets.1.", "mid.block_2."),
    (".attentions.", ".attn."),
    (".resnets.", ".block."),
    (".downsamplers.0.", ".downsample."),
    (".upsamplers.0.", ".upsample."),
    (".group_norm.", ".norm."),
    (".to_q.", ".q."),
    (".to_k.", ".k."),
    (".to_v.", ".v."),
    (".to_out.0.", ".proj_out."),
    ("down_blocks.", "down."),
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
        state: tensors by their original names, see `load_original`.
        channels: of the image tokenizer.
        num_heads: attention heads, if the width is not that of a published size.
        dtype: of the transformer's weights; by default that of the file.
        source: what errors call the file.

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
    head_width = state.shape("diffloss.net.input_proj.weight")[0]
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
        head = DenoisingHead(
            token_dim=token_dim,
            condition_dim=decoder_width,
            hidden_size=head_width,
            num_layers=state.count("diffloss.net.res_blocks."),
        )
    head_tensors = [key for key in state if key.startswith("diffloss.")]
    of_head = OriginalTensors({key: state.pop(key) for key in head_tensors}, state.kind, source)
    state.fill(transformer, TRANSFORMER_NAMES, dtype=dtype or state["z_proj.weight"].dtype)
    of_head.fill(head, lambda name: "diffloss.net." + rename(name, HEAD_NAMES), dtype=torch.float32)
    return transformer, head


def mar_vae_from_original(
    state: dict[str, torch.Tensor], *, source: str | Path = "the tokenizer's file"
) -> AutoencoderKL:
    """The image tokenizer whose tensors are `state`, in float32 and in evaluation mode.

    Args:
        state: tensors by their original names, see `load_original`.
        source: what errors call the file.

    Raises:
        CheckpointError: if a tensor is missing, unknown or of an unexpected shape.
    """
    state = OriginalTensors(state, "MAR image tokenizer", source)
    _, *widths = state.encoder_widths("encoder.down.", "block.0")
    levels = len(widths)
    attends = [f"encoder.down.{level}.attn.0.q.weight" in state for level in range(levels)]
    with torch.device("meta"):
        vae = AutoencoderKL(
            down_block_types=tuple("AttnDownEncoderBlock2D" if one else "DownEncoderBlock2D" for one in attends),
            up_block_types=("UpDecoderBlock2D",) * levels,
            block_out_channels=tuple(widths),
            layers_per_block=state.count("encoder.down.0.block."),
            latent_channels=state.shape("post_quant_conv.weight", 4)[0],
            norm_num_groups=NORM_NUM_GROUPS,
            scaling_factor=SCALING_FACTOR,
        )
    # Where diffusers has matrices the original has convolutions of one place.
    matrices = {name for name, value in vae.state_dict().items() if ".attentions." in name and value.ndim == 2}

    def original_name(name: str) -> str:
        renamed = rename(name, VAE_NAMES)
        # The original counts levels from the highest resolution in the decoder too.
        return re.sub(r"up_blocks\.(\d+)", lambda match: f"up.{levels - 1 - int(match[1])}", renamed)

    for key in state.keys() & {original_name(name) for name in matrices}:
        state[key] = state[key].flatten(1)
    return state.fill(vae, original_name, dtype=torch.float32, ignored=r"loss\..*")


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
    tokenizer = mar_vae_from_original(load_original(vae), source=vae)
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
