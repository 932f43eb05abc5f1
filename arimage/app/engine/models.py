"""Loads the models of an engine, and describes their abilities."""

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...auto import packaged_models
from ...cli.options import DEFAULT_MODEL, Steps, load_pipeline
from ...decoding import decoding_to_text
from ...media.gallery import gallery_folder
from ...pipelines.base import ARPipeline
from ...pipelines.saving.saved_folder import local_folder
from ...pipelines.text.known import examples_of
from ...settings.installed import not_installed
from .adapters import adapted_names, name_in_pipeline, split_adapters
from .types import Limits


# The ratios offered for a model that supports any ratio.
RATIOS = ("1:1", "4:3", "3:4", "3:2", "2:3", "16:9", "9:16")
# Any prompt will do to find out what a model can do, and whether it works.
SAMPLE_PROMPT = "a red heart"


@dataclass(frozen=True)
class ModelInfo:
    """The abilities of a model.

    Attributes:
        classes: number of classes, with ids from 0; None if it generates from text.
        sizes: (height, width) in pixels, the default first.
        tokens: the number of tokens of an image of the default size, all scales included.
        grid: (rows, columns) of tokens at the default size, for videos (frames, rows, columns); None for next-scale
            models.
        decodings: names of the decodings that it can run, and whether each is exact.
        decoding: the default decoding, a name with settings.
        sampling: the defaults of guidance_scale, temperature, top_k, top_p, min_p; with a diffusion decoder also
            of num_inference_steps.
        negative_prompt: whether it accepts a negative prompt.
        edits: whether it changes a given image.
        frame_counts: how many frames its videos may have, the default first; empty for images.
        fps: frames per second of its videos; 0 for images.
        references: how many reference images it reads together with a prompt.
        order: the default order of its tokens; None if it does not accept one.
        class_names: the names of its classes by id, if it names them.
        names: the names of the pictures that it knows, by a prompt that shows each; empty if it has no such list.
        examples: prompts to try with it.
        gallery: the folder of these pictures, as `read_gallery` takes it; None if there is none.
    """

    classes: int | None
    sizes: list[tuple[int, int]]
    tokens: int
    grid: tuple[int, ...] | None
    decodings: dict[str, bool]
    decoding: str
    sampling: dict
    negative_prompt: bool
    edits: bool
    frame_counts: list[int]
    fps: int
    references: int
    order: str | None
    class_names: list[str] | None
    names: Mapping[str, str]
    examples: list[str]
    gallery: Path | None = None


def model_names(models: list[str] | None, videos: bool = False) -> dict[str, str]:
    """`models` (names, folders or Hub repositories) by the names that clients use. The name of a folder is the last
    part of its path, so that clients do not see the rest. The default is all installed models, video models only with
    `videos`.

    Raises:
        ValueError: if two of them have the same name, or there are none.
    """
    named = {}
    # The demo begins with the first one.
    packaged = sorted(packaged_models(videos), key=lambda name: name != DEFAULT_MODEL)
    if not models and not packaged:
        raise ValueError(not_installed(DEFAULT_MODEL))
    for model in models or packaged:
        folder = local_folder(model)
        name = model if folder is None else folder.resolve().name
        if name in named:
            raise ValueError(f"two models have the name {name}: rename a folder")
        named[name] = model
    return named


def parse_aliases(aliases: list[str], names: Iterable[str]) -> dict[str, str]:
    """Other names for models, from ALIAS=MODEL each.

    Args:
        names: the names of the models.

    Raises:
        ValueError: if one has another form, is already taken, or does not name a model that is served.
    """
    parsed = {}
    for text in aliases:
        alias, _, target = text.partition("=")
        if not (alias and target):
            raise ValueError(f"--alias {text} is not of the form ALIAS=MODEL, as in gpt-image-1=icons-arpg")
        if target not in names:
            raise ValueError(f"--alias {text} names a model that is not served: choose among {', '.join(names)}")
        if alias in names or alias in parsed:
            raise ValueError(f"--alias {text} is the name of a model or alias already: choose another")
        parsed[alias] = target
    return parsed


def load_models(
    models: list[str] | None,
    device: str | None,
    dtype: str = "auto",
    videos: bool = False,
    lora: list[str] | None = None,
    steps: Steps = "captured",
) -> dict[str, Any]:
    """The pipelines of `models` by their `model_names`, and those of adapters with a name, which are the same ones, as
    MODEL:NAME. Without `videos`, video models are refused.

    Raises:
        ValueError: if there are adapters, and not one model that they are for.
    """
    names = model_names(models, videos)
    if lora and len(names) != 1:
        raise ValueError(f"--lora changes one model, and there are {len(names)}: give its name as --model")
    always, named = split_adapters(lora or [])
    print(f"loading {', '.join(names)}", file=sys.stderr, flush=True)
    adapters = {"lora": always, "named_loras": {name_in_pipeline(name): text for name, text in named.items()}}
    loaded = {
        name: load_pipeline(model, device, dtype, videos, steps=steps, **adapters) for name, model in names.items()
    }
    for name in names:
        loaded |= dict.fromkeys(adapted_names(name, lora or []), loaded[name])
    return loaded


@torch.no_grad()
def describe(name: str, pipe: ARPipeline, limits: Limits) -> ModelInfo:
    """The abilities of the pipeline that requests know by this name, with the sizes within `limits`.

    Raises:
        ValueError: if no size is, or if it does not generate from a text or a class alone.
    """
    if pipe.abilities.generates_video and not pipe.begins_with_text:
        raise ValueError(f"{name} continues an image or a video, which the demo does not show: use `arimage generate`")
    condition: dict[str, Any] = {"prompt": SAMPLE_PROMPT} if pipe.num_classes is None else {"class_labels": 0}
    sizes = pipe.image_sizes
    if pipe.abilities.accepts("ratio"):
        sizes = [*sizes, *(pipe.image_size(ratio=ratio) for ratio in RATIOS)]
    most = limits.output_pixels or math.inf
    offered = [size for size in dict.fromkeys(sizes) if size[0] * size[1] <= most]
    if not offered:
        smallest = min(height * width for height, width in sizes)
        raise ValueError(f"--max-pixels is {most}, and {name} generates at least {smallest}: allow as many")
    if offered[0] != sizes[0]:
        condition |= {"height": offered[0][0], "width": offered[0][1]}
    call = pipe.prepare(**condition)
    decodings = {name: pipe.as_decoding(name) for name in pipe.decoding_names}
    return ModelInfo(
        classes=pipe.num_classes,
        sizes=offered,
        tokens=call.model.num_tokens,
        grid=None if pipe.abilities.in_maps else call.layout.shape,
        decodings={name: one.exact for name, one in decodings.items() if one.supports(call.model) is None},
        decoding=decoding_to_text(pipe.decoding),
        # Models of continuous tokens have no cuts, and few checkpoints min-p.
        sampling={"top_k": 0, "top_p": 1.0, "min_p": 0.0, **pipe.generation_config},
        negative_prompt=pipe.abilities.accepts("negative_prompt"),
        edits=pipe.abilities.accepts("mask_image"),
        frame_counts=pipe.frame_counts if pipe.abilities.generates_video else [],
        fps=pipe.config.fps if pipe.abilities.generates_video else 0,
        references=pipe.abilities.max_references,
        order=pipe.order,
        class_names=pipe.class_names,
        names=pipe.known_captions.shown if pipe.known_captions else {},
        examples=examples_of(pipe.known_captions),
        gallery=gallery_folder(pipe.name_or_path),
    )
