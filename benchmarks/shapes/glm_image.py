"""The published shape of GLM-Image's language model."""

import torch
from torch import nn
from transformers import GlmImageTextConfig, GlmImageTextModel

from arimage.decoding import Layout, Sampling
from arimage.models.language_heads import CodeHead
from arimage.models.language_model import LanguageTokenModel
from arimage.pipelines.glm_image.transformer_glm_image import token_positions

from . import NARROW, PROMPT, Bind, Bound, Published, build


def glm_image(layers: int, shape: tuple[int, int] = (32, 32), small: tuple[int, int] = (16, 16), **changes) -> Bind:
    """It has no guidance."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [8, 12, 12]}
    config = GlmImageTextConfig(num_hidden_layers=layers, **({"rope_parameters": rope} | changes))
    decoder = build(lambda: GlmImageTextModel(config))
    head = build(lambda: nn.Linear(config.hidden_size, config.vision_vocab_size, bias=False))
    layout = Layout(shape, before=[small])

    def bind(batch: int) -> Bound:
        model = LanguageTokenModel(
            decoder,
            embed=decoder.embed_tokens,
            head=CodeHead(head, 0, config.vision_vocab_size - 128),
            layout=layout,
            input_ids=torch.zeros(batch, PROMPT, dtype=torch.long),
            prompt_positions=torch.arange(PROMPT).expand(batch, 3, PROMPT),
            token_positions=token_positions([(rows, columns) for rows, columns in layout.grids]),
        )
        return Bound(model, Sampling(temperature=0.9, top_p=0.75), layout.num_tokens, (decoder, head))

    return bind


TINY = {
    "shape": (4, 4),
    "small": (2, 2),
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [1, 1, 2],
    },
    "num_key_value_heads": 1,
    "vocab_size": 256,
    "vision_vocab_size": 192,
    "pad_token_id": 0,
    "eos_token_id": 1,
    **NARROW,
}
PUBLISHED = {"glm-image": Published(40, glm_image, ("sjd-coupled", "sjd-tree"), TINY)}
