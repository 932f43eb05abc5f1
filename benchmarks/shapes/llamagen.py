"""The published shapes of LlamaGen."""

from functools import partial
from typing import Any

import torch

from arimage.decoding import Layout, Sampling
from arimage.pipelines.llamagen.denoiser_llamagen import LlamaGenDenoiser
from arimage.pipelines.llamagen.drafter_llamagen import LlamaGenDrafter
from arimage.pipelines.llamagen.transformer_llamagen import LlamaGenTokenModel, LlamaGenTransformer

from . import NARROW, Bind, Bound, Published, build, class_condition, text_condition


def llamagen_xl(layers: int, side: int = 16, text: bool = False, codes: int = 16384, **changes) -> Bind:
    shape: dict[str, Any] = {"hidden_size": 1280, "intermediate_size": 3584, "num_attention_heads": 20, **changes}
    drafter = build(lambda: LlamaGenDrafter(**shape))
    denoiser = build(lambda: LlamaGenDenoiser(hidden_size=shape["hidden_size"], num_layers=layers))
    if text:
        shape |= {"conditioning": "text", "num_condition_tokens": 120}
    network = build(lambda: LlamaGenTransformer(grid_size=side, num_layers=layers, vocab_size=codes, **shape))

    def bind(batch: int) -> Bound:
        condition = text_condition(batch, 120, 2048) if text else class_condition(batch)
        parts = {"drafter": drafter, "denoiser": denoiser, "codebook": torch.zeros(codes, 8)}
        model = LlamaGenTokenModel(network, condition, Layout((side, side)), guided=True, **parts)
        return Bound(model, Sampling(guidance_scale=4.0, top_k=2000), side**2, (network, drafter, denoiser))

    return bind


ON_TOKENS = (
    *("ar", "sjd", "sjd-coupled", "sjd-gumbel", "sjd2", "sjd-tree", "sjd-lazy", "sjd++", "gsd", "lantern"),
    *("lantern++", "eagle", "eagle-lantern", "zipar", "pjd", "line-cache"),
)
PUBLISHED = {
    "llamagen-xl-256": Published(36, llamagen_xl, ON_TOKENS),
    "llamagen-xl-384": Published(36, partial(llamagen_xl, side=24), tiny={"side": 4, "codes": 64, **NARROW}),
    "llamagen-xl-512": Published(36, partial(llamagen_xl, side=32)),
    "llamagen-t2i-512": Published(36, partial(llamagen_xl, side=32, text=True), ("sjd-coupled",)),
}
