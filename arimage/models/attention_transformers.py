"""Attention of transformers' decoders whose heads share keys and values."""

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from .layers import attend, heads_per_key


FOLDED = "sdpa_folded"


def fold_heads(config: PretrainedConfig) -> int:
    """Let a decoder with "sdpa" attention take the masks of `additive` for heads that share keys, if any do: "sdpa"
    itself copies all keys and values for every head, in every layer. Everything else stays as it is. Returns the
    number of heads per key, for `additive`."""
    group = heads_per_key(config) if config._attn_implementation in ("sdpa", FOLDED) else 1
    if group > 1:
        config._attn_implementation = FOLDED
    return group


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **settings,
) -> tuple[torch.Tensor, None]:
    folded = query.shape[1] // key.shape[1] * query.shape[2]
    if attention_mask is None or attention_mask.shape[2] != folded:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **settings)
    return attend(query, key, value, attention_mask, scaling).transpose(1, 2), None


AttentionInterface.register(FOLDED, _attention)
AttentionMaskInterface.register(FOLDED, sdpa_mask)
