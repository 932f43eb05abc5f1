"""The published shape of Emu3.5."""

from torch import nn
from transformers import Qwen3Config, Qwen3Model

from arimage.decoding import Sampling
from arimage.models.language_heads import CodeHead

from . import Bind, Bound, Published, build, language_model


def emu35(layers: int, side: int = 64, codes: int = 131072, **changes) -> Bind:
    width = {"hidden_size": 5120, "intermediate_size": 25600, "num_attention_heads": 64, "num_key_value_heads": 8}
    rope = {"rope_type": "default", "rope_theta": 1e6}
    config = Qwen3Config(
        vocab_size=151854 + codes, num_hidden_layers=layers, rope_parameters=rope, **(width | changes)
    )
    decoder = build(lambda: Qwen3Model(config))
    head = build(lambda: nn.Linear(config.hidden_size, 151854 + codes, bias=False))

    def bind(batch: int) -> Bound:
        embed = lambda tokens: decoder.embed_tokens(tokens + 151854)  # noqa: E731
        model = language_model(decoder, embed, CodeHead(head, 151854, codes), (side, side), batch, 151846)
        return Bound(model, Sampling(guidance_scale=5.0, top_k=5120), side * (side + 1) - 1, (decoder, head))

    return bind


PUBLISHED = {"emu3.5-image": Published(64, emu35, ("ar", "sjd-coupled", "sjd-tree"))}
