"""The language model of MammothModa2 (https://github.com/bytedance/mammothmoda): a Qwen2 or Qwen3 decoder with a
vocabulary, feed-forward layers and a head of their own for the tokens of images."""

from typing import Annotated

import torch
from pydantic import Field
from transformers import PreTrainedModel, Qwen3Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding

from ...models import bound_prompts
from ...models.language_model import LanguageTokenModel
from ...models.two_vocabularies import TwoVocabularyModel
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


# diffusers finds how a component is loaded by the name of a base in its module.
class MammothModa2LanguageModel(TwoVocabularyModel, PreTrainedModel):
    """The decoder and the head of generation tokens. Where no token is text, the feed-forward layers of text do not
    run in layers that have others."""

    config: MammothModa2Config
    _no_split_modules = ["MammothModa2DecoderLayer"]

    def __init__(self, config: MammothModa2Config):
        super().__init__(config, MammothModa2DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding)
        self.post_init()


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
    """The `TokenModel` of prompts, see `bound_prompts.bind_prompts`; `branches` is 1, or 2 for the prompts of
    `with_headers`."""
    config = model.config
    first = config.visual_token_start_id - config.gen_vocab_start_index
    codes = torch.arange(first, first + num_codes, device=input_ids.device)
    return bound_prompts.bind_prompts(
        model,
        input_ids,
        attention_mask,
        layout,
        num_codes,
        first=first,
        head_first=config.visual_token_start_id - config.gen_head_start,
        row_end=config.row_end_id - config.gen_vocab_start_index,
        # The vectors of the image tokenizer, which generates nothing and is not converted, are not there. A look-up,
        # since offloading brings a weight only for the forward pass of its module.
        codebook=model.get_input_embeddings()(codes),
        branches=branches,
    )
