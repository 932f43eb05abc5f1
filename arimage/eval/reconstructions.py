"""`arimage eval tokenizer`: what an image tokenizer makes of images, next to them."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from ..media.files import read_image
from ..pipelines.base import ARImagePipeline
from ..training.losses import condition_of
from ..training.tokens.views import centre_crop
from .bench.measure import quiet
from .download import load_inception
from .figures import FEWEST_IMAGES
from .job import entry, warn_of_few
from .metrics.features import Resize, image_batches
from .metrics.frechet import FrechetDistance, Gaussian
from .metrics.pairs import Lpips, psnr, ssim
from .metrics.reference import read_images
from .metrics.standard_errors import Estimate, mean_estimate


METRICS = ("psnr", "ssim", "lpips", "rfid")


def check_reconstructs(pipe: ARImagePipeline, model: str) -> None:
    """Refuse models that only decode images."""
    if not pipe.abilities.accepts("mask_image") or pipe.abilities.generates_video:
        raise ValueError(f"{model} does not encode images: choose a model that edits them")


@torch.no_grad()
def reconstruct(pipe: ARImagePipeline, pixels: torch.ByteTensor, size: tuple[int, int]) -> torch.ByteTensor:
    """What the image tokenizer makes of images [B, 3, H, W] of `size`."""
    # The tokens of a picture depend neither on a prompt nor on an order.
    raster = {"order": "raster"} if pipe.abilities.accepts("order") else {}
    condition = condition_of(pipe, ["0"] * len(pixels))
    call = quiet(pipe).prepare(**condition, **raster, height=size[0], width=size[1])
    given = (pixels.float() / 127.5 - 1).to(pipe._execution_device)
    if pipe.abilities.kind == "masked_tokens":
        tokens = pipe.encode_image(given).flatten(1)
    else:
        tokens = pipe.encode_known_tokens(given, torch.zeros_like(given[:, :1], dtype=torch.bool))
    decoded = pipe.decode_tokens(call, tokens)
    pipe.check_finite(decoded)
    return ((decoded.float().clamp(-1, 1) + 1) * 127.5).round().byte().cpu()


def score_tokenizer(
    pipe: ARImagePipeline,
    images: Path,
    metrics: list[str],
    *,
    size: int | None = None,
    inception_weights: Path | None = None,
    resize: Resize = "clean",
    download: bool = False,
    skip_damaged: bool = False,
    batch_size: int = 32,
) -> dict[str, dict]:
    """Figures of the reconstructions of images by the image tokenizer of a pipeline.

    Args:
        images: as `read_images` takes them; their middle is reconstructed.
        metrics: some of `METRICS`. "rfid" is the FID of the reconstructions to the images, at the same size, and gives
            "rfid-infinity" too.
        size: side in pixels. Default: that of the model's images.
        inception_weights, resize: of `InceptionExtractor`, for "rfid".
        download: whether to download the published networks that are missing.
        skip_damaged: leave out images that cannot be read.

    Returns:
        The entries of the figures, in the form of `metrics.json`.

    Raises:
        ValueError: if a metric is unknown, or an image or weights are missing or damaged.
    """
    unknown = [name for name in metrics if name not in METRICS]
    if unknown:
        raise ValueError(f"unknown metric {unknown[0]!r} of image tokenizers: choose among {', '.join(METRICS)}")
    given, device = read_images(images, skip_damaged=skip_damaged), str(pipe._execution_device)
    sides = pipe.image_sizes[0] if size is None else (size, size)
    functions = {name: function for name, function in (("psnr", psnr), ("ssim", ssim)) if name in metrics}
    if "lpips" in metrics:
        functions["lpips"] = Lpips(device, download)
    inception = load_inception(inception_weights, resize, download, device) if "rfid" in metrics else None
    values: dict[str, list] = {name: [] for name in functions}
    features: tuple[list, list] = [], []
    for batch in image_batches(given.paths, batch_size, "image tokenizer", read_image):
        cropped = [np.asarray(centre_crop(image, sides)) for image in batch]
        originals = torch.from_numpy(np.stack(cropped)).permute(0, 3, 1, 2)
        decoded = reconstruct(pipe, originals, sides)
        ours, theirs = (pixels.to(device).float() / 255 for pixels in (decoded, originals))
        for name, function in functions.items():
            values[name].append(function(ours, theirs).cpu())
        if inception is not None:
            for kept, pixels in zip(features, (decoded, originals), strict=True):
                pictures = [Image.fromarray(one) for one in pixels.permute(0, 2, 3, 1).numpy()]
                kept.append(inception(pictures).float().cpu().numpy())
    label = f"{given.label}: {given.count} pictures at {sides[1]}x{sides[0]}"
    found = {
        name: entry(mean_estimate(torch.cat(parts).numpy()), given.count, label, None)
        for name, parts in values.items()
    }
    if inception is not None:
        warn_of_few("rfid", FEWEST_IMAGES, given.count)
        ours, theirs = map(np.concatenate, features)
        distance = FrechetDistance(ours, Gaussian.of_features(theirs, device))
        shared = (given.count, label, inception.space)
        found["rfid"] = entry(distance.estimate(), *shared, weights=inception.weights)
        limit = Estimate(distance.infinity())
        found["rfid-infinity"] = entry(limit, *shared, weights=inception.weights, extrapolation="jackknife")
    return found
