"""`arimage eval score`: the metrics of a run, or of other images, by their names, and its `metrics.json`."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from filelock import FileLock
from pydantic import BaseModel, Field

from ..media.texts import parse_json
from ..settings.installed import installed
from ..settings.schema import Items, check, read_whole
from .download import with_networks
from .figures import (
    INCEPTION_METRICS,
    METRICS,
    PLAIN_METRICS,
    REFERENCE_METRICS,
    TF1_METRICS,
    extractors,
    needs_clip,
)
from .job import Job
from .metrics.features import Space, image_batches
from .metrics.i3d import FEWEST_FRAMES
from .metrics.standard_errors import estimate_text
from .runs.files import check_fields, write_json
from .runs.progress import duration_text


METRICS_FILE = "metrics.json"
# Two figures of a metric are comparable if these are equal; a setting that a metric does not have is None.
SHARED = (
    "count", "prompts", "reference", "space", "weights", "k", "subsets", "subset_size", "extrapolation", "prefix",
    "scale", "size", "splits", "sigma",
)  # fmt: skip
Figure = Annotated[float, Field(strict=True, allow_inf_nan=False)]


class _Entry(BaseModel):
    """What an entry of `metrics.json` must hold, whatever settings its metric adds."""

    value: Figure
    standard_error: Figure | None
    interval: Annotated[list[Figure], Field(min_length=2, max_length=2)] | None = None
    count: Items
    prompts: Items | None = None
    reference: str
    space: Space | None


def figure_text(entry: dict) -> str:
    """The figure of an entry, with its error."""
    return estimate_text(entry["value"], entry["standard_error"], entry.get("interval"))


def images_text(entry: dict) -> str:
    """How many images and prompts a figure was computed from."""
    count, prompts = entry["count"], entry.get("prompts", entry["count"])
    if prompts == 1:
        return f"{count} image{'s' * (count > 1)} of one prompt: no error"
    return f"{count} images" if prompts == count else f"{count} images of {prompts} prompts"


def metric_names() -> list[str]:
    """The names of all metrics, of this package and installed ones."""
    return [*METRICS, *installed("metrics")]


def _metric(name: str) -> Callable[[Job], dict[str, dict]]:
    return METRICS[name] if name in METRICS else installed("metrics")[name].load()


def check_names(job: Job, metrics: list[str]) -> None:
    """Refuse metrics that do not exist, and what they need besides networks. The run need not exist yet."""
    names, available = set(metrics), metric_names()
    unknown = [name for name in metrics if name not in available]
    if unknown:
        raise ValueError(f"unknown metric {unknown[0]!r}: choose among {', '.join(available)}")
    if job.reference is None and "fvd" in names:
        raise ValueError("--ref is missing: name a folder of videos, or another run of videos")
    if job.reference is None and names & set(REFERENCE_METRICS):
        raise ValueError("--ref is missing: name a folder of images, or a .npz of statistics or images")
    if "nearest" in names:
        _ = job.examples, job.held_out_images
    other = [name for name in metrics if name in TF1_METRICS and job.resize != "tf1"]
    if other:
        raise ValueError(
            f"{other[0]} is of the original Inception network: use `arimage eval score --resize tf1` with its "
            f"weights, or leave {other[0]} out"
        )
    if names & set(REFERENCE_METRICS):
        _ = job.against


def check_metrics(job: Job, metrics: list[str]) -> None:
    """Refuse metrics that cannot be computed, before any work. The run need not exist yet."""
    check_names(job, metrics)
    names = set(metrics)
    # Each of these refuses what is missing or damaged.
    if names & set(INCEPTION_METRICS):
        _ = job.inception
    if needs_clip(metrics):
        _ = job.clip_extractor
    if "fd-dinov2" in names:
        _ = job.dinov2_extractor
    if "fvd" in names:
        job.i3d_extractor(job.frames or FEWEST_FRAMES)
    for name in metrics:
        if name in REFERENCE_METRICS:
            _check_reference(job, name)


def _check_reference(job: Job, metric: str) -> None:
    """Refuse a file of statistics that are of no use for a metric."""
    statistics = job.against.statistics if metric == "fid" else None
    if metric == "sfid":
        statistics = job.spatial_statistics
    if statistics is None and not job.against.paths:
        raise ValueError(
            f"--ref {job.reference} holds statistics only, and none for {metric}: name a folder of images, or a .npz "
            "with images as arr_0"
        )
    if statistics is not None and statistics.space not in (None, job.inception.space):
        theirs, ours = statistics.space, job.inception.space
        raise ValueError(
            f"--ref {job.reference} has statistics of {theirs.name}, weights {theirs.sha256[:8]}, resize "
            f"{theirs.resize}, and you score with {ours.name}, weights {ours.sha256[:8]}, resize {ours.resize}: use "
            "the same --inception-weights and --resize for both"
        )


def estimate_score(job: Job, metrics: list[str]) -> str:
    """A text that says how long the networks of `metrics` would take, from two images. Writes nothing.

    Raises:
        ValueError: as `score` does before any work.
    """
    check_metrics(job, metrics)
    lines, seconds = [], 0.0
    for extractor, read, theirs in extractors(job, metrics):
        name, began = extractor.space.name, time.perf_counter()
        images = next(image_batches(job.paths, 2, name, read))
        extractor(images).cpu()
        each = (time.perf_counter() - began) / len(images)
        lines.append(f"{name}: {each:.2g} s for each of {job.count:,} images, and of {theirs:,} of the reference")
        seconds += each * (job.count + theirs)
    lines.append(f"time: about {duration_text(seconds)} less what is cached; the metrics come on top")
    return "\n".join(lines)


def score(job: Job, metrics: list[str], *, download: bool = False) -> dict[str, dict]:
    """Compute `metrics`, some of `metric_names`. If the images are a run, each is written to its `metrics.json` as
    soon as it is known; a folder or file of other images is left as it is. `download` fetches networks that the job
    does not name, see `with_networks`.

    Returns:
        The entries of `metrics.json`, by their names; some metrics have several.

    Raises:
        ValueError: if a metric is unknown or needs a run, the run is unfinished or damaged, a reference or weights are
            missing or damaged, or a figure is not finite.
    """
    refused = [name for name in metrics if name in set(metric_names()) - set(PLAIN_METRICS)]
    if refused and not job.is_run:
        raise ValueError(
            f"{refused[0]} needs the prompts or videos of a run of `arimage eval generate`, which {job.run} is not: "
            f"choose among {', '.join(PLAIN_METRICS)}"
        )
    if download:
        check_names(job, metrics)
        job = with_networks(job, metrics)
    check_metrics(job, metrics)
    _ = job.paths, read_metrics(job.run) if job.is_run else None
    found = {}
    for name in metrics:
        entries = _metric(name)(job)
        for figure, one in entries.items():
            if not all(map(math.isfinite, (one["value"], one["standard_error"] or 0, *one.get("interval", ())))):
                raise ValueError(
                    f"{figure} of {job.run} is {one['value']} ± {one['standard_error']}, which is not finite: check "
                    "the reference and the weights"
                )
        if job.is_run:
            # Another command may be adding other figures.
            (job.run / "scores").mkdir(exist_ok=True)
            with FileLock(job.run / "scores" / ".lock"):
                write_json(job.run / METRICS_FILE, read_metrics(job.run) | entries)
        found |= entries
    return found


def read_metrics(run: Path) -> dict[str, dict]:
    """The entries in the `metrics.json` of a run; none if it was not scored."""
    path, remedy = run / METRICS_FILE, "delete it and repeat `arimage eval score`"
    if not path.is_file():
        return {}
    entries = check_fields(parse_json(read_whole(path), path, remedy), {}, path, remedy)
    for name, one in entries.items():
        check(_Entry, one, f"{name} in {path} is damaged, {remedy}")
    return entries


def check_comparable(runs: dict[str, dict[str, dict]]) -> None:
    """Check that the metrics of several runs are comparable.

    Args:
        runs: the entries of `read_metrics`, by the name of the run.
    """
    first: dict[str, str] = {}
    for run, metrics in runs.items():
        for metric, ours in metrics.items():
            other = first.setdefault(metric, run)
            for key in SHARED:
                theirs = runs[other][metric].get(key)
                if ours.get(key) != theirs:
                    raise ValueError(
                        f"{metric} of {other} and of {run} cannot be compared, their {key} is {theirs} and "
                        f"{ours.get(key)}: score both runs alike"
                    )
