"""Muon (https://kellerjordan.github.io/posts/muon/) in the dtype that is fast on the device.

`torch.optim.Muon` orthogonalises in bfloat16, which on a CPU without bfloat16 instructions takes five times as long as
float32.
"""

import torch
from torch.optim import Optimizer

from ..options import fast_dtype
from .processes import average, processes


COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalised(update: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """A matrix with the singular vectors of `update` and singular values near 1, by Newton-Schulz iterations."""
    a, b, c = COEFFICIENTS
    wide = update if update.shape[0] <= update.shape[1] else update.T
    wide = (wide / wide.norm().clamp(min=1e-7)).to(fast_dtype(update.device))
    for _ in range(steps):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return (wide if update.shape[0] <= update.shape[1] else wide.T).to(update.dtype)


class Muon(Optimizer):
    """Momentum whose update of each matrix is orthogonalised, as large as one of AdamW: `lr` and `weight_decay` mean
    what they mean there."""

    def __init__(self, params, lr: float = 1e-3, weight_decay: float = 0.05, momentum: float = 0.95):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        pairs = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        (rank, count), updates = processes(), []
        for number, (group, parameter) in enumerate(pairs):
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            momentum = state["momentum_buffer"].lerp_(parameter.grad, 1 - group["momentum"])
            update = torch.zeros_like(parameter)
            # Each of the processes that train together takes its share of the matrices.
            if number % count == rank:
                update = count * orthogonalised(parameter.grad.lerp(momentum, group["momentum"]))
            updates.append(update)
        average(updates)
        for (group, parameter), update in zip(pairs, updates, strict=True):
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(update, alpha=-0.2 * group["lr"] * max(parameter.shape) ** 0.5)
