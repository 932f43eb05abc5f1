"""The metrics of this package by their names: each computes its entries of `metrics.json` for a `Job`."""

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .job import Job, entry, extract_reference, warn_of_few, write_scores
from .metrics.clip_choice import clip_choices
from .metrics.clip_score import PREFIX, clip_scores
from .metrics.diversity import diversity
from .metrics.features import Extractor, extract
from .metrics.frechet import FrechetDistance, Gaussian
from .metrics.i3d import frame_count, read_clip
from .metrics.inception_score import inception_score
from .metrics.kernel_distance import gaussian_kernel_distance, kernel_distance, subsets_of
from .metrics.nearest import nearest, nearest_estimates
from .metrics.neighbourhoods import neighbourhoods
from .metrics.reference import Statistics, read_folder
from .metrics.small_versions import SIDE
from .metrics.standard_errors import Estimate, mean_estimate
from .sheet import IMAGES, chosen_images, write_sheet


KID_SUBSETS, KID_SUBSET_SIZE = 100, 1000
# As many as their networks have features: with fewer the estimated covariance is singular.
FEWEST_IMAGES, FEWEST_VIDEOS = 2048, 400
PRECISION_K, DENSITY_K = 3, 5
INCEPTION_SCORE_SPLITS = 10
CMMD_SIGMA, CMMD_SCALE = 10, 1000
INCEPTION_METRICS = ("fid", "fid-categories", "kid", "prdc", "isc", "sfid")
# Of the network that the published figures are of.
TF1_METRICS = ("isc", "sfid")
# Those that compare with images, or with statistics of them.
REFERENCE_METRICS = ("fid", "fid-categories", "kid", "prdc", "sfid", "fd-dinov2", "fd-wavelets", "cmmd")
# Those that need neither prompts, categories nor videos.
PLAIN_METRICS = ("fid", "kid", "prdc", "isc", "sfid", "fd-dinov2", "fd-wavelets", "cmmd", "nearest")


def _with_infinity(metric: str, job: Job, ours: np.ndarray, reference: Gaussian, make_entry: Callable) -> dict:
    """The entries of a Fréchet distance of all images, and of its limit for infinitely many."""
    distance = FrechetDistance(ours, reference)
    return {
        metric: make_entry(distance.estimate(job.prompts)),
        f"{metric}-infinity": make_entry(Estimate(distance.infinity()), extrapolation="jackknife"),
    }


def _of_reference(
    job: Job, metric: str, statistics: Statistics | None, extract: Callable[[], np.ndarray]
) -> tuple[Gaussian, str | None]:
    """The Gaussian of the statistics in a file and their label, or else of the features that are extracted."""
    if statistics is None:
        theirs = extract()
        warn_of_few(metric, FEWEST_IMAGES, job.count, len(theirs))
        return Gaussian.of_features(theirs, job.device), None
    told = "statistics, of weights and resizing that the file does not name"
    if statistics.space is not None:
        told = f"statistics of {statistics.count} pictures"
    warn_of_few(metric, FEWEST_IMAGES, job.count, statistics.count or FEWEST_IMAGES)
    gaussian = Gaussian.of_covariance(statistics.mean, statistics.covariance, job.device)
    return gaussian, f"{job.against.label}: {told}"


def _fid(job: Job) -> dict[str, dict]:
    reference, label = _of_reference(job, "fid", job.against.statistics, lambda: job.reference_features)
    return _with_infinity("fid", job, job.features, reference, partial(job.inception_entry, reference=label))


def _sfid(job: Job) -> dict[str, dict]:
    extractor = job.spatial_inception
    reference, label = _of_reference(job, "sfid", job.spatial_statistics, lambda: job.extract_against(extractor))
    estimate = FrechetDistance(job.extract(extractor, job.size), reference).estimate(job.prompts)
    return {"sfid": job.inception_entry(estimate, label, space=extractor.space)}


def _isc(job: Job) -> dict[str, dict]:
    logits = job.inception.logits(job.features)
    estimate = inception_score(logits, prompts=job.prompts, splits=INCEPTION_SCORE_SPLITS)
    return {"isc": job.inception_entry(estimate, "no reference", splits=INCEPTION_SCORE_SPLITS)}


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
        reference = Gaussian.of_features(job.reference_features[columns], job.device)
        label = f"{job.against.label}: {len(columns)} pictures in {category}"
        estimate = FrechetDistance(job.features[rows], reference).estimate(job.of_prompts(rows))
        entries[f"fid-{category}"] = job.inception_entry(estimate, label, rows)
    warn_of_few("fid-categories", FEWEST_IMAGES, *counts)
    return entries


def _kid(job: Job) -> dict[str, dict]:
    ours, theirs = job.features, job.reference_features
    subsets, size = subsets_of(len(ours), len(theirs), KID_SUBSETS, KID_SUBSET_SIZE)
    estimate = kernel_distance(ours, theirs, prompts=job.prompts, subsets=subsets, subset_size=size)
    return {"kid": job.inception_entry(estimate, subsets=subsets, subset_size=size)}


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
    label = f"prompts, sha256 {_digest(prompts)}"
    return {"clip": job.entry(mean_estimate(values, job.prompts), label, extractor.space, prefix=PREFIX, scale=1)}


def _digest(texts: list) -> str:
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:8]


def _clip_choice(job: Job) -> dict[str, dict]:
    questions = [row.get("metadata", {}).get("alternatives") for row in job.rows]
    if None in questions:
        raise ValueError(
            f"image {questions.index(None)} of {job.run} has no alternatives: generate with a .jsonl file of prompts "
            "that have them"
        )
    return choice_entries(job, "clip-choice", questions)


def choice_entries(job: Job, metric: str, questions: list[dict[str, list[str]]]) -> dict[str, dict]:
    """The entries of a metric that asks CLIP `questions` about each image, as `clip_choices` takes them: the share of
    images that choose the first text in all of their questions, and the share for each question. Each names the
    share by chance."""
    extractor = job.clip_extractor
    outcomes = clip_choices(job.extract(extractor), questions, extractor, job.batch_size)
    chances = [{name: 1 / len(texts) for name, texts in row.items()} for row in questions]
    right = np.array([all(outcome.values()) for outcome in outcomes])
    write_scores(job.run, metric, right)

    def share(hits: np.ndarray, chance: list[float], some: np.ndarray) -> dict:
        label = f"chance {np.mean(chance):.3f}, sha256 of the texts {_digest(questions)}"
        return job.entry(mean_estimate(hits, job.of_prompts(some)), label, extractor.space, some)

    entries = {metric: share(right, [math.prod(row.values()) for row in chances], np.arange(job.count))}
    for name in dict.fromkeys(name for row in questions for name in row):
        some = np.flatnonzero([name in row for row in questions])
        hits = np.array([outcomes[id][name] for id in some])
        entries[f"{metric}-{name}"] = share(hits, [chances[id][name] for id in some], some)
    return entries


def _note(weights: str | None) -> dict[str, Any]:
    return {} if weights is None else {"weights": weights}


def _cmmd(job: Job) -> dict[str, dict]:
    extractor = job.clip_extractor
    ours, theirs = job.extract(extractor), job.extract_against(extractor)
    unit = [features / np.linalg.norm(features, axis=1, keepdims=True) for features in (ours, theirs)]
    settings: dict[str, Any] = {"sigma": CMMD_SIGMA, "scale": CMMD_SCALE}
    estimate = gaussian_kernel_distance(*unit, prompts=job.prompts, **settings)
    note = _note(extractor.cmmd_weights)
    return {"cmmd": job.entry(estimate, job.against_label, extractor.space, **note, **settings)}


def _feature_distance(metric: str, job: Job, extractor: Extractor, **note) -> dict[str, dict]:
    features, theirs = job.extract(extractor), job.extract_against(extractor)
    warn_of_few(metric, features.shape[1], len(features), len(theirs))
    make_entry = partial(job.entry, reference=job.against_label, space=extractor.space, **note)
    return _with_infinity(metric, job, features, Gaussian.of_features(theirs, job.device), make_entry)


def _fd_dinov2(job: Job) -> dict[str, dict]:
    return _feature_distance("fd-dinov2", job, job.dinov2_extractor, **_note(job.dinov2_extractor.weights))


def _fd_wavelets(job: Job) -> dict[str, dict]:
    return _feature_distance("fd-wavelets", job, job.wavelets)


def _fvd(job: Job) -> dict[str, dict]:
    count = frame_count(job.paths[0])
    if count < 2:
        raise ValueError(f"{job.paths[0]} is an image: fvd needs a run of a model that generates videos")
    if job.reference is None or not job.reference.is_dir():
        raise ValueError(f"--ref is {job.reference}: fvd needs a folder of videos, or another run of videos")
    videos, frames = read_folder(job.reference, videos=True), job.frames or count
    extractor = job.i3d_extractor(frames)
    settings: dict[str, Any] = {
        "batch_size": max(1, job.batch_size // frames),
        "read": partial(read_clip, frames=frames),
    }
    features = extract(job.paths, extractor, cache=job.run / "features", **settings)
    theirs = extract_reference(videos, extractor, **settings)
    warn_of_few("fvd", FEWEST_VIDEOS, len(features), len(theirs))
    label = f"{videos.label}: {len(theirs)} videos"
    make_entry = partial(job.entry, reference=label, space=extractor.space, weights=extractor.weights)
    return _with_infinity("fvd", job, features, Gaussian.of_features(theirs, job.device), make_entry)


# At which size pixels are compared.
_SMALL = f"{SIDE}x{SIDE}"


def _diversity(job: Job) -> dict[str, dict]:
    found = diversity(job.small_versions.reshape(job.count, -1), _conditions(job))
    return {name: job.entry(one, "images of the run", None, size=_SMALL) for name, one in found.items()}


def _conditions(job: Job) -> np.ndarray:
    """The prompt or class of each image of a run, by its number."""
    return np.array([row["class_label"] for row in job.rows]) if job.prompts is None else job.prompts


def _nearest(job: Job) -> dict[str, dict]:
    examples, held_out, ours = job.examples, job.held_out_images, job.small_versions
    theirs = ours[:0] if held_out is None else held_out.read(range(len(held_out)))[0].numpy()
    values, index = nearest(np.concatenate([ours, theirs]), examples, device=job.device)
    values, real = values[: len(ours)], values[len(ours) :]
    label = f"{_name(job.train, examples)}: {len(examples)} training examples"
    found = nearest_estimates(values, job.prompts)
    entries = {name: job.entry(one, label, None, size=_SMALL) for name, one in found.items()}
    if held_out is not None:
        of = f"{_name(job.held_out, held_out)}, held out, against {label}"
        found = nearest_estimates(real)
        entries |= {f"held-out-{name}": entry(one, len(real), of, None, size=_SMALL) for name, one in found.items()}
    if job.is_run:
        write_scores(job.run, "nearest", values)
    if job.sheet is not None:
        _write_sheet(job, job.sheet, values, index)
    return entries


def _write_sheet(job: Job, path: Path, values: np.ndarray, index: np.ndarray) -> None:
    """Write some of the images over their nearest examples, with their likeness and their prompt or class."""
    cells = []
    # Images that are not a run have no prompts: some at a time.
    for some in chosen_images(_conditions(job) if job.is_run else np.arange(job.count) // IMAGES):
        row = job.rows[some[0]] if job.is_run else {}
        title = [*(f"{values[number]:.2f}" for number in some), str(row.get("prompt", row.get("class_label", "")))]
        examples = job.examples.read(index[some].tolist())[0].numpy()
        cells.append((" ".join(title), job.small_versions[some], examples))
    write_sheet(path, cells)


def _name(data: str | Path | None, images: Any) -> str:
    """What a data set is called in a reference: its name, and a digest of some of its images."""
    return f"{Path(str(data)).name}, sha256 of samples {images.about['images'][:8]}"


def needs_clip(metrics: list[str]) -> bool:
    """Whether one of the metrics, installed ones too, asks CLIP."""
    return any(name.startswith("clip") or name == "cmmd" for name in metrics)


def extractors(job: Job, metrics: list[str]) -> Iterator[tuple[Extractor, Callable[[Path], object], int]]:
    """The networks of metrics of this package, each once, how they read a file, and how many images of the reference
    they are given."""
    names = set(metrics)

    def theirs(*some: str) -> int:
        return job.against.count if names & {*some} & {*REFERENCE_METRICS} else 0

    of_pooling = {*INCEPTION_METRICS} - {"sfid"}
    if names & of_pooling:
        yield job.inception, job.read, theirs(*of_pooling)
    if "sfid" in names:
        yield job.spatial_inception, job.read, theirs("sfid")
    if needs_clip(metrics):
        yield job.clip_extractor, job.read, theirs("cmmd")
    if "fd-dinov2" in names:
        yield job.dinov2_extractor, job.read, theirs("fd-dinov2")
    if "fd-wavelets" in names:
        yield job.wavelets, job.read, theirs("fd-wavelets")
    if job.reference is not None and "fvd" in names:
        frames = job.frames or frame_count(job.paths[0])
        count = read_folder(job.reference, videos=True).count
        yield job.i3d_extractor(frames), partial(read_clip, frames=frames), count


METRICS: dict[str, Callable[[Job], dict[str, dict]]] = {
    "fid": _fid,
    "fid-categories": _fid_categories,
    "kid": _kid,
    "prdc": _prdc,
    "isc": _isc,
    "sfid": _sfid,
    "fd-dinov2": _fd_dinov2,
    "fd-wavelets": _fd_wavelets,
    "cmmd": _cmmd,
    "clip": _clip,
    "clip-choice": _clip_choice,
    "fvd": _fvd,
    "diversity": _diversity,
    "nearest": _nearest,
}
