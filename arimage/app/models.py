"""The models of an engine: loaded once by the names that requests use, and what each can do."""

import inspect
from dataclasses import dataclass
from pathlib import Path

import torch

from ..auto import packaged_models
from ..decoding import decoding_to_text
from ..eval.bench import choose_decodings
from ..options import load_pipeline
from ..pipelines.base import ARImagePipeline
from ..pipelines.class_or_text import ClassOrTextPipeline
from ..pipelines.pipeline_emu3 import Emu3Pipeline


# The ratios offered of a model that draws any.
RATIOS = ("1:1", "4:3", "3:4", "3:2", "2:3", "16:9", "9:16")


@dataclass(frozen=True)
class ModelInfo:
    """What a model can do.

    Attributes:
        classes: how many classes it draws, ids from 0; None if it draws from text.
        sizes: (height, width) in pixels, the default first.
        codes: of an image of the default size, those of all scales of a next-scale model.
        grid: rows and columns of codes of the default size; None of next-scale models.
        decodings: the names of those that it can run, and whether each is exact.
        decoding: its default one, a name with settings.
        sampling: its defaults: guidance_scale, temperature, top_k, top_p.
        negative_prompt: whether it knows such prompts.
    """

    classes: int | None
    sizes: list[tuple[int, int]]
    codes: int
    grid: tuple[int, int] | None
    decodings: dict[str, bool]
    decoding: str
    sampling: dict
    negative_prompt: bool


def load_models(models: list[str] | None, device: str | None) -> dict[str, ARImagePipeline]:
    """The pipelines of `models`, names, folders or Hub repositories, the packaged ones by default. A folder goes by its last
    part, so that no path of this machine is told.

    Raises:
        ValueError: if two of them go by one name.
    """
    pipelines = {}
    for model in models or packaged_models():
        name = Path(model).resolve().name if Path(model).is_dir() else model
        if name in pipelines:
            raise ValueError(f"two models go by the name {name}: rename a folder")
        pipelines[name] = load_pipeline(model, device)
    return pipelines


@torch.no_grad()
def describe(pipe: ARImagePipeline) -> ModelInfo:
    """Find out what a pipeline can do, by starting every decoding on it.

    Raises:
        ValueError: if it takes neither text nor classes, or no decoding starts on it.
    """
    classes = None
    if isinstance(pipe, ClassOrTextPipeline) and pipe.transformer.config.conditioning == "class":
        classes = pipe.transformer.config.num_classes
    condition = {"prompt": ["a red heart"]} if classes is None else {"class_labels": [0]}
    decodings, _ = choose_decodings(pipe, condition, [], [], {})
    model = pipe.bind(**condition)
    codes = torch.zeros(1, model.num_tokens, dtype=torch.long, device=model.device)
    size = tuple(pipe.draw_codes(codes, torch.ones_like(codes, dtype=torch.bool)).shape[-2:])
    sizes = [size, *getattr(pipe, "image_sizes", [])]
    if isinstance(pipe, Emu3Pipeline):
        sizes += [pipe.image_size(ratio=ratio) for ratio in RATIOS]
    return ModelInfo(
        classes=classes,
        sizes=list(dict.fromkeys(map(tuple, sizes))),
        codes=model.num_tokens,
        grid=None if hasattr(model, "scales") else model.layout.shape,
        decodings={name: decoding.exact for name, decoding in decodings.items()},
        decoding=decoding_to_text(pipe.decoding),
        sampling=dict(pipe.generation_config),
        negative_prompt="negative_prompt" in inspect.signature(pipe.__call__).parameters,
    )
