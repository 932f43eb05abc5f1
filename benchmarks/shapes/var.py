"""The published shape of VAR."""

from typing import Any

import torch

from arimage.decoding import Sampling
from arimage.pipelines.var.transformer_var import VARScaleModel, VARTransformer
from arimage.tokenizers.vq_var import VARVQModel

from . import Bind, Bound, Published, build, class_condition, text_condition


def var_d30(layers: int, tokenizer: dict | None = None, text: int = 0, **changes) -> Bind:
    """`text` is the length of the texts, 0 for classes."""
    shape: dict[str, Any] = {"hidden_size": 1920, "num_attention_heads": 30, **changes}
    network = build(lambda: VARTransformer(num_layers=layers, **shape))
    small = build(lambda: VARTransformer(num_layers=min(layers, 16), **changes))
    vq = build(lambda: VARVQModel(**(tokenizer or {})), torch.float32)

    def bind(batch: int) -> Bound:
        condition = text_condition(batch, text, shape["caption_dim"]) if text else class_condition(batch)
        refiner = VARScaleModel(small, vq, condition, guided=True)
        model = VARScaleModel(network, vq, condition, guided=True, refiner=refiner)
        return Bound(model, Sampling(guidance_scale=2.5, top_k=900, top_p=0.96), model.num_tokens, (network, vq))

    return bind


TINY_SCALES = {"scales": (1, 2)}
TINY_TOKENIZER = {
    "channels": 8,
    "channel_multipliers": (1, 2),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "codebook_size": 64,
    "codebook_dim": 4,
    **TINY_SCALES,
}
TINY = {"hidden_size": 32, "num_attention_heads": 2, "vocab_size": 64, "codebook_dim": 4, **TINY_SCALES}
PUBLISHED = {
    "var-d30": Published(30, var_d30, ("next-scale", "fastvar", "code"), {"tokenizer": TINY_TOKENIZER, **TINY})
}
