"""Attention of a step to the cache of a layer."""

import torch
import torch.nn.functional as F

from ...operation import operation
from ...rotary import rotate


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
    rows, key_heads, places, _ = keys.shape
    branches = len(query) // len(slots)
    if table is not None:
        query = rotate(query[None], table[positions].repeat(branches, 1, 1)[None])[0]
    if visible is None:
        image = torch.arange(places - first, device=query.device) <= slots[:, None]
        between = image.new_zeros(len(slots), first - prefix_end)
    else:
        image, scratch = visible.tensor_split([places - first], dim=1)
        between = F.pad(scratch, (0, first - prefix_end - scratch.shape[1]))
    own = torch.cat([between, image], dim=1).repeat(branches, 1).unflatten(0, (rows, -1))
    prompt = F.pad(seen, (prefix_end - seen.shape[1], 0))[:, None].expand(-1, own.shape[1], -1)
    mask = torch.cat([prompt, own], dim=2)[:, None]
    shared = query.shape[1] // key_heads
    states = query.unflatten(0, (rows, -1)).transpose(1, 2)
    all_keys, all_values = (cached.repeat_interleave(shared, dim=1) for cached in (keys, values))
    attended = F.scaled_dot_product_attention(states, all_keys, all_values, attn_mask=mask)
    # A query that sees nothing gets zeros.
    return attended.where(mask.any(3, keepdim=True), 0).transpose(1, 2).reshape(len(query), -1)
