"""Random adapters for tiny pipelines."""

import torch
from torch import nn


STYLE = "zz"
CONVOLUTIONS = nn.Conv1d | nn.Conv2d | nn.Conv3d


def layers_of(pipe) -> dict[str, nn.Module]:
    """The layers of a pipeline that an adapter may change, by component and name."""
    return {
        f"{key}.{name}": module
        for key in pipe._lora_loadable_modules
        for name, module in pipe.components[key].named_modules()
        if isinstance(module, nn.Linear | nn.Embedding | CONVOLUTIONS)
    }


def adapter(pipe, seed: int = 0, rank: int = 2, size: float = 0.5, targets: str = "") -> dict[str, torch.Tensor]:
    """The weights of an adapter of all layers whose names contain `targets`."""
    generator, state = torch.Generator().manual_seed(seed), {}

    def normal(*shape):
        return torch.randn(shape, generator=generator) * size

    for name, module in layers_of(pipe).items():
        if targets not in name:
            continue
        rows, columns, *kernel = module.weight.shape
        if isinstance(module, nn.Embedding):
            state |= {
                f"{name}.lora_embedding_A": normal(rank, rows),
                f"{name}.lora_embedding_B": normal(columns, rank),
            }
        else:
            state[f"{name}.lora_A.weight"] = normal(rank, columns, *kernel)
            state[f"{name}.lora_B.weight"] = normal(rows, rank, *(1 for _ in kernel))
    return state


@torch.no_grad()
def merge(pipe, state: dict[str, torch.Tensor], scale: float = 1.0) -> None:
    """Add an adapter to the weights, by hand."""
    for name, module in layers_of(pipe).items():
        if f"{name}.lora_A.weight" in state:
            a, b = state[f"{name}.lora_A.weight"], state[f"{name}.lora_B.weight"]
            module.weight += (scale * b.flatten(1) @ a.flatten(1)).view_as(module.weight)
        elif f"{name}.lora_embedding_A" in state:
            module.weight += scale * (state[f"{name}.lora_embedding_B"] @ state[f"{name}.lora_embedding_A"]).T
