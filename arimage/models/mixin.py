"""The base class of our models: what stays in float32, and where their weights lie in memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import diffusers
import torch
from torch import nn
from transformers import PreTrainedModel

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


def _kept(model: nn.Module, dtype: torch.dtype) -> list[str]:
    """The names of layers and weights that `from_pretrained` of a model leaves in float32 in this dtype."""
    # Below what `torch.compile` returns.
    model = getattr(model, "_orig_mod", model)
    always, half = (getattr(model, f"_keep_in_fp32_modules{end}", None) or () for end in ("_strict", ""))
    # transformers has those of the first list for half precision, and those of the second for float16 alone.
    if isinstance(model, PreTrainedModel):
        return [*(always if dtype.itemsize == 2 else ()), *(half if dtype == torch.float16 else ())]
    return list(half)


@contextmanager
def keeping_float32(model: nn.Module) -> Iterator[None]:
    """While the weights of a model are cast, leave in float32 what its `from_pretrained` leaves so: buffers that are
    in no file, such as rotary frequencies, and layers whose errors would be multiplied, such as denoising heads."""
    parts = {f"{prefix}.": part for prefix, part in model.named_modules()}
    tensors = [
        (part, held, f"{prefix}{name}", name, tensor.data)
        for prefix, part in parts.items()
        for held in (part._parameters, part._buffers)
        for name, tensor in held.items()
        if tensor is not None and tensor.is_floating_point()
    ]
    yield
    for part, held, path, name, before in tensors:
        after = held[name]
        if after.dtype == before.dtype:
            continue
        if name in part._non_persistent_buffers_set:
            held[name] = before.to(after.device)
        elif set(path.split(".")) & set(_kept(model, after.dtype)):
            after.data = before.to(after.device, torch.float32)


class ModelMixin(diffusers.ModelMixin):
    """`diffusers.ModelMixin` with `align_weights` and `refine_norms` after loading, and with `keeping_float32` in
    casts. diffusers looks for this name in the module of each model."""

    def to(self, *args, **kwargs) -> Any:
        # diffusers warns of casts, which here leave in float32 what has to stay so.
        dtype = next((each for each in (*args, kwargs.get("dtype")) if isinstance(each, torch.dtype)), None)
        if dtype is None or getattr(self, "is_quantized", False):
            return super().to(*args, **kwargs)
        kwargs.pop("dtype", None)
        # Before they are moved, since less is moved then.
        nn.Module.to(self, dtype)
        return super().to(*[each for each in args if each is not dtype], **kwargs)

    def _apply(self, fn, recurse=True):
        with keeping_float32(self):
            return super()._apply(fn, recurse)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **kwargs) -> Any:
        loaded: Any = super().from_pretrained(pretrained_model_name_or_path, **kwargs)
        align_weights(loaded[0] if isinstance(loaded, tuple) else loaded)
        refine_norms(loaded[0] if isinstance(loaded, tuple) else loaded)
        return loaded
