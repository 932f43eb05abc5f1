"""The published shapes of Lumina-mGPT and Anole."""

from functools import partial

from torch import nn
from transformers import ChameleonConfig, ChameleonModel

from arimage.decoding import Sampling
from arimage.models.language_heads import CodeHead

from . import Bind, Bound, Published, build, language_model


def chameleon_7b(layers: int, side: int, row_end: int | None) -> Bind:
    width = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": layers, "num_attention_heads": 32}
    # The tokenizer is part of the decoder in transformers, and of no step.
    vq = {"base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1}
    config = ChameleonConfig(vocab_size=65536, vocabulary_map={"<image>": 8711}, vq_config=vq, **width)
    decoder = build(lambda: ChameleonModel(config))
    head = build(lambda: nn.Linear(4096, 65536, bias=False))

    def bind(batch: int) -> Bound:
        embed = lambda tokens: decoder.embed_tokens(tokens + 4)  # noqa: E731
        model = language_model(decoder, embed, CodeHead(head, 4, 8192), (side, side), batch, row_end)
        slots = side**2 if row_end is None else side * (side + 1) - 1
        return Bound(model, Sampling(guidance_scale=4.0, top_k=2000), slots, (decoder, head))

    return bind


PUBLISHED = {
    "lumina-mgpt-7b-768": Published(32, partial(chameleon_7b, side=48, row_end=8803), ("sjd-coupled", "sjd-tree")),
    "anole-7b": Published(32, partial(chameleon_7b, side=32, row_end=None), ("sjd-coupled",)),
}
