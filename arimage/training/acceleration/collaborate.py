"""Fine-tuning of a large and a small VAR transformer for their parts of collaborative decoding."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from ...decoding import CollaborativeDecoding
from ...pipelines.var.pipeline_var import VARPipeline
from ..data.captioned import ImageCaptions
from ..resuming import digest
from ..saving import save_float16
from ..tables import Recipe, load_both, read_tables
from ..transformers.var import VARTransformerSettings, VARTransformerTask, var_settings


def train_collaborate(
    pipe: VARPipeline,
    data: ImageCaptions,
    heldout: ImageCaptions,
    drafter_scales: int,
    drafter: VARTransformerSettings,
    refiner: VARTransformerSettings,
    out: str | Path,
    on_report: Callable[[VARPipeline], None] | None = None,
) -> VARPipeline:
    """Fine-tune each transformer of `pipe` for the scales that it generates, as in CoDe
    (https://arxiv.org/abs/2411.17787): the large one for the first `drafter_scales`, the refiner for the rest, with
    the large one as it was as its teacher. Returns `pipe` with the averaged weights and the decoding set to these
    scales; both may forget the other scales.

    The settings' `scale_shares` and `first_scale` follow from `drafter_scales`. `out`/drafter and `out`/refiner keep
    checkpoints, logs, curves and samples; a second call with the same pipe, settings and data resumes the run.

    Raises:
        ValueError: if the pipeline has no refiner, or `drafter_scales` leaves one of the two without a scale.
    """
    count = len(pipe.transformer.config.scales)
    if pipe.refiner is None:
        raise ValueError("the pipeline has no refiner: train one with the transformer first")
    check_drafter_scales(drafter_scales, count)
    teacher = copy.deepcopy(pipe.transformer).requires_grad_(False)
    pipe.text_encoder.requires_grad_(False)
    pipe.decoding = CollaborativeDecoding(drafter_scales)
    hook = None if on_report is None else lambda: on_report(pipe)
    parts = {
        "drafter": (pipe.transformer, replace(drafter, scale_shares=(0,) * (drafter_scales - 1) + (1,)), None),
        "refiner": (pipe.refiner, replace(refiner, scale_shares=None, first_scale=drafter_scales), teacher),
    }
    for name, (network, settings, its_teacher) in parts.items():
        torch.manual_seed(settings.seed)
        about = {
            "network": digest(network),
            "text_encoder": digest(pipe.text_encoder),
            "teacher": None if its_teacher is None else digest(its_teacher),
            "dtype": str(network.dtype).removeprefix("torch."),
        }
        network.requires_grad_(True)
        task = VARTransformerTask(network, pipe, data, heldout, settings, its_teacher, pipe.decoding)
        task.fit(Path(out) / name, about, on_report=hook)
        network.requires_grad_(False)
    return pipe


def check_drafter_scales(drafter_scales: int, count: int) -> None:
    """Refuse a number that leaves one of the two transformers without one of the `count` scales."""
    if not 1 <= drafter_scales < count:
        raise ValueError(f"drafter_scales is {drafter_scales}: give a number from 1 to {count - 1}")


def collaborate_settings(recipe: Recipe) -> tuple[VARTransformerSettings, VARTransformerSettings]:
    """The settings of the large transformer, which drafts, and of the refiner."""
    table = recipe.table("collaborate")
    drafter, refiner = (
        var_settings(recipe, getattr(table, name), f"collaborate.{name}") for name in ("drafter", "refiner")
    )
    return drafter, refiner


def run_collaborate(
    recipe: dict, pipe: VARPipeline, train: str | Path, heldout: str | Path, out: str | Path
) -> VARPipeline:
    """Fine-tune the two transformers of `pipe` by a recipe for collaborative decoding. The pipeline is saved in
    `out`/model, in float16.

    Raises:
        ValueError: if `pipe` is not a VAR pipeline that reads texts.
    """
    if not isinstance(pipe, VARPipeline) or pipe.num_classes is not None:
        raise ValueError(f"--model is a {type(pipe).__name__} without texts or scales: give a VARPipeline of texts")
    tables, out = read_tables(recipe), Path(out)
    settings, count = collaborate_settings(tables), tables.table("collaborate").drafter_scales
    data, heldout_data = load_both(tables, "transformer", train, heldout)
    pipe = train_collaborate(pipe, data, heldout_data, count, *settings, out)
    save_float16(pipe, out / "model")
    return pipe
