"""The norms and the rotation of queries and keys, where no other kernel of a step takes them along."""

import torch
import torch.nn.functional as F

from ...operation import operation
from ...rotary import rotate


@operation(whole=("table",))
def head_norms(
    states: torch.Tensor, query_gain: torch.Tensor, key_gain: torch.Tensor, eps: float, heads: int, table: torch.Tensor
) -> torch.Tensor:
    """The queries and keys [R, T, heads + key_heads, head_dim] among `states`, for any number of rows: an RMSNorm of
    each head, and a rotation of neighbouring pairs.

    Args:
        states: [R, T, heads + 2 key_heads, head_dim], contiguous: queries, keys and values.
        query_gain, key_gain: [head_dim], of the norms.
        eps: of the norms.
        heads: how many the queries have.
        table: the cosines and sines, float32 [R or 1, T, head_dim / 2, 2].
    """
    own = (states.shape[2] - heads) // 2
    query, key, _ = states.split([heads, own, own], dim=2)
    width = states.shape[-1:]
    normed = [F.rms_norm(part, width, gain, eps) for part, gain in ((query, query_gain), (key, key_gain))]
    return rotate(torch.cat(normed, dim=2), table)
