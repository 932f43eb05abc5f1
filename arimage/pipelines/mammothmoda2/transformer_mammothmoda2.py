"""The language model of MammothModa2 (https://github.com/bytedance/mammothmoda): a Qwen2 or Qwen3 decoder with a
vocabulary, feed-forward layers and a head of their own for the tokens of images."""

import os
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import nn
from transformers import PreTrainedModel, Qwen3Config
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding

from ...models.cache_transformers import cache_argument
from ...models.language_model import LanguageTokenModel, code_head
from ...models.layers import additive, causal_mask
from ...models.saved_files import check_savable, replace_files, weights_in
from ...models.weight_files import check_found
from ...settings.schema import Whole, check


Indices = list[Annotated[int, Field(strict=True)]]


class MammothModa2Config(Qwen3Config):
    """The configuration of `MammothModa2LanguageModel`: that of a Qwen3, and

    Attributes:
        backbone: "qwen2" (Preview), whose queries, keys and values have biases, or "qwen3" (Dev), whose queries and
            keys have norms.
        gen_vocab_start_index: the id of the first generation token: `gen_embed_tokens` has the tokens from there on.
        gen_vocab_size: the number of generation tokens.
        gen_head_start: the id of the token whose logit is the first of `gen_head`, at most `gen_vocab_start_index`.
        expert_layers: the first layer with a feed-forward layer for generation tokens, and the first one after these.
        condition_layers: the hidden states whose mean is the decoder's condition, as indices among the embedding, the
            outputs of the layers but the last, and the normed output of the last.
        visual_token_start_id: the id of image token 0.
        row_end_id: the id of the token that ends a row.
        image_end_id: the id of the token after an image.
        placeholder_ids: the ids of the text tokens that stand for images and videos.
    """

    model_type = "mammothmoda2_language_model"

    backbone: str = "qwen3"
    gen_vocab_start_index: int = 152064
    gen_vocab_size: int = 32800
    gen_head_start: int = 151936
    expert_layers: tuple[int, int] | list[int] = (18, 36)
    condition_layers: tuple[int, ...] | list[int] = (-1,)
    visual_token_start_id: int = 152072
    row_end_id: int = 152064
    image_end_id: int = 152071
    placeholder_ids: tuple[int, ...] | list[int] = ()

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        if self.backbone not in ("qwen2", "qwen3"):
            raise ValueError(f"backbone is {self.backbone!r}: give 'qwen2' or 'qwen3'")
        first, last = self.gen_vocab_start_index, self.gen_vocab_start_index + self.gen_vocab_size - 1
        if not self.gen_head_start <= first or not self.vocab_size <= first:
            raise ValueError(
                f"vocab_size is {self.vocab_size} and gen_head_start {self.gen_head_start}: give at most "
                f"gen_vocab_start_index, {first}"
            )
        for name in ("visual_token_start_id", "row_end_id", "image_end_id"):
            if not first <= getattr(self, name) <= last:
                raise ValueError(f"{name} is {getattr(self, name)}: give a generation token, {first} .. {last}")
        if self.num_codes < 1:
            raise ValueError(
                f"gen_head_start is {self.gen_head_start}: give more than {self.visual_token_start_id} less "
                f"gen_vocab_size, {self.gen_vocab_size}"
            )
        check(list[Whole], self.placeholder_ids, "placeholder_ids")
        check(Indices, self.condition_layers, "condition_layers")
        depth = self.num_hidden_layers
        if not self.condition_layers or not all(-depth - 1 <= layer <= depth for layer in self.condition_layers):
            raise ValueError(f"condition_layers are {self.condition_layers}: give some of {-depth - 1} .. {depth}")

    @property
    def num_codes(self) -> int:
        """The number of tokens from `visual_token_start_id` on that `gen_head` has a row for."""
        return self.gen_head_start + self.gen_vocab_size - self.visual_token_start_id


class MammothModa2DecoderLayer(Qwen3DecoderLayer):
    """A layer of a Qwen3, or of a Qwen2, perhaps with a second feed-forward layer, for generation tokens."""

    def __init__(self, config: MammothModa2Config, layer_idx: int):
        super().__init__(config, layer_idx)
        if config.backbone == "qwen2":
            self.self_attn = Qwen2Attention(config, layer_idx)
        first, end = config.expert_layers
        self.gen_mlp = Qwen3MLP(config) if first <= layer_idx < end else None

    def forward(self, hidden: torch.Tensor, text: torch.BoolTensor | None, **attention) -> torch.Tensor:
        """`text`, bool [B, T, 1], says which tokens are text; without it none is."""
        hidden = hidden + self.self_attn(hidden_states=self.input_layernorm(hidden), **attention)[0]
        normed = self.post_attention_layernorm(hidden)
        if self.gen_mlp is None:
            return hidden + self.mlp(normed)
        output = self.gen_mlp(normed)
        return hidden + (output if text is None else torch.where(text, self.mlp(normed), output))


class MammothModa2LanguageModel(PreTrainedModel):
    """The decoder and the head of generation tokens.

    Embeddings of tokens have one channel more than hidden states, 1 for text tokens and 0 for generation tokens. Those
    of generation tokens may be without it: then no token is text, and the feed-forward layers of text do not run where
    there are others.
    """

    config: MammothModa2Config
    base_model_prefix = "model"
    _no_split_modules = ["MammothModa2DecoderLayer"]
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config: MammothModa2Config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.gen_embed_tokens = nn.Embedding(config.gen_vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(MammothModa2DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        self.gen_head = nn.Linear(config.hidden_size, config.gen_vocab_size, bias=False)
        self._cache_argument = cache_argument(self.layers[0].self_attn)
        self.post_init()

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
        hidden = self.norm(hidden)
        return BaseModelOutputWithPast(
            last_hidden_state=hidden, hidden_states=(*states, hidden) if output_hidden_states else None
        )


def read_sequence(model: MammothModa2LanguageModel, ids: torch.LongTensor) -> torch.Tensor:
    """What the diffusion decoder reads of a sequence of tokens [T], a vector per token, [T, D]."""
    states = model(input_ids=ids[None], output_hidden_states=True).hidden_states
    return torch.stack([states[layer][0] for layer in model.config.condition_layers]).mean(dim=0)


def with_headers(
    input_ids: torch.LongTensor, attention_mask: torch.Tensor, header: int
) -> tuple[torch.LongTensor, torch.BoolTensor]:
    """Prompts [B, P], padded on the left, then the same with nothing but their last `header` tokens, [2 * B, P], and
    their mask. Tokens that are not seen are equal, so that equal headers are prefilled once."""
    mask = attention_mask.bool()
    last = torch.arange(input_ids.shape[1], 0, -1, device=input_ids.device) <= header
    masks = torch.cat([mask, mask & last])
    return torch.where(masks, input_ids.repeat(2, 1), input_ids[:, -1:].repeat(2, 1)), masks


def bind_prompts(
    model: MammothModa2LanguageModel,
    input_ids: torch.LongTensor,
    attention_mask: torch.Tensor | None,
    layout,
    num_codes: int,
    branches: int,
) -> LanguageTokenModel:
    """The `TokenModel` of prompts.

    Args:
        input_ids, attention_mask: int64 [branches * B, P], padded on the left.
        layout: the `Layout` of the image.
        num_codes: V, the tokens that can be sampled, from `visual_token_start_id` on.
        branches: 1, or 2 for the prompts of `with_headers`.
    """
    config, table = model.config, model.get_input_embeddings()
    first = config.visual_token_start_id - config.gen_vocab_start_index
    head = code_head(model.gen_head, config.visual_token_start_id - config.gen_head_start, num_codes)
    codes = torch.arange(first, first + num_codes, device=input_ids.device)
    bound = LanguageTokenModel(
        model,
        embed=lambda tokens: table(tokens + first),
        # Prompts have one channel more than hidden states.
        head=lambda hidden: head(hidden[..., : config.hidden_size]),
        layout=layout,
        inputs_embeds=model.embed(input_ids),
        attention_mask=attention_mask,
        row_end=config.row_end_id - config.gen_vocab_start_index,
        # The vectors of the image tokenizer, which generates nothing and is not converted, are not there. A look-up,
        # since offloading brings a weight only for the forward pass of its module.
        codebook=table(codes),
        branches=branches,
    )
    bound.conditions.ids = input_ids
    return bound
