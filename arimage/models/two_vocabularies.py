"""Language models with a vocabulary of their own for the tokens of images."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from .cache_transformers import cache_argument
from .layers import additive, causal_mask
from .saved_files import check_savable, replace_files, weights_in
from .weight_files import check_found


class TwoVocabularyModel(PreTrainedModel):
    """Base of decoders whose generation tokens, from `config.gen_vocab_start_index` on, have embeddings and layers of
    their own.

    Embeddings of tokens have one channel more than hidden states, 1 for text tokens and 0 for generation tokens. Those
    of generation tokens may be without it: then no token is text.

    Args:
        config: has `gen_vocab_start_index` and `gen_vocab_size`.
        layer, norm, rotary: the classes of the decoder layers, called with hidden states [B, T, D] and with which
            tokens are text, bool [B, T, 1] or None for none, and those of norms and rotary embeddings.
    """

    base_model_prefix = "model"
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config: Any, layer: type[nn.Module], norm: type[nn.Module], rotary: type[nn.Module]):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.gen_embed_tokens = nn.Embedding(config.gen_vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = norm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = rotary(config)
        self.gen_head = nn.Linear(config.hidden_size, config.gen_vocab_size, bias=False)
        self._cache_argument = cache_argument(self.layers[0].self_attn)

    def get_input_embeddings(self) -> nn.Module:
        return self.gen_embed_tokens

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike, *args, **kwargs) -> Any:
        """See `PreTrainedModel.from_pretrained`.

        Raises:
            ValueError: if a weight is missing, unexpected or of another shape.
        """
        with_info = kwargs.pop("output_loading_info", False)
        loaded: Any = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        if with_info:
            return loaded
        check_found(loaded[1], pretrained_model_name_or_path)
        return loaded[0]

    def save_pretrained(self, save_directory: str | os.PathLike, *, variant: str | None = None, **options) -> None:
        """See `PreTrainedModel.save_pretrained`. What an earlier save wrote is replaced once all is written.

        Raises:
            ValueError: if the weights are not those of the model: cast layer by layer, or offloaded.
        """
        check_savable("the language model", self)
        folder, save = Path(save_directory), partial(super().save_pretrained, variant=variant, **options)
        replace_files(folder, save, weights_in(folder, variant), "config.json")

    def embed(self, ids: torch.LongTensor) -> torch.Tensor:
        """Embeddings [B, T, D + 1] of tokens [B, T] of both vocabularies."""
        first, table = self.config.gen_vocab_start_index, self.embed_tokens
        text = (ids < first)[..., None]
        embedded = torch.where(
            text,
            table(ids.clamp(max=len(table.weight) - 1)),
            self.gen_embed_tokens((ids - first).clamp(min=0)),
        )
        return torch.cat([embedded, text.to(embedded)], dim=-1)

    def normed(self, hidden: torch.Tensor, text: torch.BoolTensor | None) -> torch.Tensor:
        """The hidden states [B, T, D] after the last norm."""
        return self.norm(hidden)

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache=None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool = False,
    ) -> BaseModelOutputWithPast:
        """Hidden states [B, T, D].

        Args:
            input_ids: int64 [B, T].
            attention_mask: a 4-D additive mask; None for causal attention without padding.
            position_ids: RoPE positions [B, T], by default from 0 on.
            cache: what keys and values are written to and read from.
            inputs_embeds: in place of `input_ids`, those of `embed`, or embeddings [B, T, D] of generation tokens.
            output_hidden_states: whether to return the embedding, the outputs of the layers but the last, and the
                normed output of the last.
        """
        embedded = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        hidden, text = embedded[..., : self.config.hidden_size], None
        if embedded.shape[-1] > self.config.hidden_size:
            text = embedded[..., -1:].bool()
        if position_ids is None:
            position_ids = torch.arange(hidden.shape[1], device=hidden.device)[None]
        if attention_mask is None:
            prefix = hidden.new_ones(1, hidden.shape[1], dtype=torch.bool)
            attention_mask = additive(causal_mask(prefix, 0), hidden.dtype)
        attention = {
            "attention_mask": attention_mask,
            "position_embeddings": self.rotary_emb(hidden, position_ids),
            self._cache_argument: cache,
        }
        states = []
        for layer in self.layers:
            states.append(hidden)
            hidden = layer(hidden, text, **attention)
        hidden = self.normed(hidden, text)
        return BaseModelOutputWithPast(
            last_hidden_state=hidden, hidden_states=(*states, hidden) if output_hidden_states else None
        )
