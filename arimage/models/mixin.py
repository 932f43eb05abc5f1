"""The base class of our models, and where their weights lie in memory."""

from typing import Any

import diffusers
import torch
from torch import nn

from .layers import refine_norms


# Bytes in a cache line, on which PyTorch lets every tensor begin that it allocates.
LINE = 64


def align_weights(model: nn.Module) -> None:
    """Copy the weights of a model that are on the CPU and do not begin on a line of 64 bytes, but for half precision.

    Weights of a .safetensors file are parts of the mapped file, after a header of any length. MKL, which multiplies
    float32 and float64, may round by where a row begins on a line, so equal weights would generate other images from
    another file. Products in half precision do not depend on it, and their weights stay mapped.
    """
    for weight in (*model.parameters(), *model.buffers()):
        # Not fake, quantised or distributed.
        plain = type(weight) in (torch.Tensor, nn.Parameter) and weight.layout == torch.strided
        if plain and weight.device.type == "cpu" and weight.itemsize > 2 and weight.data_ptr() % LINE:
            weight.data = weight.data.clone()


class ModelMixin(diffusers.ModelMixin):
    """`diffusers.ModelMixin` with `align_weights` and `refine_norms` after loading. diffusers looks for this
    name in the module of each model."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **kwargs) -> Any:
        loaded: Any = super().from_pretrained(pretrained_model_name_or_path, **kwargs)
        align_weights(loaded[0] if isinstance(loaded, tuple) else loaded)
        refine_norms(loaded[0] if isinstance(loaded, tuple) else loaded)
        return loaded
