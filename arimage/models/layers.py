"""Layers and masks that the transformers of this package share."""

import torch
import torch.nn.functional as F
from torch import nn

from ..kernels.linear import linear


class Linear(nn.Linear):
    """`nn.Linear` by `arimage.kernels.linear`."""

    # See `QuantizedLinear`.
    scale: torch.FloatTensor | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return linear(hidden, self.weight, self.bias)


# So many numbers of a norm do not fit the first cache of a core.
_LARGE = 1 << 15


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`F.rms_norm` over the last dimension, bit by bit, in less time for many rows on a CPU."""
    plain = type(hidden) is torch.Tensor and hidden.is_cpu and not torch.compiler.is_compiling()
    trained = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    alike = hidden.dtype == weight.dtype in (torch.float32, torch.bfloat16) and not torch.is_autocast_enabled("cpu")
    if not plain or trained or not alike or hidden.numel() < _LARGE:
        return F.rms_norm(hidden, hidden.shape[-1:], weight, eps)
    wide = hidden.float()
    squares = wide.square()
    scale = squares.mean(-1, keepdim=True).add_(eps).rsqrt_()
    return torch.mul(wide, scale, out=squares).mul_(weight).to(hidden.dtype)


class RMSNorm(nn.RMSNorm):
    """`nn.RMSNorm` by `rms_norm`."""

    weight: torch.Tensor
    eps: float

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden, self.weight, self.eps)


class GroupNorm(nn.GroupNorm):
    """`nn.GroupNorm` that is as precise for large images as for small ones.

    On a CPU, torch adds the numbers of a group one after another if images are in channels_last, so that sums stop
    growing: images of 2,048 pixels are off by several levels. Contiguous images have no such error.
    """

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden.contiguous())


def refine_norms(model: nn.Module) -> None:
    """Make every `nn.GroupNorm` in a model a `GroupNorm`, such as those of diffusers' autoencoders: their attention
    leaves images in channels_last."""
    for module in model.modules():
        if type(module) is nn.GroupNorm:
            module.__class__ = GroupNorm


class FeedForward(nn.Module):
    """The gated feed-forward layer of Llama."""

    def __init__(self, hidden_size: int, intermediate_size: int, dropout: float = 0.0):
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return self.dropout(hidden) if self.training else hidden


def embed_known(embedding: nn.Module, tokens: torch.LongTensor) -> torch.Tensor:
    """The embeddings of tokens [...], where -1 is not known yet: a zero vector is neutral."""
    return embedding(tokens.clamp(min=0)).masked_fill((tokens < 0)[..., None], 0)


def init_normal(network: nn.Module, std: float = 0.02) -> None:
    """Initialise the weights of all linear layers and embeddings with N(0, std), in place."""
    for module in network.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=std)


def causal_mask(prefix_mask: torch.BoolTensor, count: int, first: int = 0) -> torch.BoolTensor:
    """The keys that each of P prefix and `count` image positions from `first` on sees, bool
    [B, P + count - first, P + count]: itself, the image positions before it, and the prefix positions before it that
    `prefix_mask` [B, P] shows."""
    batch, start = prefix_mask.shape
    length = start + count
    mask = torch.ones(length - first, length, dtype=torch.bool, device=prefix_mask.device).tril(first)
    mask = mask.repeat(batch, 1, 1)
    mask[:, :, :start] &= prefix_mask[:, None]
    # A hidden prefix position would see nothing and become NaN.
    mask.diagonal(first, dim1=1, dim2=2).fill_(True)
    return mask


def check_heads(hidden_size: int, heads: int, multiple: int = 1) -> None:
    """Refuse attention heads whose width is not a whole `multiple` of channels."""
    if hidden_size % heads or hidden_size // heads % multiple:
        width = "a whole number" if multiple == 1 else f"a multiple of {multiple}"
        raise ValueError(f"hidden_size {hidden_size} over {heads} heads: the width of a head must be {width}")


def heads_per_key(config) -> int:
    """How many attention heads share keys and values."""
    return config.num_attention_heads // (config.num_key_value_heads or config.num_attention_heads)


def check_groups(heads: int, key_value_heads: int) -> None:
    """Refuse attention whose heads cannot share the keys and values in equal groups."""
    if heads % key_value_heads:
        raise ValueError(
            f"num_key_value_heads is {key_value_heads}: give a number that divides the {heads} attention heads"
        )


def additive(visible: torch.BoolTensor, dtype: torch.dtype, group: int = 1) -> torch.Tensor:
    """What attention adds to its scores in all layers, [B, 1, group * Q, K]: 0 for a `visible` key [B, Q, K], -inf for
    another. `group` heads share keys and values, see `attend`."""
    scores = visible.to(dtype).log()[:, None]
    return scores if group == 1 else scores.repeat(1, 1, group, 1)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """`F.scaled_dot_product_attention` of `query` [B, heads, Q, D] with `key` and `value` [B, key_value_heads, K, D].
    `mask` is that of `additive`. `causal` is its `is_causal`, in place of a mask."""
    slow = query.device.type == "cpu" and query.dtype != torch.float32
    group = query.shape[1] // key.shape[1]
    if slow and query.requires_grad and group == 1 and not causal:
        # In training PyTorch's bfloat16 kernel takes twice as long as plain products, including the backward pass.
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        scores = (query * scale) @ key.transpose(-1, -2)
        return (scores if mask is None else scores + mask).softmax(-1) @ value
    if mask is not None and group > 1:
        # No fused kernel takes both a mask and heads that share keys, so these heads become queries of one head.
        heads = query.unflatten(1, (-1, group))
        attended = attend(heads.flatten(2, 3), key, value, mask, scale)
        return attended.unflatten(2, (group, -1)).flatten(1, 2)
    alone = slow and query.shape[2] == 1
    if alone:
        # PyTorch takes three times as long for one query in bfloat16 as for two.
        query = query.expand(-1, -1, 2, -1).contiguous()
    attended = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=group > 1
    )
    return attended[:, :, :1] if alone else attended


def attend_heads(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    cache=None,
    layer: int = 0,
    scale: float | None = None,
) -> torch.Tensor:
    """`attend` of [B, T, heads, D] each, whose keys and values are first written to the cache, if there is one:
    [B, T, heads * D]."""
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if cache is not None:
        key, value = cache.write(layer, key, value)
    return attend(query, key, value, mask, scale).transpose(1, 2).flatten(2)
