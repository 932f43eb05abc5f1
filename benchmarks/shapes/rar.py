"""The published shapes of RAR."""

from typing import Any

from arimage.decoding import Layout, Sampling
from arimage.pipelines.rar.transformer_rar import RARTokenModel, RARTransformer

from . import Bind, Bound, Published, build, class_condition


XXL = {"hidden_size": 1408, "intermediate_size": 6144}


def rar(layers: int, **size: Any) -> Bind:
    network = build(lambda: RARTransformer(num_layers=layers, **size))

    def bind(batch: int) -> Bound:
        side = network.config.grid_size
        model = RARTokenModel(network, class_condition(batch), Layout((side, side)), guided=True)
        sampling = Sampling(guidance_scale=8.0, guidance_scale_pow=1.2, guidance_length=side**2)
        return Bound(model, sampling, side**2, (network,))

    return bind


PUBLISHED = {
    "rar-b-256": Published(24, rar, ("ar", "sjd", "sjd-coupled")),
    "rar-xxl-256": Published(40, lambda layers: rar(layers, **XXL), ("ar", "sjd-coupled")),
}
