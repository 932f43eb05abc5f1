"""`arimage eval score`: the metrics of a run by their names, and its `metrics.json`."""

import hashlib
import json
import logging
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from ..installed import installed
from ..media.texts import parse_json
from .metrics.clip_score import PREFIX, ClipExtractor, clip_scores
from .metrics.features import Extractor, Resize, Space, extract, image_paths
from .metrics.frechet import Gaussian, frechet_estimate, frechet_infinity
from .metrics.i3d import FEWEST_FRAMES, I3DExtractor, frame_count, read_clip
from .metrics.inception import InceptionExtractor
from .metrics.kernel_distance import kernel_distance
from .metrics.neighbourhoods import neighbourhoods
from .metrics.reference import Reference, read_folder, read_reference
from .metrics.standard_errors import Estimate, estimate_text, mean_estimate
from .runs.files import check_fields, write_json
from .runs.run_folder import NUMBER, prompts_of, read_rows


logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.json"
# Two figures of a metric are comparable if these are equal; a setting that a metric does not have is None.
SHARED = (
    "count", "prompts", "reference", "space", "weights", "k", "subsets", "subset_size", "points", "prefix", "scale",
    "size",
)  # fmt: skip
KID_SUBSETS, KID_SUBSET_SIZE = 100, 1000
FID_INFINITY_POINTS = 15
# As many as their networks have features: with fewer the estimated covariance is singular.
FEWEST_IMAGES, FEWEST_VIDEOS = 2048, 400
PRECISION_K, DENSITY_K = 3, 5
INCEPTION_METRICS = ("fid", "fid-categories", "kid", "prdc")
ENTRY_FIELDS = {
    "value": NUMBER,
    "standard_error": (*NUMBER, type(None)),
    "count": int,
    "reference": str,
    "space": (dict, type(None)),
}


@dataclass(frozen=True)
class Job:
    """A run to score, and what to score it with. Features that several metrics share are extracted once.

    Attributes:
        run: the folder of a finished run.
        reference: as `read_reference` takes it; for `fvd` a folder of videos, or of another run.
        inception_weights: the file of `InceptionExtractor`.
        clip: the folder of `ClipExtractor`.
        size: for the Inception metrics, `resize` the images of the run, not the reference, to this side in pixels.
        i3d_weights: the file of `I3DExtractor`.
        frames: how many frames of each video `fvd` compares; by default as many as the first video of the run has.
        skip_damaged: leave out images of the reference that cannot be read.
    """

    run: Path
    reference: Path | None = None
    inception_weights: Path | None = None
    clip: Path | None = None
    resize: Resize = "clean"
    device: str = "cpu"
    batch_size: int = 32
    size: int | None = None
    i3d_weights: Path | None = None
    frames: int | None = None
    skip_damaged: bool = False

    @cached_property
    def paths(self) -> list[Path]:
        return image_paths(self.run)

    @cached_property
    def rows(self) -> list[dict]:
        return read_rows(self.run)

    @cached_property
    def prompts(self) -> np.ndarray | None:
        """The prompt of each image, by its number; None for a run of classes."""
        prompts = prompts_of(self.rows)
        return None if prompts is None else np.unique(prompts, return_inverse=True)[1]

    @cached_property
    def inception(self) -> InceptionExtractor:
        return InceptionExtractor(self.inception_weights, self.resize, self.device)

    @cached_property
    def clip_extractor(self) -> ClipExtractor:
        return ClipExtractor(self.clip, self.device)

    @cached_property
    def features(self) -> np.ndarray:
        return self.extract(self.inception, self.size)

    def extract(self, extractor: Extractor, size: int | None = None) -> np.ndarray:
        """Features of the run's images, cached with it."""
        return extract(self.paths, extractor, cache=self.run / "features", batch_size=self.batch_size, size=size)

    @cached_property
    def against(self) -> Reference:
        return read_reference(self.reference, skip_damaged=self.skip_damaged)

    @cached_property
    def reference_features(self) -> np.ndarray:
        return _extract_reference(self.against, self.inception, batch_size=self.batch_size)

    def entry(
        self, estimate: Estimate, reference: str, space: Space | None, some: np.ndarray | None = None, **more
    ) -> dict:
        """The entry of a figure of the run's images, or of `some` of them, given by their ids."""
        some = np.arange(len(self.rows)) if some is None else some
        prompts = {} if self.prompts is None else {"prompts": len(np.unique(self.prompts[some]))}
        return entry(estimate, len(some), reference, space, **prompts, **more)

    def inception_entry(self, estimate: Estimate, reference: str | None = None, some=None, **more) -> dict:
        label = reference or f"{self.against.label}: {len(self.reference_features)} pictures"
        if self.size is not None:
            more["size"] = f"{self.size}, bicubic without antialiasing"
        return self.entry(estimate, label, self.inception.space, some, weights=self.inception.weights, **more)

    def of_prompts(self, some: np.ndarray) -> np.ndarray | None:
        """The prompts of some of the images, given by their ids."""
        return None if self.prompts is None else self.prompts[some]


def _extract_reference(reference: Reference, extractor: Extractor, **settings) -> np.ndarray:
    """Features of a reference, cached for other runs."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "arimage" / "features"
    return extract(reference.paths, extractor, cache=cache, sha256=reference.sha256, **settings)


def entry(estimate: Estimate, count: int, reference: str, space: Space | None, **more) -> dict:
    """A metric as stored in `metrics.json`; `more` are its settings."""
    interval = {} if estimate.interval is None else {"interval": list(estimate.interval)}
    return {
        "value": estimate.value,
        "standard_error": estimate.standard_error,
        **interval,
        "count": count,
        "reference": reference,
        "space": None if space is None else asdict(space),
        **more,
    }


def figure_text(entry: dict) -> str:
    """The figure of an entry, with its error."""
    return estimate_text(entry["value"], entry["standard_error"], entry.get("interval"))


def images_text(entry: dict) -> str:
    """How many images and prompts a figure was computed from."""
    count, prompts = entry["count"], entry.get("prompts", entry["count"])
    if prompts == 1:
        return f"{count} image{'s' * (count > 1)} of one prompt: no error"
    return f"{count} images" if prompts == count else f"{count} images of {prompts} prompts"


def warn_of_few(metric: str, fewest: int, *counts: int) -> None:
    """Warn if one of the `counts` of images is too small for a Fréchet distance."""
    if min(counts) < fewest:
        logger.warning(
            f"{metric} from {min(counts):,} images or references is too high and unreliable: use at least "
            f"{fewest:,} of each"
        )


def _infinity(features: np.ndarray, reference: Gaussian) -> Estimate:
    return Estimate(frechet_infinity(features, reference, points=FID_INFINITY_POINTS))


def _fid(job: Job) -> dict[str, dict]:
    if job.against.statistics is None:
        reference, label = Gaussian.of_features(job.reference_features), None
        warn_of_few("fid", FEWEST_IMAGES, len(job.features), len(job.reference_features))
    else:
        reference = Gaussian.of_covariance(*job.against.statistics)
        label = f"{job.against.label}: statistics, of weights and resizing that the file does not name"
        warn_of_few("fid", FEWEST_IMAGES, len(job.features))
    return {
        "fid": job.inception_entry(frechet_estimate(job.features, reference, prompts=job.prompts), label),
        "fid-infinity": job.inception_entry(_infinity(job.features, reference), label, points=FID_INFINITY_POINTS),
    }


def _fid_categories(job: Job) -> dict[str, dict]:
    """One `fid` per category: the images whose prompts have it, against the pictures in the reference's folder of that
    name."""
    ours = [row.get("metadata", {}).get("category") for row in job.rows]
    if None in ours:
        raise ValueError(f"image {ours.index(None)} of {job.run} has no category: generate with prompts that have one")
    if job.reference is None or not job.reference.is_dir():
        raise ValueError(f"--ref is {job.reference}: fid-categories needs a folder with a folder per category")
    paths = [path.relative_to(job.reference) for path in job.against.paths]
    theirs = [path.parts[0] if len(path.parts) > 1 else None for path in paths]
    entries, counts = {}, []
    for category in sorted(set(ours)):
        rows, columns = (np.flatnonzero([one == category for one in names]) for names in (ours, theirs))
        if len(rows) < 3 or len(columns) < 2:
            raise ValueError(
                f"category {category!r} has {len(rows)} images and {len(columns)} in {job.reference}: the FID needs "
                "at least three images, and two of the reference"
            )
        counts += [len(rows), len(columns)]
        reference = Gaussian.of_features(job.reference_features[columns])
        label = f"{job.against.label}: {len(columns)} pictures in {category}"
        estimate = frechet_estimate(job.features[rows], reference, prompts=job.of_prompts(rows))
        entries[f"fid-{category}"] = job.inception_entry(estimate, label, rows)
    warn_of_few("fid-categories", FEWEST_IMAGES, *counts)
    return entries


def _kid(job: Job) -> dict[str, dict]:
    settings: dict[str, Any] = {"subsets": KID_SUBSETS, "subset_size": KID_SUBSET_SIZE}
    estimate = kernel_distance(job.features, job.reference_features, prompts=job.prompts, **settings)
    return {"kid": job.inception_entry(estimate, **settings)}


def _prdc(job: Job) -> dict[str, dict]:
    found = neighbourhoods(
        job.features, job.reference_features, prompts=job.prompts, k=PRECISION_K, density_k=DENSITY_K
    )
    ks = {"precision": PRECISION_K, "recall": PRECISION_K, "density": DENSITY_K, "coverage": DENSITY_K}
    return {name: job.inception_entry(estimate, k=ks[name]) for name, estimate in found.items()}


def _clip(job: Job) -> dict[str, dict]:
    if "prompt" not in job.rows[0]:
        raise ValueError(f"{job.run} was generated from classes: the clip score needs a run of prompts")
    extractor, prompts = job.clip_extractor, [row["prompt"] for row in job.rows]
    values = clip_scores(job.extract(extractor), prompts, extractor, job.batch_size)
    write_scores(job.run, "clip", values)
    label = f"prompts, sha256 {hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:8]}"
    return {"clip": job.entry(mean_estimate(values, job.prompts), label, extractor.space, prefix=PREFIX, scale=1)}


def _fvd(job: Job) -> dict[str, dict]:
    count = frame_count(job.paths[0])
    if count < 2:
        raise ValueError(f"{job.paths[0]} is an image: fvd needs a run of a model that generates videos")
    if job.reference is None or not job.reference.is_dir():
        raise ValueError(f"--ref is {job.reference}: fvd needs a folder of videos, or another run of videos")
    videos, frames = read_folder(job.reference, videos=True), job.frames or count
    extractor = I3DExtractor(job.i3d_weights, frames, job.device)
    settings: dict[str, Any] = {
        "batch_size": max(1, job.batch_size // frames),
        "read": partial(read_clip, frames=frames),
    }
    features = extract(job.paths, extractor, cache=job.run / "features", **settings)
    theirs = _extract_reference(videos, extractor, **settings)
    warn_of_few("fvd", FEWEST_VIDEOS, len(features), len(theirs))
    reference = Gaussian.of_features(theirs)
    shared, weights = (f"{videos.label}: {len(theirs)} videos", extractor.space), extractor.weights
    estimate = frechet_estimate(features, reference, prompts=job.prompts)
    return {
        "fvd": job.entry(estimate, *shared, weights=weights),
        "fvd-infinity": job.entry(
            _infinity(features, reference), *shared, weights=weights, points=FID_INFINITY_POINTS
        ),
    }


METRICS: dict[str, Callable[[Job], dict[str, dict]]] = {
    "fid": _fid,
    "fid-categories": _fid_categories,
    "kid": _kid,
    "prdc": _prdc,
    "clip": _clip,
    "fvd": _fvd,
}


def metric_names() -> list[str]:
    """The names of all metrics, of this package and installed ones."""
    return [*METRICS, *installed("metrics")]


def _metric(name: str) -> Callable[[Job], dict[str, dict]]:
    return METRICS[name] if name in METRICS else installed("metrics")[name].load()


def check_metrics(job: Job, metrics: list[str]) -> None:
    """Refuse metrics that cannot be computed, before any work. The run need not exist yet.

    Raises:
        ValueError: if a metric is unknown, or its reference or weights are missing or damaged.
    """
    reference, names = job.reference, set(metrics)
    available = metric_names()
    unknown = [name for name in metrics if name not in available]
    if unknown:
        raise ValueError(f"unknown metric {unknown[0]!r}: choose among {', '.join(available)}")
    if reference is None and "fvd" in names:
        raise ValueError("--ref is missing: name a folder of videos, or another run of videos")
    if reference is None and names & set(INCEPTION_METRICS):
        raise ValueError("--ref is missing: name a folder of images, or a .npz of statistics or images")
    # Each of these refuses what is missing or damaged.
    if names & set(INCEPTION_METRICS):
        _ = job.against, job.inception
        if not job.against.paths and names & set(INCEPTION_METRICS) - {"fid"}:
            raise ValueError(
                f"--ref {reference} holds statistics only, which are enough for the FID: name a folder of images, "
                "or a .npz with images as arr_0, for the other metrics"
            )
    if "clip" in names:
        _ = job.clip_extractor
    if "fvd" in names:
        I3DExtractor(job.i3d_weights, job.frames or FEWEST_FRAMES, job.device)


def score(job: Job, metrics: list[str]) -> dict[str, dict]:
    """Compute `metrics`, some of `metric_names`, and write each to the run's `metrics.json` as soon as it is known.

    Returns:
        The entries of `metrics.json`, by their names; some metrics have several.

    Raises:
        ValueError: if a metric is unknown, the run is unfinished or damaged, a reference or weights are missing or
            damaged, or a figure is not finite.
    """
    check_metrics(job, metrics)
    _ = job.paths, read_metrics(job.run)
    found = {}
    for name in metrics:
        entries = _metric(name)(job)
        for figure, one in entries.items():
            if not _is_finite(one):
                raise ValueError(
                    f"{figure} of {job.run} is {one['value']} ± {one['standard_error']}, which is not finite: check "
                    "the reference and the weights"
                )
        # Another command may be adding other figures.
        (job.run / "scores").mkdir(exist_ok=True)
        with FileLock(job.run / "scores" / ".lock"):
            write_json(job.run / METRICS_FILE, read_metrics(job.run) | entries)
        found |= entries
    return found


def read_metrics(run: Path) -> dict[str, dict]:
    """The entries in the `metrics.json` of a run; none if it was not scored.

    Raises:
        ValueError: if the file is damaged, or a figure in it is not finite.
    """
    path, remedy = run / METRICS_FILE, "delete it and repeat `arimage eval score`"
    if not path.is_file():
        return {}
    entries = check_fields(parse_json(path.read_bytes(), path, remedy), {}, path, remedy)
    for name, one in entries.items():
        check_fields(one, ENTRY_FIELDS, f"{name} in {path}", remedy)
        if one["space"] is not None:
            fields: dict[str, type] = dict.fromkeys(("name", "sha256", "resize"), str)
            check_fields(one["space"], fields, f"space of {name} in {path}", remedy)
        optional: dict[str, type] = {"interval": list, "prompts": int}
        given = {field: kind for field, kind in optional.items() if field in one}
        check_fields(one, given, f"{name} in {path}", remedy)
        if len(one.get("interval", (0, 1))) != 2:
            raise ValueError(f"{name} in {path} has an interval that is not two numbers: {remedy}")
        if not _is_finite(one):
            raise ValueError(f"{name} in {path} is not finite: {remedy}")
    return entries


def _is_finite(entry: dict) -> bool:
    numbers = (entry["value"], entry["standard_error"] or 0, *entry.get("interval", ()))
    return all(isinstance(number, NUMBER) and math.isfinite(number) for number in numbers)


def write_scores(run: Path, name: str, values: np.ndarray) -> None:
    """Write the values [N] of a metric, one per image in manifest order, to `scores/<name>.json`."""
    (run / "scores").mkdir(exist_ok=True)
    ids = [row["id"] for row in read_rows(run)]
    write_json(run / "scores" / f"{name}.json", {"ids": ids, "values": [float(value) for value in values]})


def check_comparable(runs: dict[str, dict[str, dict]]) -> None:
    """Check that the metrics of several runs are comparable.

    Args:
        runs: the entries of `read_metrics`, by the name of the run.

    Raises:
        ValueError: if a metric of two runs differs in the number of images, reference, weights, resizing or settings.
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
