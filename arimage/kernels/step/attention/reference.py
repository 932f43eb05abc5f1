"""The reference of attention in torch."""

import torch
import torch.nn.functional as F

from ...rotary.reference import rotate


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
