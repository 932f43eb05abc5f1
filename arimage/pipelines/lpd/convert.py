"""From the published files of LPD (https://github.com/mit-han-lab/lpd) to an `LPDPipeline`."""

import math
from pathlib import Path

import torch

from ...convert.checkpoint import OriginalTensors, load_original, save_whole
from ...convert.paths import CheckpointError, check_vacant
from ..kinds.convert_any_order import find_files, heads_of
from .pipeline_lpd import LPDPipeline
from .transformer_lpd import LPDTransformer


# The published guidance by hidden size and tokens along each side.
GUIDANCE = {(1024, 16): 4.8, (1280, 16): 4.9, (1536, 16): 5.9, (1024, 32): 7.3, (1280, 32): 6.0}
KIND = "LPD transformer"
# Ours and the original's, replaced from top to bottom.
TRANSFORMER_NAMES = (
    ("no_class_embedding", "fake_latent"),
    ("class_embedding.", "class_emb."),
    ("token_embedding.", "token_emb."),
    ("query_embedding", "mask_token"),
    ("position_embedding", "pos_embed"),
    ("embedding_norm.", "z_proj_ln."),
    (".attention_norm.", ".norm1."),
    (".attention.qkv_proj.", ".attn.qkv."),
    (".attention.out_proj.", ".attn.proj."),
    (".feed_forward_norm.", ".norm2."),
    (".fc1.", ".mlp.fc1."),
    (".fc2.", ".mlp.fc2."),
)


def lpd_transformer_from_original(
    state: dict[str, torch.Tensor], *, num_heads: int | None, source: str | Path = "the transformer's file"
) -> LPDTransformer:
    """The transformer whose tensors are `state`, in the dtype of its token embedding and in evaluation mode.

    Args:
        num_heads: attention heads, which the tensors do not show; None for the published 64 channels per head.

    Raises:
        CheckpointError: if the heads do not fit, the grid is not square, or a tensor is missing, unknown or of an
            unexpected shape.
    """
    state = OriginalTensors(state, KIND, source)
    vocab_size, hidden_size = state.shape("token_emb.weight")
    count = state.shape("pos_embed", 3)[1] - 1
    grid_size = math.isqrt(max(count, 0))
    if count < 1 or grid_size**2 != count:
        raise CheckpointError(
            f"{source} has 'pos_embed' of {count} places, which is not a square: give an unaltered file"
        )
    num_heads = heads_of(num_heads, hidden_size)
    state.check_heads(num_heads, hidden_size, 1)
    with torch.device("meta"):
        transformer = LPDTransformer(
            grid_size=grid_size,
            hidden_size=hidden_size,
            intermediate_size=state.shape("blocks.0.mlp.fc1.weight")[0],
            num_layers=state.count("blocks."),
            num_attention_heads=num_heads,
            vocab_size=vocab_size,
            num_classes=state.shape("class_emb.weight")[0],
        )
    for key, dimensions, first in (("fake_latent", 2, 0), ("mask_token", 3, 1), ("pos_embed", 3, 1)):
        state.shape(key, dimensions)
        state[key] = state[key].flatten(0, first)
    state |= {key: state[key].squeeze(0) for key in ("fake_latent", "mask_token")}
    return state.fill(transformer, TRANSFORMER_NAMES, dtype=state["token_emb.weight"].dtype)


def convert_lpd(
    folder: str | Path,
    *,
    tokenizer: str | Path | None = None,
    num_heads: int | None = None,
    ema: bool = False,
    out: str | Path | None = None,
) -> LPDPipeline:
    """The pipeline of a published LPD, with the published guidance and the locality order.

    Args:
        folder: the transformer's file, such as `lpd_l_256.pth`, or a folder with one transformer.
        tokenizer: LlamaGen's image tokenizer, `vq_ds16_c2i.pt`; by default a file in the folder whose name begins with
            "vq". Without it the pipeline returns tokens.
        num_heads: attention heads, by default those of the folder's config.json (`decoder_num_heads`) if it has them,
            else the published 64 channels per head.
        ema: take the averaged weights (EMA) of a trainer's checkpoint for the transformer.
        out: a new or empty folder to save the pipeline to. It appears when all of it is written, or not at all.

    Raises:
        CheckpointError: if a file cannot be read or does not fit the others, or `out` is taken.
    """
    check_vacant(out)
    files = find_files(folder, tokenizer, None, num_heads)
    state = load_original(files.transformer, ema=ema)
    model = lpd_transformer_from_original(state, num_heads=files.num_heads, source=files.transformer)
    pipeline = files.pipeline(LPDPipeline, model)
    pipeline.generation_config["guidance_scale"] = GUIDANCE.get(
        (model.config.hidden_size, model.config.grid_size), 4.8
    )
    pipeline.order = "locality"
    save_whole(pipeline.save_pretrained, out)
    return pipeline
