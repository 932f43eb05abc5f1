"""From the published files of RAR (https://github.com/bytedance/1d-tokenizer) to a `RARPipeline`."""

import math
import re
from pathlib import Path

import torch

from ...convert.checkpoint import NORM_NUM_GROUPS, OriginalTensors, load_original, pipeline_of, save_whole
from ...convert.imagenet import class_names
from ...convert.paths import CheckpointError, check_vacant
from .pipeline_rar import RARPipeline
from .transformer_rar import PREFIX_LENGTH, RARTransformer
from .vq_maskgit import MaskGITVQModel


KIND, VQ_KIND = "RAR transformer", "MaskGIT-VQ"
# Rows that the tables of places have beyond the tokens, most of which nothing reads.
SPARE_PLACES, SPARE_TIMESTEPS = 1024, 100
# By width, the guidance, its power and the temperature that the authors evaluated with; for others, those of their
# example.
SAMPLING = {768: (16.0, 2.75, 1.0), 1024: (15.5, 2.5, 1.02), 1280: (6.9, 1.5, 1.02), 1408: (8.0, 1.2, 1.02)}
EXAMPLE = (4.0, 0.0, 1.0)
# Ours and the original's, replaced from top to bottom.
TRANSFORMER_NAMES = (
    ("head.", "lm_head."),
    ("norm.modulation.", "adaln_before_head.adaLN_modulation.1."),
    (".modulation.", ".adaLN_modulation.1."),
    (".attention_norm.", ".norm1."),
    (".feed_forward_norm.", ".norm2."),
    (".attention.qkv_proj.", ".attn.qkv."),
    (".attention.query_norm.", ".attn.q_norm."),
    (".attention.key_norm.", ".attn.k_norm."),
    (".attention.out_proj.", ".attn.proj."),
    (".feed_forward.", ".mlp."),
)


def rar_from_original(state: dict[str, torch.Tensor], *, source: str | Path = "the checkpoint") -> RARTransformer:
    """The transformer whose tensors are `state`, in the dtype of its embeddings and in evaluation mode."""
    tensors = OriginalTensors(state, KIND, source)
    (rows, width), vocab_size = tensors.shape("embeddings.weight"), tensors.shape("lm_head.weight")[0]
    head_dim = tensors.shape("blocks.0.attn.q_norm.weight", 1)[0]
    tables = {
        name: tensors.shape(name, 3)
        for name in ("cls_token", "pos_embed", "target_aware_pos_embed", "timesteps_embeddings")
    }
    num_tokens, num_classes = tables["pos_embed"][1] - SPARE_PLACES, rows - vocab_size - 2
    grid_size = math.isqrt(max(num_tokens, 0))
    lengths = 1, num_tokens + SPARE_PLACES, num_tokens + SPARE_PLACES, num_tokens + SPARE_TIMESTEPS
    for (name, shape), length in zip(tables.items(), lengths, strict=True):
        if tuple(shape) != (1, length, width):
            raise CheckpointError(
                f"{source} has {name!r} of shape {tuple(shape)} where (1, {length}, {width}) was expected: give the "
                "file of one unaltered model"
            )
    if grid_size < 1 or grid_size**2 != num_tokens or num_classes < 1 or head_dim < 1 or width % head_dim:
        raise CheckpointError(
            f"{source} has {num_tokens} tokens, {num_classes} classes, and heads of {head_dim} of {width} channels, "
            f"which is no {KIND} of a square picture: give the file of an unaltered model"
        )
    start, positions, targets, timesteps = (tensors.pop(name)[0] for name in tables)
    embeddings = tensors.pop("embeddings.weight")
    # After the tokens comes a mask, which nothing reads.
    tensors["token_embedding.weight"] = embeddings[:vocab_size]
    tensors["class_embedding.weight"] = embeddings[vocab_size + 1 :]
    tensors["start_embedding.weight"] = start
    tensors["position_embedding.weight"] = positions[: num_tokens + PREFIX_LENGTH]
    # The table counts the two places of the prefix.
    tensors["target_embedding.weight"] = targets[PREFIX_LENGTH : num_tokens + PREFIX_LENGTH]
    tensors["modulation_embedding.weight"] = timesteps[: num_tokens + PREFIX_LENGTH]
    with torch.device("meta"):
        transformer = RARTransformer(
            grid_size=grid_size,
            hidden_size=width,
            intermediate_size=tensors.shape("blocks.0.mlp.fc1.weight")[0],
            num_layers=tensors.count("blocks."),
            num_attention_heads=width // head_dim,
            vocab_size=vocab_size,
            num_classes=num_classes,
        )
    return tensors.fill(transformer, TRANSFORMER_NAMES, dtype=embeddings.dtype)


def maskgit_vq_from_original(
    state: dict[str, torch.Tensor], *, source: str | Path = "the tokenizer's file"
) -> MaskGITVQModel:
    """The image tokenizer whose tensors are `state`, in float32 and in evaluation mode."""
    tensors = OriginalTensors(state, VQ_KIND, source)
    channels, *widths = tensors.encoder_widths("encoder.down.", "block.0")
    codes, dimension = tensors.shape("quantize.embedding.weight")
    levels, count = len(widths), tensors.count("encoder.down.0.block.")
    with torch.device("meta"):
        vq = MaskGITVQModel(
            channels=channels,
            channel_multipliers=tuple(width // channels for width in widths),
            layers_per_block=count,
            latent_channels=dimension,
            codebook_size=codes,
            norm_num_groups=NORM_NUM_GROUPS,
        )

    def original_name(name: str) -> str:
        # The decoder's levels are numbered from the finest in the file.
        name = re.sub(r"decoder\.levels\.(\d+)", lambda match: f"decoder.up.{levels - 1 - int(match[1])}", name)
        name = name.replace("encoder.levels", "encoder.down").replace("shortcut", "nin_shortcut")
        name = re.sub(r"((?:up|down)\.\d+)\.\d+\.conv\.", r"\1.upsample_conv.", name)
        return re.sub(r"((?:up|down)\.\d+)\.(\d+)", r"\1.block.\2", name).replace("codebook", "quantize.embedding")

    return tensors.fill(vq, original_name, dtype=torch.float32)


def convert_rar(checkpoint: str | Path, vq: str | Path, *, out: str | Path | None = None) -> RARPipeline:
    """The pipeline of two published files, with the sampling that the authors evaluated their size with. A thousand
    classes are those of ImageNet.

    Args:
        checkpoint: the transformer's file, such as `rar_b.bin`.
        vq: MaskGIT's image tokenizer, `maskgit-vqgan-imagenet-f16-256.bin`.
        out: a new or empty folder to save the pipeline to. It appears when all of it is written, or not at all.

    Raises:
        CheckpointError: if a file cannot be read or does not fit the other, or `out` is taken.
    """
    check_vacant(out)
    tokenizer = maskgit_vq_from_original(load_original(vq), source=vq)
    transformer = rar_from_original(load_original(checkpoint), source=checkpoint)
    config = transformer.config
    source, labels = f"{checkpoint} with {vq}", class_names(config.num_classes)
    pipeline = pipeline_of(RARPipeline, source, transformer, tokenizer, id2label=labels)
    names = "guidance_scale", "guidance_scale_pow", "temperature"
    pipeline.generation_config.update(zip(names, SAMPLING.get(config.hidden_size, EXAMPLE), strict=True))
    save_whole(pipeline.save_pretrained, out)
    return pipeline
