"""The weights of a training: float32 masters, their optimizers and their moving average."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from ..settings.schema import COMPLETE, Count, Decay, Positive, Rate, Share, Steps, Text


# Numbers of a gradient that are added up at once: on a CPU, the float32 norm of a tensor of over 10**8 numbers is too
# small.
SUMMED = 2**24


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW with a linear warm-up, and then a `schedule` that ends at the share `final_share` of `learning_rate`; both
    begin again at each of `restarts`, a step and its learning rate. A step adds the gradients of `accumulate` batches.
    `ema_decay` is the decay of the averaged weights.

    Matrices whose names begin like one of `muon` are updated by Muon (https://kellerjordan.github.io/posts/muon/),
    scaled so that learning rate and weight decay mean what they mean to AdamW.
    """

    steps: Steps
    learning_rate: Rate
    weight_decay: Share = 0.05
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    warmup_steps: Steps = 50
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    final_share: Share = 0.05
    accumulate: Count = 1
    restarts: tuple[tuple[Steps, Rate], ...] = ()
    gradient_clip: Positive = 1.0
    ema_decay: Share = 0.999
    muon: tuple[Text, ...] = ()
    __pydantic_config__ = COMPLETE

    def __post_init__(self):
        steps = [step for step, _ in self.restarts]
        if steps != sorted(set(steps)):
            raise ValueError(f"restarts begin at the steps {steps}: give them in ascending order, each once")

    def learning_rate_at(self, step: int) -> float:
        start, highest, end = 0, self.learning_rate, self.steps
        for restart, learning_rate in reversed(self.restarts):
            if restart > step:
                end = restart
            else:
                start, highest = restart, learning_rate
                break
        warmup = min(1.0, (step - start + 1) / min(self.warmup_steps, end - start))
        progress = min(1.0, (step - start) / (end - start))
        left = {"cosine": 0.5 * (1 + math.cos(math.pi * progress)), "linear": 1 - progress, "constant": 1.0}
        return highest * warmup * (self.final_share + (1 - self.final_share) * left[self.schedule])

    def ema_decay_at(self, step: int) -> float:
        """Lower at first, where weights change much, as diffusers' `EMAModel` has it."""
        return min(self.ema_decay, (1 + step) / (10 + step)) if step else 0.0


class MasterWeights:
    """float32 masters of a module's parameters for the optimizer, and their exponential moving `averages`. Parameters
    in float32 share their memory with their masters.

    `learning_rate_scales` maps the beginnings of parameters' names to factors of their learning rate. Parameters may
    be sharded (`DTensor`): then so is all that is kept of them.
    """

    def __init__(
        self, module: nn.Module, settings: OptimizerSettings, learning_rate_scales: dict[str, float] | None = None
    ):
        self.settings = settings
        named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.names, self.parameters = list(named), list(named.values())
        self._dtypes = [p.dtype for p in self.parameters]
        self.masters = [nn.Parameter(p.detach().float()) for p in self.parameters]
        self.averages = [master.detach().clone() for master in self.masters]
        groups: dict[bool, dict[tuple[float, float], list[torch.Tensor]]] = {False: {}, True: {}}
        for name, master in zip(self.names, self.masters, strict=True):
            decay = settings.weight_decay if master.ndim > 1 else 0.0
            scale = math.prod(scale for start, scale in (learning_rate_scales or {}).items() if name.startswith(start))
            by_muon = master.ndim == 2 and name.startswith(tuple(settings.muon))
            groups[by_muon].setdefault((decay, scale), []).append(master)
        adam, muon = (
            [{"params": it, "weight_decay": decay, "scale": scale} for (decay, scale), it in of.items()]
            for of in groups.values()
        )
        self.optimizers = [torch.optim.AdamW(adam, betas=settings.betas, fused=True)]
        if muon:
            self.optimizers.append(torch.optim.Muon(muon, adjust_lr_fn="match_rms_adamw"))

    def use_masters(self) -> None:
        """Let the module have the float32 masters themselves, for gradients in float32."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.data = master.data

    def use_averages(self) -> None:
        """Let the module have the averaged weights, each in the dtype that it had at first."""
        for parameter, average, dtype in zip(self.parameters, self.averages, self._dtypes, strict=True):
            parameter.data = average.to(dtype)

    @torch.no_grad()
    def collect(self) -> None:
        """Add the gradients of the parameters to those of the masters, in float32."""
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            # Not every step need reach every parameter.
            if parameter.grad is None:
                continue
            gradient, parameter.grad = parameter.grad.float(), None
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)

    @torch.no_grad()
    def step(self, step: int) -> bool:
        """Take a step by the gradients, and clear them. If one of them is not finite, nothing else changes. Returns
        whether it was taken."""
        self.collect()
        gradients = [local(master.grad) for master in self.masters if master.grad is not None]
        norm = float(self.norm_of(gradients))
        finite = math.isfinite(norm)
        if finite:
            if norm > self.settings.gradient_clip:
                torch._foreach_mul_(gradients, self.settings.gradient_clip / (norm + 1e-6))
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = self.settings.learning_rate_at(step) * group["scale"]
                optimizer.step()
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                if parameter.dtype != master.dtype:
                    parameter.copy_(master)
            get_ema_multi_avg_fn(self.settings.ema_decay_at(step))(self.averages, self.masters, step)
        self.clear()
        return finite

    def norm_of(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """The norm of the gradients of all processes that the weights are divided over."""
        norm = nn.utils.get_total_norm([part for one in gradients for part in one.flatten().split(SUMMED)])
        if isinstance(self.masters[0], DTensor):
            squared = norm.square()
            distributed.all_reduce(squared)
            norm = squared.sqrt()
        return norm

    def clear(self) -> None:
        """Forget the gradients, which take memory."""
        for weight in (*self.parameters, *self.masters):
            weight.grad = None

    def check(self, remedy: str) -> None:
        """Refuse to go on with weights that are not finite."""
        if not all(local(weight).isfinite().all() for weight in (*self.masters, *self.averages)):
            raise ValueError(f"the weights are not finite any more: {remedy}")

    def state_dict(self) -> dict:
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        masters = [master.detach() for master in self.masters]
        return {"masters": masters, "averages": self.averages, "optimizers": optimizers}

    @torch.no_grad()
    def load_state_dict(self, state: dict) -> None:
        """Take over a state of whole tensors."""
        for name, own in (("masters", self.masters), ("averages", self.averages)):
            for one, saved in zip(own, state[name], strict=True):
                one.copy_(as_sharded(saved, one))
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            every = [master for group in optimizer.param_groups for master in group["params"]]
            found = {
                number: {name: as_sharded(value, every[number]) for name, value in of_one.items()}
                for number, of_one in saved["state"].items()
            }
            optimizer.load_state_dict({**saved, "state": found})
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.copy_(master)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this process has."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with the parts that other processes have; all of them call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def as_sharded(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A whole tensor as `like`, which has the shape of it, is sharded; a number stays as it is."""
    if not isinstance(like, DTensor) or tensor.shape != like.shape:
        return tensor
    # Every process has all of it.
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
