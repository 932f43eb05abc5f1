"""The published shape of MammothModa2's language model."""

import torch

from arimage.decoding import Layout, Sampling
from arimage.pipelines.mammothmoda2.transformer_mammothmoda2 import (
    MammothModa2Config,
    MammothModa2LanguageModel,
    bind_prompts,
)

from . import PROMPT, Bind, Bound, Published, build


def mammothmoda2(layers: int, side: int = 32, **changes) -> Bind:
    """Preview. The second half of its layers has experts."""
    width = {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4}
    shape = {"vocab_size": 152064, "gen_head_start": 152064, "expert_layers": [layers // 2, layers], **width}
    config = MammothModa2Config(backbone="qwen2", num_hidden_layers=layers, **(shape | changes))
    network = build(lambda: MammothModa2LanguageModel(config))

    def bind(batch: int) -> Bound:
        prompts = torch.zeros(2 * batch, PROMPT, dtype=torch.long)
        model = bind_prompts(network, prompts, None, Layout((side, side)), config.num_codes, branches=2)
        return Bound(model, Sampling(guidance_scale=7.0, top_k=2048), side * (side + 1) - 1, (network,))

    return bind


PUBLISHED = {"mammothmoda2-preview": Published(28, mammothmoda2, ("ar", "sjd-coupled", "sjd-tree"))}
