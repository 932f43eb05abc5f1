"""The published shapes of Halton-MaskGIT."""

from typing import Any

from arimage.decoding import Layout, Sampling
from arimage.pipelines.halton_maskgit.pipeline_halton_maskgit import CONFIDENCE
from arimage.pipelines.halton_maskgit.transformer_halton_maskgit import HaltonMaskGITModel, HaltonMaskGITTransformer

from . import Bind, Bound, Published, build, class_condition


LARGE = {"grid_size": 24, "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16}


def halton_maskgit(layers: int, **size: Any) -> Bind:
    network = build(lambda: HaltonMaskGITTransformer(num_layers=layers, **size))

    def bind(batch: int) -> Bound:
        layout = Layout((network.config.grid_size,) * 2)
        model = HaltonMaskGITModel(network, class_condition(batch), layout, CONFIDENCE, guided=True)
        return Bound(model, Sampling(guidance_scale=1.7), 0, (network,))

    return bind


DECODINGS = ("halton", "confidence", "recap", "ml-cache")
PUBLISHED = {
    "halton-maskgit-base-256": Published(12, halton_maskgit, DECODINGS),
    "halton-maskgit-large-384": Published(24, lambda layers: halton_maskgit(layers, **LARGE), DECODINGS[:1]),
}
