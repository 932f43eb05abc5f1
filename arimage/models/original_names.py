"""The names that layers have in the code of a model's authors: in published weights, and in adapters that were trained
with that code."""

from collections.abc import Iterable


# Ours and the original's, replaced from top to bottom. Transformers that take adapters by the original names have them
# as `original_names`.
LLAMAGEN_NAMES = (
    ("token_embedding.", "tok_embeddings."),
    ("blocks.", "layers."),
    (".qkv_proj.", ".wqkv."),
    (".out_proj.", ".wo."),
    (".gate_proj.", ".w1."),
    (".up_proj.", ".w3."),
    (".down_proj.", ".w2."),
    (".feed_forward_norm.", ".ffn_norm."),
    ("head.", "output."),
    ("class_embedding.", "cls_embedding.embedding_table."),
    ("caption_projection.null_caption", "cls_embedding.uncond_embedding"),
    ("caption_projection.", "cls_embedding.cap_proj."),
)


def rename(name: str, pairs: Iterable[tuple[str, str]]) -> str:
    """`name` with the first of each of `pairs` replaced by the second, one pair after the other."""
    for ours, original in pairs:
        name = name.replace(ours, original)
    return name
