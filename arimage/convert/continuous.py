"""What converters of models of continuous tokens share: the denoising head of MAR, and the KL autoencoder of latent
diffusion, by their original names."""

from pathlib import Path

import torch
from diffusers import AutoencoderKL

from ..models.denoising_head import DenoisingHead
from ..models.original_names import rename
from .checkpoint import NORM_NUM_GROUPS, OriginalTensors
from .vqgan import DIFFUSERS_NAMES, flatten_attention, vqgan_names


# Ours and the original's, replaced from top to bottom.
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


def denoising_head_from_original(
    state: OriginalTensors, prefix: str, *, learned_variance: bool = True
) -> DenoisingHead:
    """The head whose tensors in `state`, which loses them, begin with `prefix`, in float32 and in evaluation mode."""
    hidden_size, token_dim = state.shape(f"{prefix}input_proj.weight")
    with torch.device("meta"):
        head = DenoisingHead(
            token_dim=token_dim,
            condition_dim=state.shape(f"{prefix}cond_embed.weight")[1],
            hidden_size=hidden_size,
            num_layers=state.count(f"{prefix}res_blocks."),
            learned_variance=learned_variance,
        )
    names = [key for key in state if key.startswith(prefix)]
    of_head = OriginalTensors({key: state.pop(key) for key in names}, state.kind, state.source)
    return of_head.fill(head, lambda name: prefix + rename(name, HEAD_NAMES), dtype=torch.float32)


def autoencoder_from_original(
    state: dict[str, torch.Tensor],
    *,
    scaling_factor: float,
    shift_factor: float | None = None,
    kind: str = "image tokenizer",
    source: str | Path = "the tokenizer's file",
) -> AutoencoderKL:
    """The autoencoder whose tensors are `state`, in float32 and in evaluation mode.

    Args:
        scaling_factor, shift_factor: of its latents.
        kind, source: what errors call it and the file.
    """
    state = OriginalTensors(state, kind, source)
    _, *widths = state.encoder_widths("encoder.down.", "block.0")
    levels = len(widths)
    attends = [f"encoder.down.{level}.attn.0.q.weight" in state for level in range(levels)]
    # Between the encoder and the latents; some have none.
    quant_conv = "post_quant_conv.weight" in state
    with torch.device("meta"):
        vae = AutoencoderKL(
            down_block_types=tuple("AttnDownEncoderBlock2D" if one else "DownEncoderBlock2D" for one in attends),
            up_block_types=("UpDecoderBlock2D",) * levels,
            block_out_channels=tuple(widths),
            layers_per_block=state.count("encoder.down.0.block."),
            latent_channels=state.shape("decoder.conv_in.weight", 4)[1],
            norm_num_groups=NORM_NUM_GROUPS,
            scaling_factor=scaling_factor,
            shift_factor=shift_factor,
            use_quant_conv=quant_conv,
            use_post_quant_conv=quant_conv,
        )
    flatten_attention(state)
    return state.fill(vae, vqgan_names(DIFFUSERS_NAMES, levels), dtype=torch.float32, ignored=r"loss\..*")
