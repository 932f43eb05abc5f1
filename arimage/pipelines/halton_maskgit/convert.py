"""From the published files of Halton-MaskGIT (https://github.com/valeoai/Halton-MaskGIT) to a
`HaltonMaskGITPipeline`."""

import math
from pathlib import Path

import torch

from ...convert.checkpoint import OriginalTensors, load_original, pipeline_of, save_whole
from ...convert.imagenet import class_names
from ...convert.paths import CheckpointError, check_vacant
from ...convert.vqgan import llamagen_tokenizer_from_original
from .pipeline_halton_maskgit import HaltonMaskGITPipeline
from .transformer_halton_maskgit import HaltonMaskGITTransformer


# Of the published sizes, by width and layers: attention heads, which no tensor shows.
NUM_HEADS = {(384, 6): 6, (512, 12): 6, (768, 12): 12, (1024, 24): 16, (1152, 28): 16}
# By width, the guidance that the authors evaluated with.
GUIDANCE = {384: 2.5, 512: 2.0, 768: 1.7, 1024: 1.5}
KIND = "Halton-MaskGIT transformer"
# Ours and the original's, replaced from top to bottom.
TRANSFORMER_NAMES = (
    ("class_embedding.", "cls_emb."),
    ("token_embedding.bias", "head.bias"),
    ("token_embedding.", "tok_emb."),
    ("position_embedding.", "pos_emb."),
    ("register_embedding.", "reg_tokens."),
    ("norm.norm.weight", "last_norm.norm_final.weight"),
    ("norm.bias", "last_norm.norm_final.bias"),
    ("norm.modulation.", "last_norm.mlp.1."),
    ("blocks.", "transformer.layers."),
    (".modulation.", ".mlp.1."),
    (".attention_norm.", ".ln1."),
    (".attention.qkv_proj.", ".attn.wqkv."),
    (".attention.out_proj.", ".attn.wo."),
    (".feed_forward_norm.", ".ln2."),
    (".feed_forward.gate_proj.", ".ff.w1."),
    (".feed_forward.up_proj.", ".ff.w3."),
    (".feed_forward.down_proj.", ".ff.w2."),
)


def halton_maskgit_from_original(
    state: dict[str, torch.Tensor], *, num_heads: int | None = None, source: str | Path = "the checkpoint"
) -> HaltonMaskGITTransformer:
    """The transformer whose tensors are `state`, in the dtype of its embeddings and in evaluation mode."""
    tensors = OriginalTensors(state, KIND, source)
    (rows, width), num_places = tensors.shape("tok_emb.weight"), tensors.shape("pos_emb.weight")[0]
    grid_size, layers = math.isqrt(num_places), tensors.count("transformer.layers.")
    if grid_size**2 != num_places or rows < 2 or layers < 1:
        raise CheckpointError(
            f"{source} has {layers} layers and embeddings of {num_places} places and {rows - 1} codes, which is no "
            f"{KIND} of a square picture: give the file of an unaltered model"
        )
    if not torch.equal(tensors.pop("head.weight", tensors["tok_emb.weight"]), tensors["tok_emb.weight"]):
        raise CheckpointError(
            f"{source} has a 'head.weight' that is not its 'tok_emb.weight': give the file of an unaltered model"
        )
    inner, heads = tensors.shape("transformer.layers.0.attn.wq.weight")[0], num_heads or NUM_HEADS.get((width, layers))
    if heads is None or not 1 <= heads <= width or width // heads * heads != inner:
        raise CheckpointError(
            f"{source} has width {width}, {layers} layers and {inner} channels in its attention, and num_heads is "
            f"{heads}: give the number of attention heads it was trained with as --num-heads (num_heads=)"
        )
    for layer in range(layers):
        prefix = f"transformer.layers.{layer}.attn."
        for name in "qkv":
            if tensors.shape(f"{prefix}w{name}.weight") != (inner, width):
                raise CheckpointError(
                    f"{source} has '{prefix}w{name}.weight' of another shape than ({inner}, {width}): give the file "
                    "of an unaltered model"
                )
        tensors[f"{prefix}wqkv.weight"] = torch.cat([tensors.pop(f"{prefix}w{name}.weight") for name in "qkv"])
    if tensors.shape("head.bias", 1) == (rows,):
        # The mask is never generated.
        tensors["head.bias"] = tensors["head.bias"][:-1]
    with torch.device("meta"):
        transformer = HaltonMaskGITTransformer(
            grid_size=grid_size,
            hidden_size=width,
            intermediate_size=tensors.shape("transformer.layers.0.ff.w1.weight")[0],
            num_layers=layers,
            num_attention_heads=heads,
            vocab_size=rows - 1,
            num_classes=tensors.shape("cls_emb.weight")[0] - 1,
            num_registers=tensors.shape("reg_tokens.weight")[0] if "reg_tokens.weight" in tensors else 0,
        )
    return tensors.fill(transformer, TRANSFORMER_NAMES, dtype=tensors["tok_emb.weight"].dtype)


def convert_halton_maskgit(
    checkpoint: str | Path, vq: str | Path, *, num_heads: int | None = None, out: str | Path | None = None
) -> HaltonMaskGITPipeline:
    """The pipeline of two published files, with the guidance that the authors evaluated their size with. A thousand
    classes are those of ImageNet.

    Args:
        checkpoint: the transformer's file, such as `ImageNet_384_large.pth`.
        vq: LlamaGen's image tokenizer, `vq_ds16_c2i.pt`.
        num_heads: attention heads, if the transformer has no published size.
        out: a new or empty folder to save the pipeline to. It appears when all of it is written, or not at all.

    Raises:
        CheckpointError: if a file cannot be read or does not fit the other, or `out` is taken.
    """
    check_vacant(out)
    tokenizer = llamagen_tokenizer_from_original(load_original(vq), source=vq)
    transformer = halton_maskgit_from_original(load_original(checkpoint), num_heads=num_heads, source=checkpoint)
    config = transformer.config
    source, labels = f"{checkpoint} with {vq}", class_names(config.num_classes)
    pipeline = pipeline_of(HaltonMaskGITPipeline, source, transformer, tokenizer, id2label=labels)
    pipeline.generation_config["guidance_scale"] = GUIDANCE.get(config.hidden_size, 1.0)
    save_whole(pipeline.save_pretrained, out)
    return pipeline
