"""From the published files of ARPG (https://github.com/hp-l33/ARPG) to an `ARPGPipeline`."""

from pathlib import Path

import torch

from ...convert.checkpoint import OriginalTensors, load_original, save_whole
from ...convert.paths import CheckpointError, check_vacant
from ..kinds.convert_any_order import find_files, heads_of
from .pipeline_arpg import ARPGPipeline
from .transformer_arpg import ARPGTransformer


# The published guidance by hidden size.
GUIDANCE = {1024: 4.5, 1280: 6.0, 1536: 7.5}
KIND = "ARPG transformer"
# Ours and the original's, replaced from top to bottom.
TRANSFORMER_NAMES = (
    ("query_blocks.", "layers.cross_dec."),
    ("blocks.", "layers.self_dec."),
    (".attention.qkv_proj.", ".attn.to_qkv."),
    (".attention.out_proj.", ".attn.proj."),
    (".q_proj.", ".attn.to_q."),
    (".out_proj.", ".attn.proj."),
    (".attention_norm.", ".attn_norm."),
    (".feed_forward_norm.", ".ffn_norm."),
    (".feed_forward.gate_proj.", ".ffn.w1."),
    (".feed_forward.up_proj.", ".ffn.w3."),
    (".feed_forward.down_proj.", ".ffn.w2."),
    ("memory_norm.", "layers.norm."),
    ("memory_proj.", "layers.to_kv."),
    ("token_embedding.weight", "embeddings.weight (tokens)"),
    ("query_embedding", "embeddings.weight (mask)"),
    ("class_embedding.weight", "embeddings.weight (classes)"),
)


def arpg_transformer_from_original(
    state: dict[str, torch.Tensor],
    *,
    grid_size: int,
    num_heads: int | None,
    source: str | Path = "the transformer's file",
) -> ARPGTransformer:
    """The transformer whose tensors are `state`, in the dtype of its embeddings and in evaluation mode."""
    tensors = OriginalTensors(state, KIND, source)

    def merge(prefix: str, names: str, merged: str) -> None:
        keys = [f"{prefix}to_{name}.weight" for name in names]
        if len({tensors.shape(key) for key in keys}) != 1:
            raise CheckpointError(
                f"{source} has {', '.join(keys)} of different shapes: give the file of an unaltered model"
            )
        tensors[f"{prefix}{merged}.weight"] = torch.cat([tensors.pop(key) for key in keys])

    (vocab_size, hidden_size), embeddings = tensors.shape("head.weight"), tensors.shape("embeddings.weight")[0]
    num_classes = embeddings - vocab_size - 3
    if num_classes < 1:
        raise CheckpointError(
            f"{source} has {embeddings} entries of 'embeddings.weight' for {vocab_size} codes, which leaves none for "
            f"classes: give the file of an {KIND}"
        )
    num_heads = heads_of(num_heads, hidden_size)
    tensors.check_heads(num_heads, hidden_size)
    halves = [tensors.count(f"layers.{half}.") for half in ("self_dec", "cross_dec")]
    if halves[0] != halves[1]:
        raise CheckpointError(f"{source} has halves of {halves[0]} and {halves[1]} layers: give a complete file")
    for layer in range(halves[0]):
        merge(f"layers.self_dec.{layer}.attn.", "qkv", "to_qkv")
    merge("layers.", "kv", "to_kv")
    # The last row is never used.
    tokens, mask, classes, _ = tensors.pop("embeddings.weight").split([vocab_size, 1, num_classes + 1, 1])
    tensors |= {
        "embeddings.weight (tokens)": tokens,
        "embeddings.weight (mask)": mask[0],
        "embeddings.weight (classes)": classes,
    }
    with torch.device("meta"):
        transformer = ARPGTransformer(
            grid_size=grid_size,
            hidden_size=hidden_size,
            intermediate_size=tensors.shape("layers.self_dec.0.ffn.w1.weight")[0],
            num_layers=sum(halves),
            num_attention_heads=num_heads,
            vocab_size=vocab_size,
            num_classes=num_classes,
        )
    return tensors.fill(transformer, TRANSFORMER_NAMES, dtype=tokens.dtype, ignored="freqs_cis")


def convert_arpg(
    folder: str | Path,
    *,
    tokenizer: str | Path | None = None,
    image_size: int | None = None,
    num_heads: int | None = None,
    ema: bool = False,
    out: str | Path | None = None,
) -> ARPGPipeline:
    """The pipeline of a published ARPG, with the published guidance.

    Args:
        folder: the transformer's file, such as `arpg_300m.pt`, or a folder with one transformer.
        tokenizer: LlamaGen's image tokenizer, `vq_ds16_c2i.pt`; by default a file in the folder whose name begins with
            "vq". Without it the pipeline returns tokens.
        image_size, num_heads: pixels along each side of the images that the transformer was trained for, and attention
            heads. By default those of the folder's config.json (`block_size`, `n_head`) if it has them, else 256
            pixels and the published 64 channels per head.
        ema: take the averaged weights (EMA) of a trainer's checkpoint for the transformer.
        out: a new or empty folder to save the pipeline to. It appears when all of it is written, or not at all.

    Raises:
        CheckpointError: if a file cannot be read, does not fit the others or the image size, or `out` is taken.
    """
    check_vacant(out)
    files = find_files(folder, tokenizer, image_size, num_heads)
    state = load_original(files.transformer, ema=ema)
    model = arpg_transformer_from_original(
        state, grid_size=files.grid_size, num_heads=files.num_heads, source=files.transformer
    )
    pipeline = files.pipeline(ARPGPipeline, model)
    pipeline.generation_config["guidance_scale"] = GUIDANCE.get(model.config.hidden_size, 4.5)
    save_whole(pipeline.save_pretrained, out)
    return pipeline
