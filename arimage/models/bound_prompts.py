"""The `TokenModel` of prompts for a language model with generation tokens of its own."""

from typing import Any

import torch

from .language_heads import CodeHead
from .language_model import LanguageTokenModel
from .two_vocabularies import TwoVocabularyModel


def bind_prompts(
    model: TwoVocabularyModel,
    input_ids: torch.LongTensor,
    attention_mask: torch.Tensor | None,
    layout,
    num_codes: int,
    *,
    first: int = 0,
    head_first: int = 0,
    **settings: Any,
) -> LanguageTokenModel:
    """The `TokenModel` of prompts.

    Args:
        input_ids, attention_mask: int64 [branches * B, P], padded on the left.
        layout: the `Layout` of the image.
        num_codes: V, how many generation tokens can be sampled.
        first, head_first: the rows of their embeddings and of the head that belong to the first of them.
        settings: further arguments of `LanguageTokenModel`.
    """
    table = model.get_input_embeddings()
    bound = LanguageTokenModel(
        model,
        embed=(lambda tokens: table(tokens + first)) if first else table,
        head=CodeHead(model.gen_head, head_first, num_codes, model.config.hidden_size),
        layout=layout,
        inputs_embeds=model.embed(input_ids),
        attention_mask=attention_mask,
        **settings,
    )
    bound.conditions.ids = input_ids
    return bound
