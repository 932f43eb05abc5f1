"""From the published files of LlamaGen (https://github.com/FoundationVision/LlamaGen) to a `LlamaGenPipeline`."""

from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase, T5EncoderModel

from ...convert.checkpoint import OriginalTensors, load_original, pipeline_of, save_whole
from ...convert.folder import load_t5_encoder
from ...convert.imagenet import class_names
from ...convert.paths import CheckpointError, check_vacant
from ...convert.vqgan import llamagen_tokenizer_from_original
from ...models.original_names import LLAMAGEN_NAMES
from .pipeline_llamagen import LlamaGenPipeline
from .transformer_llamagen import LlamaGenTransformer


LLAMAGEN_SAMPLING = {
    "class": {"guidance_scale": 4.0, "temperature": 1.0, "top_k": 2000, "top_p": 1.0},
    "text": {"guidance_scale": 7.5, "temperature": 1.0, "top_k": 1000, "top_p": 1.0},
}
# (hidden size, layers) of the published sizes to their heads, which the tensors do not show.
NUM_HEADS = {
    (768, 12): 12,
    (1024, 24): 16,
    (1280, 36): 20,
    (1536, 48): 24,
    (3200, 24): 32,
    (2048, 22): 32,
    (4096, 32): 32,
    (2560, 48): 40,
}


def llamagen_transformer_from_original(
    state: dict[str, torch.Tensor],
    *,
    image_size: int,
    downsample: int,
    num_heads: int | None = None,
    source: str | Path = "the transformer's file",
) -> LlamaGenTransformer:
    """The transformer whose tensors are `state`, in the dtype of its token embedding and in evaluation mode.

    Args:
        image_size: pixels along each side of the images that the weights were trained for; the tensors do not show it.
        downsample: pixels per token along each side.
        num_heads: attention heads, needed if hidden size and layers are not those of a published model.

    Raises:
        CheckpointError: if the image size is not a multiple of `downsample`, the heads are unknown or do not fit, or a
            tensor is missing, unknown or of an unexpected shape.
    """
    if image_size < 1 or image_size % downsample:
        raise CheckpointError(
            f"image size {image_size} does not fit a tokenizer of {downsample} pixels per token: "
            f"give the multiple of {downsample} that {source} was trained for"
        )
    state = OriginalTensors(state, "LlamaGen transformer", source)
    vocab_size, hidden_size = state.shape("tok_embeddings.weight")
    num_layers = state.count("layers.")
    heads, kv_heads = attention_heads(state, hidden_size, num_layers, num_heads)
    config = {
        "grid_size": image_size // downsample,
        "hidden_size": hidden_size,
        "intermediate_size": state.shape("layers.0.feed_forward.w1.weight")[0],
        "num_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": None if kv_heads == heads else kv_heads,
        "vocab_size": vocab_size,
    }
    if any(key.startswith(("cls_embedding.uncond_embedding", "cls_embedding.cap_proj.")) for key in state):
        tokens, caption_dim = state.shape("cls_embedding.uncond_embedding")
        config |= {"conditioning": "text", "num_condition_tokens": tokens, "caption_dim": caption_dim}
    else:
        num_classes = state.shape("cls_embedding.embedding_table.weight")[0] - 1
        config |= {"conditioning": "class", "num_condition_tokens": 1, "num_classes": num_classes}
    with torch.device("meta"):
        transformer = LlamaGenTransformer(**config)
    return state.fill(
        transformer,
        LLAMAGEN_NAMES,
        dtype=state["tok_embeddings.weight"].dtype,
        ignored=r"freqs_cis|layers\.\d+\.attention\.kv_cache\.[kv]_cache",
    )


def attention_heads(
    state: OriginalTensors, hidden_size: int, num_layers: int, num_heads: int | None
) -> tuple[int, int]:
    qkv_width, _ = state.shape("layers.0.attention.wqkv.weight")
    heads = num_heads or NUM_HEADS.get((hidden_size, num_layers))
    if heads is None:
        raise CheckpointError(
            f"{state.source} has {num_layers} layers of width {hidden_size}, which is not a published size: "
            "give the number of its attention heads as --num-heads (num_heads=)"
        )
    state.check_heads(heads, hidden_size)
    kv_heads, rest = divmod(qkv_width - hidden_size, 2 * hidden_size // heads)
    if kv_heads < 1 or rest or heads % kv_heads:
        raise CheckpointError(
            f"{state.source} has 'layers.0.attention.wqkv.weight' with {qkv_width} rows, which {heads} heads of width "
            f"{hidden_size // heads} cannot share: give the number of attention heads it was trained with as "
            "--num-heads (num_heads=)"
        )
    return heads, kv_heads


def convert_llamagen(
    transformer: str | Path,
    tokenizer: str | Path,
    image_size: int,
    *,
    num_heads: int | None = None,
    text_encoder: str | Path | None = None,
    ema: bool = False,
    out: str | Path | None = None,
) -> LlamaGenPipeline:
    """The pipeline of two published files, with the published sampling defaults. A thousand classes are those of
    ImageNet.

    Args:
        transformer, tokenizer: files such as `c2i_B_256.pt` and `vq_ds16_c2i.pt`. The tokenizers of the class and of
            the text models look alike, but each goes with its own.
        image_size: pixels along each side of the images that the transformer was trained for.
        num_heads: attention heads, needed if the transformer has no published size.
        text_encoder: for a text model, a local folder with the transformers T5 encoder it was trained with, and its
            tokenizer. Without it the pipeline takes `prompt_embeds` only.
        ema: take the averaged weights (EMA) of a trainer's checkpoint for the transformer.
        out: a new or empty folder to save the pipeline to. It appears when all of it is written, or not at all.

    Raises:
        CheckpointError: if a file cannot be read, does not fit the other or the image size, or `out` is taken.
    """
    check_vacant(out)
    vq = llamagen_tokenizer_from_original(load_original(tokenizer), source=tokenizer)
    model = llamagen_transformer_from_original(
        load_original(transformer, ema=ema),
        image_size=image_size,
        downsample=vq.scale_factor,
        num_heads=num_heads,
        source=transformer,
    )
    text = (None, None) if text_encoder is None else _load_text_encoder(Path(text_encoder), model, transformer)
    labels = class_names(model.config.num_classes) if model.config.conditioning == "class" else None
    pipeline = pipeline_of(LlamaGenPipeline, f"{transformer} with {tokenizer}", model, vq, *text, id2label=labels)
    pipeline.generation_config.update(LLAMAGEN_SAMPLING[model.config.conditioning])
    save_whole(pipeline.save_pretrained, out)
    return pipeline


def _load_text_encoder(
    folder: Path, model: LlamaGenTransformer, transformer: str | Path
) -> tuple[PreTrainedTokenizerBase, T5EncoderModel]:
    if model.config.conditioning == "class":
        raise CheckpointError(f"{transformer} is conditioned on classes: leave out the text encoder {folder}")
    tokenizer, text_encoder = load_t5_encoder(folder, model.config.caption_dim, transformer)
    # So that the text encoder can be used without the transformer.
    tokenizer.model_max_length = model.config.num_condition_tokens
    return tokenizer, text_encoder
