"""From the published files of Distilled Decoding (https://github.com/microsoft/distilled_decoding), students of
LlamaGen and VAR, to pipelines."""

import re
from collections.abc import Sequence
from pathlib import Path

import torch

from ...convert.checkpoint import WRAPPINGS, OriginalTensors, load_original, save_whole
from ...convert.imagenet import class_names
from ...convert.paths import CheckpointError, check_folder, check_vacant
from ...convert.vqgan import llamagen_tokenizer_from_original
from ...decoding import FewStepDecoding
from ...models.original_names import LLAMAGEN_NAMES, rename
from ..llamagen.convert import attention_heads, llamagen_transformer_from_original
from ..var.convert import TRANSFORMER_NAMES as VAR_NAMES
from ..var.convert import scales_of, var_tokenizer_from_original, var_transformer_from_original
from .pipeline_llamagen_dd import LlamaGenDDPipeline
from .pipeline_var_dd import VARDDPipeline
from .transformer_llamagen_dd import LlamaGenDDTransformer
from .transformer_var_dd import VARDDTransformer


# Of the teacher; guidance is part of the student.
LLAMAGEN_DD_SAMPLING = {"guidance_scale": 2.0, "temperature": 1.0, "top_k": 8000, "top_p": 1.0}
VAR_DD_SAMPLING = {"guidance_scale": 2.5, "temperature": 1.0, "top_k": 900, "top_p": 0.95}
# (hidden size, layers) of the published sizes to the level up to which they take codes, and the start of the second
# pass.
PUBLISHED_LEVELS = {
    (768, 12): (80, 80),
    (1024, 24): (130, 80),
    (1024, 16): (5, 5),
    (1280, 20): (4, 4),
    (1536, 24): (4, 4),
}
# Of the published models of 256 pixels; the averaged weights do not show them.
PUBLISHED_SCALES = (1, 2, 3, 4, 5, 6, 8, 10, 13, 16)
# Ours and the original's, replaced from top to bottom, before those of the teacher.
STUDENT_NAMES = (
    ("vector_head.shift_and_scale", "final_layer_conti.scale_shift_table"),
    ("vector_head.", "final_layer_conti."),
    ("known_embedding.", "n_d_embed."),
)
STUDENT, TOKENIZER = "n_d_embed.weight", "quantize.embedding.weight"
State = dict[str, torch.Tensor]


def _find_parts(folder: str | Path, teacher: str) -> dict[str, tuple[Path, State]]:
    """The path and tensors of each of the student, the tokenizer and the teacher by the tensor that only it has. Other
    files may lie next to them."""
    folder = Path(folder)
    check_folder(folder)
    found: dict[str, tuple[Path, State]] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix not in (".pt", ".pth", ".safetensors"):
            continue
        state = load_original(path, ("trainer", "ema", "ema_parameters", "var_wo_ddp", *WRAPPINGS))
        kind = next((key for key in (STUDENT, TOKENIZER, teacher) if key in state), None)
        if kind in found:
            raise CheckpointError(
                f"{folder} holds two files of one kind, {found[kind][0].name} and {path.name}: leave one of them in it"
            )
        if kind is not None:
            found[kind] = path, state
    for key, name in ((STUDENT, "model of Distilled Decoding"), (TOKENIZER, "image tokenizer")):
        if key not in found:
            raise CheckpointError(f"{folder} holds no file of a {name}, with {key!r}: put it there")
    return found


def llamagen_dd_transformer_from_original(
    state: State, *, grid_size: int, num_heads: int | None = None, source: str | Path = "the transformer's file"
) -> LlamaGenDDTransformer:
    """The student of LlamaGen whose tensors are `state`, in the dtype of its head and in evaluation mode."""
    state = OriginalTensors(state, "LlamaGen-DD transformer", source)
    vocab_size, hidden_size = state.shape("output.weight")
    layers = state.count("layers.")
    heads, kv_heads = attention_heads(state, hidden_size, layers, num_heads)
    with torch.device("meta"):
        transformer = LlamaGenDDTransformer(
            grid_size=grid_size,
            hidden_size=hidden_size,
            intermediate_size=state.shape("layers.0.feed_forward.w1.weight")[0],
            num_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=None if kv_heads == heads else kv_heads,
            vocab_size=vocab_size,
            codebook_dim=state.shape("tok_embeddings.weight")[1],
            num_classes=state.shape("cls_embedding.embedding_table.weight")[0] - 1,
            codes_until=PUBLISHED_LEVELS.get((hidden_size, layers), (None, 0))[0],
        )

    names = (*STUDENT_NAMES, ("input_projection.", "tok_embeddings."), *LLAMAGEN_NAMES)
    return state.fill(transformer, names, dtype=state["output.weight"].dtype, ignored="freqs_cis")


def var_dd_transformer_from_original(
    state: State, *, scales: Sequence[int], source: str | Path = "the transformer's file"
) -> VARDDTransformer:
    """The student of VAR whose tensors are `state`, in the dtype of its head and in evaluation mode."""
    state = OriginalTensors(state, "VAR-DD transformer", source)
    vocab_size, hidden_size = state.shape("head.weight")
    layers = state.count("blocks.")
    with torch.device("meta"):
        transformer = VARDDTransformer(
            num_classes=state.shape("class_emb.weight")[0] - 1,
            vocab_size=vocab_size,
            codebook_dim=state.shape("word_embed.weight")[1],
            scales=tuple(scales),
            hidden_size=hidden_size,
            num_layers=layers,
            num_attention_heads=state.shape("blocks.0.attn.scale_mul_1H11", 4)[1],
            mlp_ratio=state.shape("blocks.0.ffn.fc1.weight")[0] / hidden_size,
            codes_until=PUBLISHED_LEVELS.get((hidden_size, layers), (None, 0))[0],
        )

    for layer in range(layers):
        attention = f"blocks.{layer}.attn"
        for name in "qv":
            state.shape(f"{attention}.{name}_bias", 1)
        query, value = (state.pop(f"{attention}.{name}_bias") for name in "qv")
        # The averaged weights leave out the bias of the keys, which is always zero.
        key = state.pop(f"{attention}.zero_k_bias", torch.zeros_like(query))
        state[f"{attention}.mat_qkv.bias"] = torch.cat([query, key, value])
        state.shape(f"{attention}.scale_mul_1H11", 4)
        state[f"{attention}.scale_mul_1H11"] = state[f"{attention}.scale_mul_1H11"].squeeze(0)

    def original_name(name: str) -> str:
        if block := re.match(r"blocks\.(\d+)\.known_projection\.", name):
            return name.replace(block[0], f"layerwise_n_d_embed.{block[1]}.")
        last = ("known_projection.", f"layerwise_n_d_embed.{layers}.")
        return rename(name, (*STUDENT_NAMES, last, *VAR_NAMES, (".modulation.", ".ada_lin.1.")))

    dtype = state["head.weight"].dtype
    return state.fill(transformer, original_name, dtype=dtype, ignored="lvl_1L|attn_bias_for_masking")


def convert_llamagen_dd(
    folder: str | Path, *, image_size: int = 256, num_heads: int | None = None, out: str | Path | None = None
) -> LlamaGenDDPipeline:
    """The pipeline of a student of LlamaGen, which takes two passes by default if it has a published size.

    Args:
        folder: with the student's file (`llamagen-B.pt`), that of the image tokenizer (`vq_ds16_c2i.pt`) and, if
            wanted, that of the teacher (`c2i_B_256.pt`). Files are distinguished by their contents.
        image_size: pixels along each side of the images.
        num_heads: attention heads, needed if the student has no published size.
        out: a new or empty folder to save the pipeline to. It appears when all of it is written, or not at all.

    Raises:
        CheckpointError: if a file is missing, cannot be read or does not fit the others, or `out` is taken.
    """
    check_vacant(out)
    parts = _find_parts(folder, teacher="tok_embeddings.weight")
    path, state = parts[TOKENIZER]
    vq = llamagen_tokenizer_from_original(state, source=path)
    if image_size < 1 or image_size % vq.scale_factor:
        raise CheckpointError(
            f"image size {image_size} does not fit {path}: give a multiple of its {vq.scale_factor} pixels per token"
        )
    path, state = parts[STUDENT]
    student = llamagen_dd_transformer_from_original(
        state, grid_size=image_size // vq.scale_factor, num_heads=num_heads, source=path
    )
    teacher = None
    if "tok_embeddings.weight" in parts:
        path, state = parts["tok_embeddings.weight"]
        teacher = llamagen_transformer_from_original(
            state, image_size=image_size, downsample=vq.scale_factor, num_heads=num_heads, source=path
        )
    return _finish(LlamaGenDDPipeline, student, vq, teacher, LLAMAGEN_DD_SAMPLING, parts, out)


def convert_var_dd(
    folder: str | Path, *, scales: Sequence[int] | None = None, out: str | Path | None = None
) -> VARDDPipeline:
    """The pipeline of a student of VAR, which takes two passes by default if it has a published size.

    Args:
        folder: with the student's file (`var-d16.pth`), that of the image tokenizer (`vae_ch160v4096z32.pth`) and, if
            wanted, that of the teacher (`var_d16.pth`). Files are distinguished by their contents.
        scales: sides of the token maps, from coarse to fine; by default those of the published models or of the file.
        out: a new or empty folder to save the pipeline to. It appears when all of it is written, or not at all.

    Raises:
        CheckpointError: if a file is missing, cannot be read or does not fit the others, or `out` is taken.
    """
    check_vacant(out)
    parts = _find_parts(folder, teacher="word_embed.weight")
    path, state = parts[STUDENT]
    if scales is None:
        positions = OriginalTensors(state, "VAR-DD transformer", path).shape("pos_1LC", 3)[1]
        scales = PUBLISHED_SCALES
        if positions != 1 + sum(side**2 for side in scales):
            buffers = OriginalTensors(load_original(path, ("trainer", "var_wo_ddp")), "VAR-DD transformer", path)
            buffers.shape("lvl_1L")
            # The first level is the class.
            scales = scales_of(buffers["lvl_1L"], path)[1:]
    student = var_dd_transformer_from_original(state, scales=scales, source=path)
    path, state = parts[TOKENIZER]
    vq = var_tokenizer_from_original(state, scales=tuple(scales), source=path)
    teacher = None
    if "word_embed.weight" in parts:
        path, state = parts["word_embed.weight"]
        teacher = var_transformer_from_original(state, source=path)
    return _finish(VARDDPipeline, student, vq, teacher, VAR_DD_SAMPLING, parts, out)


def _finish(kind, student, vq, teacher, sampling: dict, parts: dict, out: str | Path | None):
    config = student.config
    predicted, read = (config.vocab_size, config.codebook_dim), (vq.config.codebook_size, vq.config.codebook_dim)
    if predicted != read:
        raise CheckpointError(
            f"{parts[STUDENT][0]} predicts {predicted[0]} codes of width {predicted[1]} but {parts[TOKENIZER][0]} has "
            f"{read[0]} of width {read[1]}: give the tokenizer that this model was trained with"
        )
    pipeline = kind(student, vq, teacher, id2label=class_names(config.num_classes))
    pipeline.generation_config.update(sampling)
    if config.codes_until is not None:
        second = PUBLISHED_LEVELS[config.hidden_size, config.num_layers][1]
        pipeline.decoding = FewStepDecoding(starts=(0, second))
    save_whole(pipeline.save_pretrained, out)
    return pipeline
