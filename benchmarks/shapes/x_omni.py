"""The published shape of X-Omni's language model."""

import torch

from arimage.decoding import Layout, Sampling
from arimage.models.bound_prompts import bind_prompts
from arimage.pipelines.x_omni.transformer_x_omni import XOmniConfig, XOmniLanguageModel

from . import PROMPT, Bind, Bound, Published, build


def x_omni(layers: int, side: int = 72, **changes) -> Bind:
    width = {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4}
    ends = {"num_mm_adap_layers": layers // 9, "num_mm_head_layers": layers // 9}
    config = XOmniConfig(vocab_size=152064, num_hidden_layers=layers, **(width | ends | changes))
    network = build(lambda: XOmniLanguageModel(config))

    def bind(batch: int) -> Bound:
        prompts = torch.zeros(2 * batch, PROMPT, dtype=torch.long)
        model = bind_prompts(network, prompts, None, Layout((side, side)), config.num_codes, branches=2)
        return Bound(model, Sampling(guidance_scale=2.0, min_p=0.03), side**2, (network,))

    return bind


PUBLISHED = {"x-omni-en": Published(36, x_omni, ("ar", "sjd-coupled"))}
