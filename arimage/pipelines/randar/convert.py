"""From the published files of RandAR (https://github.com/ziqipang/RandAR) to a `RandARPipeline`."""

from pathlib import Path

import torch

from ...convert.checkpoint import OriginalTensors, load_original, save_whole
from ...convert.paths import check_vacant
from ...models.original_names import LLAMAGEN_NAMES
from ..kinds.convert_any_order import find_files, heads_of
from .pipeline_randar import RandARPipeline
from .transformer_randar import RandARTransformer


# The published guidance by hidden size.
GUIDANCE = {1024: 3.4, 1280: 4.0}
KIND = "RandAR transformer"
NAMES = (("query_embedding", "pos_instruct_embeddings"), *LLAMAGEN_NAMES)


def randar_transformer_from_original(
    state: dict[str, torch.Tensor],
    *,
    grid_size: int,
    num_heads: int | None,
    source: str | Path = "the transformer's file",
) -> RandARTransformer:
    """The transformer whose tensors are `state`, in the dtype of its token embedding and in evaluation mode.

    Args:
        grid_size: tokens along each side of the images that the weights were trained for; the tensors do not show it.
        num_heads: attention heads, which the tensors do not show; None for the published 64 channels per head.

    Raises:
        CheckpointError: if the heads do not fit, or a tensor is missing, unknown or of an unexpected shape.
    """
    state = OriginalTensors(state, KIND, source)
    vocab_size, hidden_size = state.shape("tok_embeddings.weight")
    num_heads = heads_of(num_heads, hidden_size)
    state.check_heads(num_heads, hidden_size)
    state.shape("pos_instruct_embeddings")
    with torch.device("meta"):
        transformer = RandARTransformer(
            grid_size=grid_size,
            hidden_size=hidden_size,
            intermediate_size=state.shape("layers.0.feed_forward.w1.weight")[0],
            num_layers=state.count("layers."),
            num_attention_heads=num_heads,
            vocab_size=vocab_size,
            num_classes=state.shape("cls_embedding.embedding_table.weight")[0] - 1,
        )
    state["pos_instruct_embeddings"] = state["pos_instruct_embeddings"].flatten()
    return state.fill(transformer, NAMES, dtype=state["tok_embeddings.weight"].dtype, ignored="freqs_cis")


def convert_randar(
    folder: str | Path,
    *,
    tokenizer: str | Path | None = None,
    image_size: int | None = None,
    num_heads: int | None = None,
    ema: bool = False,
    out: str | Path | None = None,
) -> RandARPipeline:
    """The pipeline of a published RandAR, with the published guidance.

    Args:
        folder: the transformer's file, such as `randar_0.3b_llamagen_360k_bs_1024_lr_0.0004.safetensors`, or a folder
            with one such file.
        tokenizer: LlamaGen's image tokenizer, `vq_ds16_c2i.pt`; by default a file in the folder whose name begins with
            "vq". Without it, as with the weights for MaskGIT's tokenizer, the pipeline returns tokens.
        image_size, num_heads: pixels along each side of the images that the transformer was trained for, and attention
            heads. By default those of the folder's config.json (`block_size`, `n_head`) if it has them, else 256
            pixels and the published 64 channels per head.
        ema: take the averaged weights (EMA) of a trainer's checkpoint for the transformer.
        out: a new or empty folder to save the pipeline to. It appears when all of it is written, or not at all.

    Raises:
        CheckpointError: if a file cannot be read, does not fit the others or the image size, or `out` is taken.
    """
    check_vacant(out)
    files = find_files(folder, tokenizer, image_size, num_heads, (".safetensors",))
    state = load_original(files.transformer, ema=ema)
    model = randar_transformer_from_original(
        state, grid_size=files.grid_size, num_heads=files.num_heads, source=files.transformer
    )
    pipeline = files.pipeline(RandARPipeline, model)
    pipeline.generation_config["guidance_scale"] = GUIDANCE.get(model.config.hidden_size, 3.4)
    save_whole(pipeline.save_pretrained, out)
    return pipeline
