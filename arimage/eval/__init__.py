"""Generates many images, scores them, and compares decodings. `score_images` scores images of any model."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal


def score_images(
    images: str | Path,
    reference: str | Path | None = None,
    *,
    metrics: str | Sequence[str],
    inception_weights: str | Path | None = None,
    clip: str | Path | None = None,
    dinov2: str | Path | None = None,
    train: str | Path | None = None,
    held_out: str | Path | None = None,
    read: Literal["shown", "raw"] = "shown",
    resize: Literal["clean", "tf1"] = "clean",
    size: int | None = None,
    batch_size: int = 32,
    device: str | None = None,
    download: bool = False,
) -> dict[str, dict[str, Any]]:
    """Score images of any model, as `arimage eval score` does.

    Args:
        images: a folder of images with all its subfolders, a .npz (`arr_0`) or .npy of images, uint8 [N, H, W, 3], or
            a folder of `arimage eval generate`, to whose `metrics.json` the figures are added. Nothing else is written
            next to the images.
        reference: real images in one of these forms, or for "fid" and "sfid" a .npz of statistics. "isc" and "clip"
            need none.
        metrics: names of metrics, such as "fid", "kid", "prdc", "isc", "sfid", "fd-dinov2", "cmmd", "nearest" and
            "fd-wavelets" (which needs no network), or a text with commas between them. Others need the prompts or
            videos of a run.
        inception_weights: the file of the Inception network; by default that of `ARIMAGE_INCEPTION_WEIGHTS`.
        clip: for "cmmd" and metrics that begin with "clip", a folder with a CLIP model.
        dinov2: for "fd-dinov2", a folder with a DINOv2 model of transformers, or a Hub id to download one.
        train: for "nearest", the training set: a folder of images, a folder or pattern of shards, or a Hub id.
        held_out: for "nearest", real images that training did not see, in one of these forms, to say the same of.
        read: "shown" reads files as viewers show them, "raw" without orientation, colour profile and transparency.
        resize: of the Inception network: "clean" is that of clean-fid, "tf1" that of the original FID and ADM.
        size: for the Inception metrics, resize the images, not the reference, to this side in pixels first.
        batch_size: images per call of the networks.
        device: by default a GPU if there is one, else the CPU.
        download: download the published networks of the metrics that no argument names, once, and check their hashes.

    Returns:
        One entry per figure, by its name: `value`, `standard_error` (None if unknown), `count` of images, `reference`,
        `space` (network, weights and resizing), and settings. Some metrics have several figures.

    Raises:
        ValueError: if a metric is unknown or does not fit the images, an image, the reference or weights are missing
            or damaged, or a figure is not finite.
        PermissionError, FileNotFoundError, ConnectionError: if a network cannot be downloaded.
    """
    from ..cli.options import choose_device
    from .job import Job
    from .options import NETWORKS
    from .score import score

    weights = inception_weights or os.environ.get(NETWORKS["inception_weights"])
    job = Job(
        Path(images),
        reference=None if reference is None else Path(reference),
        inception_weights=None if weights is None else Path(weights),
        clip=None if clip is None else Path(clip),
        dinov2=dinov2,
        train=train,
        held_out=held_out,
        raw=read == "raw",
        resize=resize,
        size=size,
        batch_size=batch_size,
        device=choose_device(device),
    )
    return score(job, metrics.split(",") if isinstance(metrics, str) else list(metrics), download=download)
