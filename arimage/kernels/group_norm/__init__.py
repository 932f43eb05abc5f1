"""Group norm and SiLU in one operation."""

import torch
import torch.nn.functional as F

from ..operation import operation


@operation(when=lambda *_: not torch.is_grad_enabled())
def group_norm_silu(
    hidden: torch.Tensor, num_groups: int, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    """SiLU of the group norm (https://arxiv.org/abs/1803.08494) of images [B, C, H, W], in their dtype.

    On a GPU without gradients, Triton computes both in float32, reads the images twice and writes them once, in their
    memory format. Elsewhere the result is contiguous.

    Args:
        hidden: float32, bfloat16 or float16, contiguous or channels_last.
        num_groups: a divisor of C.
        weight: [C], multiplied with the normalised channels.
        bias: [C], added afterwards.
        eps: added to the variance.
    """
    # On a CPU, torch adds the numbers of a group one after another in channels_last: sums of large images stop growing
    normed = F.group_norm(hidden.contiguous(), num_groups, weight, bias, eps)
    # In place: on a CPU, SiLU spends most of its time on the pages of a large new tensor.
    return F.silu(normed, inplace=True)
