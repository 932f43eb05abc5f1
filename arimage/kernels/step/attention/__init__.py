"""Attention of a step to the cache of a layer."""

import torch

from ... import runs_triton
from . import reference


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
) -> torch.Tensor:
    """Attention [R, heads * head_dim] of `query` [R, heads, head_dim] to the cache of a layer, which reads the keys
    from the first to the last visible one only: the device finds them.

    Args:
        query: the queries of an image lie together, and images come once per branch. Those of a row have no gaps.
        keys, values: [rows, key_heads, places, head_dim], contiguous. Heads may share keys.
        seen: bool [rows, P], which tokens of the prompt a row sees. They end at `prefix_end`.
        first: the place of the image's first slot; the scratch slots begin at `prefix_end`.
        slots: int64 [M], where M divides R: a query sees the slots of the image up to its own. The queries of the
            first branch are given, which the others repeat.
        visible: bool [M, slots + scratch], what queries see in place of this rule, whatever `slots` says.
        table, positions: what queries are rotated by first, see `arimage.kernels.step.qkv`; None if they are already.
    """
    if runs_triton(query):
        from .triton import attention

        return attention(query, keys, values, seen, prefix_end, first, slots, visible, table, positions)
    return reference.attention(query, keys, values, seen, prefix_end, first, slots, visible, table, positions)
