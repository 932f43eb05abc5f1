"""The base class of our models: what stays in float32, and where their weights lie in memory."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.loaders.peft import PeftAdapterMixin
from torch import nn
from transformers import PreTrainedModel

from .layers import refine_norms
from .saved_files import check_no_disk, check_safe, check_savable, replace_files, upload, weights_in
from .weight_files import check_component, check_found


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
    """`diffusers.ModelMixin` that checks the files of weights, with `align_weights` and `refine_norms` after loading,
    and with `keeping_float32` in casts. diffusers looks for this name in the module of each model."""

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
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs) -> Any:
        """See `diffusers.ModelMixin.from_pretrained`.

        Raises:
            ValueError: if a file is damaged, or a weight is missing, unexpected or of another shape.
        """
        folder = Path(pretrained_model_name_or_path, kwargs.get("subfolder") or "")
        if local := folder.is_dir():
            check_component(folder, cls, kwargs.get("variant"))
        with_info = kwargs.pop("output_loading_info", False)
        loaded: Any = super().from_pretrained(pretrained_model_name_or_path, output_loading_info=True, **kwargs)
        model, found = loaded
        if not local:
            check_found(found, pretrained_model_name_or_path)
        align_weights(model)
        refine_norms(model)
        return loaded if with_info else model

    def save_pretrained(
        self,
        save_directory: str | os.PathLike,
        is_main_process: bool = True,
        save_function: Any = None,
        safe_serialization: bool = True,
        variant: str | None = None,
        max_shard_size: int | str = "10GB",
        push_to_hub: bool = False,
        **hub,
    ) -> None:
        """See `diffusers.ModelMixin.save_pretrained`. What an earlier save wrote into the folder is replaced once all
        is written, but for the weights of other variants.

        Raises:
            ValueError: if the weights are not those of the model: quantised, cast layer by layer, or offloaded.
            OSError: if the folder cannot be written; it is then as it was.
        """
        check_safe(safe_serialization)
        check_savable(f"the {type(self).__name__}", self)
        folder, options = Path(save_directory), {"variant": variant, "max_shard_size": max_shard_size}
        save = partial(
            super().save_pretrained, is_main_process=is_main_process, save_function=save_function, **options
        )
        replace_files(folder, save, weights_in(folder, variant), "config.json")
        if push_to_hub:
            upload(self, folder, **hub)

    def enable_group_offload(
        self,
        onload_device: torch.device | str,
        offload_device: torch.device | str = "cpu",
        offload_type: str = "block_level",
        num_blocks_per_group: int | None = None,
        **options,
    ) -> None:
        """See `diffusers.ModelMixin.enable_group_offload`.

        Raises:
            ValueError: if `offload_to_disk_path` is given.
        """
        check_no_disk(options)
        devices = torch.device(onload_device), torch.device(offload_device)
        super().enable_group_offload(*devices, offload_type, num_blocks_per_group, **options)


class TransformerMixin(PeftAdapterMixin):
    """What our transformers have in common. Among their bases it comes before `ModelMixin`, whose defaults it
    replaces."""

    _no_split_modules = ["Block"]
    _repeated_blocks = ["Block"]
    config: Any

    @property
    def head_dim(self) -> int:
        """The channels of an attention head."""
        return self.config.hidden_size // self.config.num_attention_heads
