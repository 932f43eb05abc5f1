"""The guidance of InfinityStar: the part of the difference that is at right angles to the conditional logits (adaptive
projected guidance, https://arxiv.org/abs/2410.02416)."""

import torch


def projected_guidance(
    logits: torch.Tensor, guidance_scale: float | torch.Tensor, temperature: float | torch.Tensor, threshold: float
) -> torch.Tensor:
    """Guided logits [1, B, n, V] of the n tokens of a pass, after the temperature, from `logits` [2, B, n, V].

    The difference d of the conditional logits c and the unconditional ones, both divided by the temperature, is first
    shortened until its root mean square over the pass is at most `threshold`. Then its part parallel to c is removed:
    c + (guidance_scale - 1) d.

    Args:
        guidance_scale, temperature: a number, or one per film, [B].
    """
    guidance_scale, temperature = (
        number if isinstance(number, int | float) else number.view(-1, 1, 1)
        for number in (guidance_scale, temperature)
    )
    conditional, unconditional = (logits / temperature).unbind(0)
    difference = conditional - unconditional
    size = difference.square().mean((1, 2), keepdim=True).sqrt()
    difference = difference * (threshold / size).clamp(max=1)
    along = conditional.double() / conditional.double().square().sum((1, 2), keepdim=True).sqrt()
    parallel = (difference * along).sum((1, 2), keepdim=True) * along
    return (conditional + (guidance_scale - 1) * (difference - parallel).to(conditional.dtype))[None]
