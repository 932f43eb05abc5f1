"""Networks that are divided over the processes that train together (FSDP2): each holds a part of the weights, their
gradients, moments and averages, and gathers those of a block while it computes with it."""

import copy

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from .optimizer import MasterWeights, whole
from .processes import processes


class Shards:
    """The networks of a task, its children, divided over the processes. The first process has plain copies of them,
    without weights but while it reports.

    Args:
        model: the module whose forward pass computes a loss of the task.
        half: the dtype of the forward and backward pass; None: that of the weights. Gradients are reduced in float32.
    """

    def __init__(self, model: nn.Module, task: nn.Module, half: torch.dtype | None):
        self.copies = {name: _without_weights(network) for name, network in task.named_children()}
        for parameter in task.parameters():
            parameter.data = parameter.data.float()
        device = next(task.parameters()).device.type
        mesh = init_device_mesh(device, (processes()[1],))
        policy = MixedPrecisionPolicy(half, half and torch.float32, cast_forward_inputs=False)
        blocks = {name for network in task.children() for name in getattr(network, "_no_split_modules", None) or ()}
        for module in list(model.modules()):
            if type(module).__name__ in blocks:
                fully_shard(module, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)

    def fill(self, weights: MasterWeights) -> None:
        """Give the copies of the first process the averaged weights. All processes call this."""
        states: dict[str, dict[str, torch.Tensor]] = {name: {} for name in self.copies}
        for name, average in zip(weights.names, weights.averages, strict=True):
            child, _, rest = name.partition(".")
            tensor = whole(average)
            if processes()[0] == 0:
                states[child][rest] = tensor.to(self.copies[child].get_parameter(rest).dtype)
        for name, state in states.items():
            self.copies[name].load_state_dict(state, strict=False, assign=True)

    def empty(self) -> None:
        """Take the weights from the copies."""
        for network in self.copies.values():
            weights = {name: weight.to("meta") for name, weight in network.named_parameters()}
            network.load_state_dict(weights, strict=False, assign=True)


def _without_weights(network: nn.Module) -> nn.Module:
    kept = {id(weight): nn.Parameter(weight.detach().to("meta"), False) for weight in network.parameters()}
    return copy.deepcopy(network, kept).eval()


def gathered(state: dict) -> dict:
    """A state with whole tensors, which the first process has; all of them call this."""
    first = processes()[0] == 0

    def gather(value):
        if not isinstance(value, DTensor):
            return value
        full = value.full_tensor()
        return full.cpu() if first else None

    return tree_map(gather, state)
