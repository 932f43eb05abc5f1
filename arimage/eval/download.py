"""`--download`: fetches the networks of metrics that no option names, and checks their hashes."""

from dataclasses import replace
from pathlib import Path

from huggingface_hub import HfApi, is_offline_mode

from ..pipelines.family import HubFiles
from ..published.hub import download, hub_errors
from .figures import INCEPTION_METRICS, needs_clip
from .job import Job
from .metrics.clip_score import PUBLISHED as CLIP
from .metrics.clip_score import PUBLISHED_336 as CLIP_336
from .metrics.dinov2 import PUBLISHED as DINOV2
from .metrics.features import Resize, WeightsFile, fetch, file_sha256
from .metrics.i3d import I3D_WEIGHTS
from .metrics.inception import INCEPTION_WEIGHTS, InceptionExtractor


def with_networks(job: Job, metrics: list[str]) -> Job:
    """The job with those networks of `metrics` that it does not name, downloaded unless they are on this machine.

    Raises:
        ValueError: if a file is not what was published.
        PermissionError, FileNotFoundError, ConnectionError: if one cannot be downloaded.
    """
    found: dict[str, Path] = {}
    if job.inception_weights is None and {*metrics} & {*INCEPTION_METRICS}:
        found["inception_weights"] = fetch_file(INCEPTION_WEIGHTS[job.resize])
    if job.i3d_weights is None and "fvd" in metrics:
        found["i3d_weights"] = fetch_file(I3D_WEIGHTS)
    if job.clip is None and needs_clip(metrics):
        found["clip"] = fetch_repository(CLIP_336 if "cmmd" in metrics else CLIP)
    if job.dinov2 is None and "fd-dinov2" in metrics:
        found["dinov2"] = fetch_repository(DINOV2)
    return replace(job, **found)


def load_inception(weights: Path | None, resize: Resize, download: bool, device: str) -> InceptionExtractor:
    """The network of `weights`; with `download` by default the published one."""
    if weights is None and download:
        weights = fetch_file(INCEPTION_WEIGHTS[resize])
    return InceptionExtractor(weights, resize, device)


def fetch_file(file: WeightsFile) -> Path:
    """Where a file of weights is kept for all commands; it is downloaded with a progress bar if it is not there."""
    path = file.kept
    if path.is_file() and file_sha256(path) == file.sha256:
        return path
    fetch(file.url, path, file.sha256, f"name it with {file.option}")
    return path


def fetch_repository(name: str) -> Path:
    """The folder with a model of the Hugging Face Hub, downloaded with a progress bar if it is not in the cache."""
    folder = download(HubFiles(name, ("*.safetensors", "*.json", "*.txt")), None)
    if is_offline_mode():
        return folder
    with hub_errors(name):
        wrong = HfApi().verify_repo_checksums(name).mismatches
    if wrong:
        path = wrong[0]["path"]
        raise ValueError(f"{folder / path} is not the published file: delete it, and repeat the command")
    return folder
