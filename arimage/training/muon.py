"""Muon (https://kellerjordan.github.io/posts/muon/) in the dtype that is fast on the device.

`torch.optim.Muon` orthogonalises in bfloat16, which on a CPU without bfloat16 instructions takes five times as long as
float32.
"""

from collections import defaultdict

import torch
from torch.optim import Optimizer

from ..cli.options import fast_dtype
from .processes import average, processes


COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalised(updates: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Matrices [M, rows, columns] with the singular vectors of `updates` and singular values near 1, by Newton-Schulz
    iterations."""
    a, b, c = COEFFICIENTS
    wide = updates if updates.shape[1] <= updates.shape[2] else updates.mT
    wide = (wide / wide.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)).to(fast_dtype(updates.device))
    for _ in range(steps):
        gram = wide @ wide.mT
        wide = torch.baddbmm(wide, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return (wide if updates.shape[1] <= updates.shape[2] else wide.mT).to(updates.dtype)


class Muon(Optimizer):
    """Momentum whose update of each matrix is orthogonalised, as large as one of AdamW: `lr` and `weight_decay` mean
    what they mean there."""

    def __init__(self, params, lr: float = 1e-3, weight_decay: float = 0.05, momentum: float = 0.95):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        pairs = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        (rank, count), updates = processes(), []
        # Each of the processes that train together takes its share of the matrices, those of one shape at once.
        own: dict[torch.Size, list[int]] = defaultdict(list)
        for number, (group, parameter) in enumerate(pairs):
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            momentum = state["momentum_buffer"].lerp_(parameter.grad, 1 - group["momentum"])
            updates.append(parameter.grad.lerp(momentum, group["momentum"]))
            if number % count == rank:
                own[parameter.shape].append(number)
            else:
                updates[number].zero_()
        for numbers in own.values():
            together = count * orthogonalised(torch.stack([updates[number] for number in numbers]))
            for number, update in zip(numbers, together, strict=True):
                updates[number] = update
        average(updates)
        for (group, parameter), update in zip(pairs, updates, strict=True):
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(update, alpha=-0.2 * group["lr"] * max(parameter.shape) ** 0.5)
