"""The published shape of Emu3."""

from torch import nn
from transformers import Emu3TextConfig, Emu3TextModel

from arimage.decoding import Sampling
from arimage.models.language_heads import CodeHead

from . import NARROW, Bind, Bound, Published, build, language_model


def emu3_gen(layers: int, side: int = 90, codes: int = 32768, **changes) -> Bind:
    width = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    config = Emu3TextConfig(vocab_size=151854 + codes, num_hidden_layers=layers, **(width | changes))
    decoder = build(lambda: Emu3TextModel(config))
    head = build(lambda: nn.Linear(config.hidden_size, 151854 + codes, bias=False))

    def bind(batch: int) -> Bound:
        embed = lambda tokens: decoder.embed_tokens(tokens + 151854)  # noqa: E731
        model = language_model(decoder, embed, CodeHead(head, 151854, codes), (side, side), batch, 151846)
        return Bound(model, Sampling(guidance_scale=3.0, top_k=2048), side * (side + 1) - 1, (decoder, head))

    return bind


TINY = {"side": 4, "codes": 64, "num_key_value_heads": 1, **NARROW}
PUBLISHED = {"emu3-gen": Published(32, emu3_gen, ("sjd-coupled", "sjd-tree"), TINY)}
