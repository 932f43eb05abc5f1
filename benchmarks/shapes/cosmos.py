"""The published shapes of Cosmos."""

from functools import partial

import torch

from arimage.decoding import Layout, Sampling
from arimage.pipelines.cosmos.transformer_cosmos import CosmosTokenModel, CosmosTransformer

from . import NARROW, Bind, Bound, Published, build


def cosmos(layers: int, text: bool = False, block: int = 1, frame: tuple[int, int] = (40, 64), **changes) -> Bind:
    """The 4B model, which continues a frame; or with the cross-attention to a text of the 5B."""
    shape = {"context_dim": 1024, **changes} if text else changes
    network = build(lambda: CosmosTransformer((5, *frame), num_layers=layers, block_tokens=block, **shape))

    def bind(batch: int) -> Bound:
        given = torch.zeros(batch, 1, *frame, dtype=torch.long)
        embeds = torch.zeros(batch, 512, 1024, dtype=torch.bfloat16) if text else None
        model = CosmosTokenModel(network, Layout((4, *frame)), given, embeds)
        return Bound(model, Sampling(top_p=0.8), model.num_tokens, (network,))

    return bind


TINY = {"frame": (2, 4), "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64, **NARROW}
PUBLISHED = {
    "cosmos-4b": Published(16, cosmos, ("sjd-coupled:init=previous",), TINY),
    "cosmos-5b": Published(16, partial(cosmos, text=True), ("ar",)),
}
