"""The transformer of Lumina-DiMOO (https://arxiv.org/abs/2510.06308): a masked language model of texts and images, of
the form of LLaDA (https://arxiv.org/abs/2502.09992). Every token attends to every other one."""

import torch
from diffusers import ConfigMixin
from diffusers.configuration_utils import register_to_config
from torch import nn

from ...models.layer_cache import LayerCache
from ...models.layers import Linear, additive, check_heads
from ...models.llama_blocks import Block
from ...models.mixin import ModelMixin, TransformerMixin
from ...models.rotary import turns_at
from ...settings.schema import Count, Epsilon, Layers, Positive, Share, Width, checked


class LuminaDiMOOTransformer(TransformerMixin, ModelMixin, ConfigMixin):
    """The transformer of Lumina-DiMOO. The defaults are the published model.

    Its vocabulary is that of texts, followed by the codes of the image tokenizer. It predicts codes only.

    Args:
        text_vocab_size (`int`): number of text tokens, special ones included.
        num_codes (`int`): number of codes.
        hidden_size, num_layers, num_attention_heads, intermediate_size (`int`): the shape.
        num_key_value_heads (`int`, *optional*): heads of keys and values, if fewer.
        norm_eps (`float`): added to mean squares in norms.
        rope_theta (`float`): base of the rotary positions.
        dropout (`float`): of the residual branches, in training.

    Raises:
        ValueError: if the width is not a multiple of twice the number of heads.
    """

    @register_to_config
    @checked
    def __init__(
        self,
        text_vocab_size: Count = 126_356,
        num_codes: Count = 8192,
        hidden_size: Width = 4096,
        num_layers: Layers = 32,
        num_attention_heads: Count = 32,
        num_key_value_heads: Count | None = None,
        intermediate_size: Width = 12_288,
        norm_eps: Epsilon = 1e-5,
        rope_theta: Positive = 500_000.0,
        dropout: Share = 0.0,
    ):
        super().__init__()
        check_heads(hidden_size, num_attention_heads, multiple=2)
        self.embedding = nn.Embedding(text_vocab_size + num_codes, hidden_size)
        self.blocks = nn.ModuleList(Block(self.config) for _ in range(num_layers))
        self.norm = nn.RMSNorm(hidden_size, norm_eps)
        self.head = Linear(hidden_size, num_codes, bias=False)

    def forward(
        self,
        input_ids: torch.LongTensor,
        positions: torch.LongTensor,
        visible: torch.BoolTensor | None = None,
        *,
        at: torch.LongTensor | None = None,
        cache: LayerCache | None = None,
    ) -> torch.Tensor:
        """One forward pass: logits of the codes [B, T or Q, num_codes].

        Args:
            input_ids: int64 [B, T].
            positions: int64 [B, T], where the tokens are in their sequences.
            visible: bool [B, K], which tokens are attended to; None for all. K is T, or with a cache what it holds.
            at: int64 [B, Q], the indices of the tokens whose logits are needed; None for all.
            cache: keeps keys and values; see `LayerCache`.
        """
        rotary = turns_at(positions[..., None], self.head_dim, self.config.rope_theta)
        mask = None if visible is None else additive(visible[:, None], self.dtype)
        hidden = self.embedding(input_ids)
        for layer, block in enumerate(self.blocks):
            hidden = block(hidden, rotary, mask, cache, layer)
        if at is not None:
            hidden = hidden.gather(1, at[..., None].expand(-1, -1, hidden.shape[-1]))
        return self.head(self.norm(hidden))
