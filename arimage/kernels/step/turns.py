"""Norms and rotations of heads in a step, in torch."""

import torch
import torch.nn.functional as F

from ..rotary import rotate


def normed_heads(
    states: torch.Tensor, gain: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """A norm of each head of `states` [R, heads, head_dim]: a LayerNorm if there is a `bias`, else an RMSNorm. `gain`
    and `bias` are [head_dim] or [heads, head_dim]; without `gain` there is none."""
    if gain is None:
        return states
    width = states.shape[-1:]
    if bias is None:
        return F.rms_norm(states, width, None, eps) * gain
    return F.layer_norm(states, width, None, None, eps) * gain + bias


def turned(
    states: torch.Tensor, table: torch.FloatTensor | None, positions: torch.LongTensor, halves: bool
) -> torch.Tensor:
    """`states` [R, heads, head_dim] rotated in float32, see `arimage.kernels.step.qkv`."""
    if table is None:
        return states
    turns = table[positions].repeat(len(states) // len(positions), 1, 1)
    width = 2 * turns.shape[1]
    first, rest = states.tensor_split([width], dim=2)
    if halves:
        pairs = first.unflatten(2, (2, -1)).mT.flatten(2)
        first = rotate(pairs[None], turns[None])[0].unflatten(2, (-1, 2)).mT.flatten(2)
    else:
        first = rotate(first[None], turns[None])[0]
    return torch.cat([first, rest], dim=2) if rest.shape[2] else first
