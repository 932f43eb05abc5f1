"""The reference of SiLU of a group norm in torch."""

import torch
import torch.nn.functional as F


def group_norm_silu(
    hidden: torch.Tensor, num_groups: int, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    # On a CPU, torch adds the numbers of a group one after another in channels_last: sums of large images stop growing
    normed = F.group_norm(hidden.contiguous(), num_groups, weight, bias, eps)
    # In place: on a CPU, SiLU spends most of its time on the pages of a large new tensor.
    return F.silu(normed, inplace=True)
