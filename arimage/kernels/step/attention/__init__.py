"""Attention of a step to the cache of a layer."""

import torch
import torch.nn.functional as F

from ...operation import operation
from .. import has_few_rows
from ..head_norms import unit_heads
from ..turns import normed_heads, turned


@operation(whole=("seen", "visible"))
def attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seen: torch.BoolTensor,
    prefix_end: int,
    first: int,
    slots: torch.LongTensor,
    visible: torch.BoolTensor | None = None,
    table: torch.FloatTensor | None = None,
    positions: torch.LongTensor | None = None,
    halves: bool = False,
    ends: torch.LongTensor | None = None,
    columns: int = 1,
    gain: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Attention [R, heads * head_dim] of `query` [R, heads, head_dim] to the cache of a layer, which reads the keys
    from the first to the last visible one only: the device finds them.

    Args:
        query: the queries of an image lie together, and images come once per branch. Those of a row have no gaps.
        keys, values: [rows, key_heads, places, head_dim], contiguous. Heads may share keys.
        seen: bool [rows, P], which tokens of the prompt a row sees. They end at `prefix_end`.
        first: the place of the image's first slot; the row ends and the scratch slots begin at `prefix_end`.
        slots: int64 [M], where M divides R: a query sees the slots of the image up to its own. The queries of the
            first branch are given, which the others repeat.
        visible: bool [M, slots + scratch], what queries see in place of this rule, whatever `slots` says.
        table, positions, halves: what queries are rotated by first, see `arimage.kernels.step.qkv`; None if they are
            already.
        ends: int64 [M], how many of the image's tokens are in rows whose ends a query sees; None without row ends.
        columns: how many tokens a row has.
        gain, eps: [head_dim], of an RMSNorm of each head before that.
    """
    query = normed_heads(query, gain, None, eps)
    if positions is not None:
        query = turned(query, table, positions, halves)
    return _attended(query, keys, values, seen, prefix_end, first, slots, visible, ends, columns)


@operation(writes=("keys", "values"), whole=("seen", "visible"))
def normed_attention(
    states: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seen: torch.BoolTensor,
    prefix_end: int,
    first: int,
    slots: torch.LongTensor,
    index: torch.LongTensor,
    table: torch.FloatTensor | None,
    positions: torch.LongTensor,
    query_gain: torch.Tensor,
    key_gain: torch.Tensor,
    eps: float,
    query_bias: torch.Tensor | None = None,
    key_bias: torch.Tensor | None = None,
    visible: torch.BoolTensor | None = None,
    halves: bool = False,
    ends: torch.LongTensor | None = None,
    columns: int = 1,
) -> torch.Tensor:
    """`attention` of the queries among `states` [R, heads + 2 key_heads, head_dim], which takes a norm of each head
    before it rotates them, and the same of the keys, which come after them. These are written at `index` first, with
    the values, the last of `states`; see `arimage.kernels.step.qkv`.

    Args:
        table: as there, or None for no rotation.
        query_gain, key_gain: [head_dim] or [heads of each, head_dim], of the norms.
        eps: of the norms.
        query_bias, key_bias: as the gains, of LayerNorms; RMSNorms have none.
    """
    heads, own = states.shape[1] - 2 * keys.shape[1], keys.shape[1]
    query, key, value = states.split([heads, own, own], dim=1)
    query = turned(normed_heads(query, query_gain, query_bias, eps), table, positions, halves)
    row = torch.arange(len(keys), device=keys.device).repeat_interleave(len(key) // len(keys))
    key = turned(normed_heads(key, key_gain, key_bias, eps), table, positions, halves)
    at = index.repeat(len(key) // len(index))
    keys[row, :, at], values[row, :, at] = key, value
    return _attended(query, keys, values, seen, prefix_end, first, slots, visible, ends, columns)


@operation(writes=("keys", "values"), whole=("states", "seen", "table"))
def unit_attention(
    states: torch.Tensor,
    log_scale: torch.Tensor,
    length: float,
    scale: float,
    keys: torch.Tensor,
    values: torch.Tensor,
    seen: torch.BoolTensor,
    first: int,
    stop: int,
    table: torch.FloatTensor | None = None,
) -> torch.Tensor:
    """`attention` of the queries among `states` [R, 3 heads, head_dim] with those keys of the cache that lie before
    the place `stop`. Their own come last, and are written first; see `arimage.kernels.step.head_norms`.

    Args:
        log_scale, length, table: as there.
        scale: what the scores are multiplied by.
        seen: bool [rows, P], which tokens of the prompt a row sees. All after `first` are seen.
    """
    rows = states.unflatten(0, (len(keys), -1))
    count = rows.shape[1]
    query = unit_heads(rows, log_scale, length, keys, values, stop - count, table).flatten(0, 1)
    slots = torch.full((count,), stop - first - 1, device=query.device)
    return _attended(query, keys, values, seen, first, first, slots, scale=scale)


@operation(whole=("x", "seen"), when=has_few_rows)
def text_attention(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seen: torch.BoolTensor,
) -> torch.Tensor:
    """Attention [R, N] to a text of queries that are the product of rows `x` [R, D], after a LayerNorm, and `weight`
    [N, D]. A program makes its own queries: of few rows it has to wait for the keys anyway.

    Args:
        x: D is a multiple of 64.
        bias: [N].
        eps, norm_weight, norm_bias: of the norm, [D] each.
        keys, values: [rows, heads, P, head_dim] of equal strides, whose channels lie together.
        seen: bool [rows, P], which tokens of the text a row sees.
    """
    normed = F.layer_norm(x.float(), x.shape[1:], norm_weight.float(), norm_bias.float(), eps).to(weight.dtype)
    query = F.linear(normed, weight, bias).unflatten(1, (keys.shape[1], -1))
    slots, end = torch.full((len(x) // len(keys),), -1, device=x.device), keys.shape[2]
    return _attended(query, keys, values, seen, end, end, slots)


def _attended(
    query, keys, values, seen, prefix_end, first, slots, visible=None, ends=None, columns=1, scale=None
) -> torch.Tensor:
    rows, key_heads, places, _ = keys.shape
    branches = len(query) // len(slots)
    if visible is None:
        image = torch.arange(places - first, device=query.device) <= slots[:, None]
        between = image.new_zeros(len(slots), first - prefix_end)
        if ends is not None:
            between = (torch.arange(first - prefix_end, device=query.device) + 1) * columns <= ends[:, None]
    else:
        image, scratch = visible.tensor_split([places - first], dim=1)
        between = F.pad(scratch, (0, first - prefix_end - scratch.shape[1]))
    own = torch.cat([between, image], dim=1).repeat(branches, 1).unflatten(0, (rows, -1))
    prompt = F.pad(seen, (prefix_end - seen.shape[1], 0))[:, None].expand(-1, own.shape[1], -1)
    mask = torch.cat([prompt, own], dim=2)[:, None]
    shared = query.shape[1] // key_heads
    states = query.unflatten(0, (rows, -1)).transpose(1, 2)
    all_keys, all_values = (cached.repeat_interleave(shared, dim=1) for cached in (keys, values))
    attended = F.scaled_dot_product_attention(states, all_keys, all_values, attn_mask=mask, scale=scale)
    # A query that sees nothing gets zeros.
    return attended.where(mask.any(3, keepdim=True), 0).transpose(1, 2).reshape(len(query), -1)
