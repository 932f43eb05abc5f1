"""What the nodes run: models in ComfyUI's memory, and calls that report their progress."""

import copy
import hashlib
from collections.abc import Iterable
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import comfy.model_management as management
import torch
from comfy.model_patcher import ModelPatcher
from comfy.utils import ProgressBar
from PIL import Image


# The entry of a list that leaves a setting to the model.
OF_MODEL = "default"
# Previews take at most this part of the time.
PREVIEW_SHARE = 0.1


class ArimageWeights(torch.nn.Module):
    """The weights of a pipeline, for ComfyUI's memory manager. They are not submodules: the manager would move
    some layers without the others, and a step needs all of them."""

    def __init__(self, pipe):
        super().__init__()
        self.pipe = pipe

    def to(self, device):
        # This also frees what the pipeline keeps between calls.
        self.pipe.to(device)
        return self


class LoadedModel:
    """A pipeline whose weights ComfyUI loads and unloads.

    Args:
        pipe: the pipeline, on `offload_device`.
        load_device: where it generates.
        offload_device: where its weights are while others need the memory.
        name: what it was loaded by.

    Attributes:
        loras: files and strengths of the adapters that are active when this one generates, by their names in the
            pipeline. Models that share the pipeline may have others.
    """

    def __init__(self, pipe, load_device: torch.device, offload_device: torch.device, name: str):
        self.pipe, self.name = pipe, name
        self.loras: dict[str, tuple[Path, float]] = {}
        parts = torch.nn.ModuleList(part for part in pipe.components.values() if isinstance(part, torch.nn.Module))
        size = sum(each.nbytes for each in [*parts.parameters(), *parts.buffers()])
        self.patcher = ModelPatcher(ArimageWeights(pipe), load_device, offload_device, size=size)

    def with_lora(self, file: Path, strength: float) -> "LoadedModel":
        """This model with one more adapter. Its weights are loaded once, next to those of the pipeline."""
        changed = file.stat().st_mtime_ns
        name = f"[{hashlib.sha256(f'{file} {changed}'.encode()).hexdigest()}]"
        if name not in {each for names in self.pipe.get_list_adapters().values() for each in names}:
            self.pipe.load_lora_weights(file, adapter_name=name)
        model = copy.copy(self)
        model.loras = {**self.loras, name: (file, strength)}
        return model

    def ready(self):
        """The pipeline, after ComfyUI has made room for it and loaded it, with the adapters of this model."""
        management.load_models_gpu([self.patcher], force_full_load=True)
        if self.loras:
            self.pipe.enable_lora()
            self.pipe.set_adapters(list(self.loras), [strength for _, strength in self.loras.values()])
        elif self.pipe.get_list_adapters():
            self.pipe.disable_lora()
        return self.pipe


class GeneratedTokens(NamedTuple):
    """What the image tokenizer of `pipe` decodes to the pixels of a call: tokens [B, N], for some models vectors."""

    pipe: object
    call: object
    tokens: torch.Tensor


class Progress:
    """A callback of a call: it moves the node's bar by the work that is done, shows the first image so far, and ends
    the call when the user interrupts. `call` and `decoded` are those of the last step, the latter what becomes
    pixels."""

    def __init__(self):
        self.bar = self.call = self.decoded = None
        self.next_preview = 0.0

    def __call__(self, pipe, step, passes, tensors):
        management.throw_exception_if_processing_interrupted()
        self.call, self.decoded = pipe.current_call, tensors[pipe.decoded_tensor]
        total, preview, began = tensors["tokens"].numel(), None, monotonic()
        if self.bar is None:
            self.bar = ProgressBar(total)
        if began >= self.next_preview:
            pixels = pipe.preview(self.call.select(slice(1)), tensors["tokens"][:1])
            # Of a video, the last frame.
            pixels = (pixels if pixels.ndim == 4 else pixels[:, :, -1])[0]
            preview = preview_of((pixels.float().permute(1, 2, 0) + 1) / 2)
            self.next_preview = began + (monotonic() - began) / PREVIEW_SHARE
        self.bar.update_absolute(round(float(tensors["work"].mean()) * total), total, preview)

    def finish(self, image: torch.Tensor) -> None:
        """Show a finished image, which stays in the node."""
        self.bar.update_absolute(self.bar.total, self.bar.total, preview_of(image))


def preview_of(image: torch.Tensor) -> tuple[str, Image.Image, int]:
    """A preview for ComfyUI's page, of an image [H, W, 3] in 0 .. 1."""
    return "JPEG", to_pictures(image[None])[0], 512


def generate(pipe, seed: int, **settings):
    """The output of a call with these settings, and its `Progress`."""
    progress = Progress()
    output = pipe(
        **settings,
        generator=torch.Generator().manual_seed(seed),
        output_type="pt",
        callback_on_step_end=progress,
        callback_on_step_end_tensor_inputs=list(dict.fromkeys(["tokens", "work", pipe.decoded_tensor])),
    )
    return output, progress


def to_batch(pixels: Iterable[torch.Tensor]) -> torch.Tensor:
    """ComfyUI's images float32 [B, H, W, 3] of a pipeline's, [3, H, W] each."""
    return torch.stack([*pixels]).float().permute(0, 2, 3, 1).cpu()


def pictures_of(batch: torch.Tensor | None, dimensions: int = 3) -> list[Image.Image]:
    """The pictures of an optional input, images [B, H, W, C] or, with 2 dimensions each, masks [B, H, W]. Some nodes
    give a single one without its first dimension."""
    return [] if batch is None else to_pictures(batch.reshape(-1, *batch.shape[-dimensions:]))


def to_pictures(images: torch.Tensor) -> list[Image.Image]:
    """ComfyUI's images float32 [B, H, W, C], or masks [B, H, W], in 0 .. 1. An image of one channel is grey."""
    if images.ndim == 4 and images.shape[-1] not in (1, 3, 4):
        raise ValueError(f"image has {images.shape[-1]} channels: give one of 1, 3 or 4")
    if images.ndim == 4 and images.shape[-1] == 1:
        images = images[..., 0]
    return [Image.fromarray(levels) for levels in (images.clamp(0, 1) * 255).round().byte().cpu().numpy()]


def given(pipe, settings: dict) -> dict:
    """The settings that are not at the model's default, which is None, "", [], `OF_MODEL` or a negative number."""
    chosen = {
        name: value
        for name, value in settings.items()
        if not (value in (None, "", [], OF_MODEL) or (isinstance(value, int | float) and value < 0))
    }
    for name in chosen:
        if not pipe.abilities.accepts(name):
            raise ValueError(f"this model takes no {name}: leave it at its default")
    return chosen


def split_prompts(prompt: str, one_per_line: bool) -> list[str]:
    if not one_per_line:
        return [prompt]
    prompts = [line.strip() for line in prompt.splitlines() if line.strip()]
    if not prompts:
        raise ValueError("prompt has no line with text: write one prompt per line, or switch one_per_line off")
    return prompts


def condition(pipe, prompts: list[str], count: int = 1) -> dict:
    """The prompts, or a single one `count` times. For a class-conditional model they name classes, by id or name."""
    if len(prompts) > 1 and count not in (1, len(prompts)):
        raise ValueError(f"{len(prompts)} prompts and {count} images: give one of either, or as many")
    prompts = prompts * count if len(prompts) == 1 else prompts
    if pipe.num_classes is None:
        return {"prompt": prompts}
    return {"class_labels": [int(text) if text.strip().isdigit() else text.strip() for text in prompts]}


def settings_of(
    model: LoadedModel, settings: dict, subjects: dict, images: torch.Tensor, seeds: list[int], reads: bool
) -> str:
    """How each image [B, H, W, 3] was made, a line of JSON each, as all of arimage writes it into pictures.

    Args:
        subjects: the prompts or classes of the call, as `condition` returns them.
        reads: whether the call has reference images.
    """
    from arimage.cli.made import notes_of
    from arimage.decoding import decoding_to_text

    pipe = model.pipe
    [(name, values)] = subjects.items()
    conditions = [{name.replace("labels", "label"): value} for value in values]
    about = settings | {
        "model": model.name,
        "lora": [f"{file}:{strength}" for file, strength in model.loras.values()],
        "decoding": settings["decoding"] or decoding_to_text(pipe.decoding),
        "batch_size": len(seeds),
    }
    texts, _ = notes_of(pipe, about, conditions, to_pictures(images), seeds, reads)
    return "\n".join(texts)


def count_edits(pipe, images: list, masks: list) -> int:
    """How many prompts a call needs, so that every image is used: each of a batch is edited with its mask, or with the
    only one. Without a mask they are references: one per prompt, or all of them for one."""
    if not images or not masks:
        return max(1, len(images)) if pipe.abilities.max_references == 1 else 1
    count = max(len(images), len(masks))
    if {len(images), len(masks)} - {1, count}:
        raise ValueError(
            f"image holds {len(images)} images and mask {len(masks)} masks: give one of either, or as many"
        )
    return count
