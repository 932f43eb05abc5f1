"""The metric `emoji-kid`: the kernel distance between images and the training pictures of their prompts."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from arimage.eval.metrics.features import Space, file_sha256
from arimage.eval.metrics.kernel_distance import kernel
from arimage.eval.metrics.standard_errors import Estimate, standard_error
from arimage.eval.runs.prompts import read_prompts

from .. import EMOJI, REFERENCE
from .classifier_emoji import EmojiClassifier
from .reference import asked_names, reference_features, to_pixels


class EmojiExtractor:
    """Features of pictures in the space of the classifier in `folder`."""

    def __init__(self, folder: Path = REFERENCE, device: str | torch.device = "cpu"):
        self.classifier = EmojiClassifier.from_pretrained(folder / "classifier").to(device).eval()
        weights = folder / "classifier" / "diffusion_pytorch_model.safetensors"
        self.size = self.classifier.config.image_size
        self.space = Space("emoji-classifier", file_sha256(weights), f"box {self.size}")

    @torch.no_grad()
    def __call__(self, images: list[Image.Image]) -> torch.Tensor:
        """Pictures of any sizes to features float32 [B, D] on the CPU."""
        pixels = np.stack([to_pixels(image, self.size) for image in images]) * 2 - 1
        return self.classifier.features(torch.from_numpy(pixels).to(self.classifier.device)).float().cpu()


def asked_features(run: Path) -> np.ndarray:
    """The `reference_features` of the pictures that the images of a run should show, float32 [N, D] in manifest order.

    Raises:
        ValueError: if a row of the manifest has no name, or an unknown one.
    """
    names = [row["name"] for row in read_prompts(EMOJI.path)]
    return reference_features()[[names.index(name) for name in asked_names(run, names)]]


def emoji_kernel_distance(features: np.ndarray, reference: np.ndarray, prompts: list[str]) -> Estimate:
    """Squared maximum mean discrepancy of features [N, D] and [M, D] under the kernel of KID, (x . y / D + 1)^3
    (https://arxiv.org/abs/1801.01401).

    Unlike KID it is not corrected for the number of images, because the reference is the whole population and not a
    sample: the same pictures in equal numbers score 0, and nothing scores less. The standard error is over other
    `prompts` [N] with their pictures. It needs several prompts, and a reference of the picture of each image's prompt,
    M = N; otherwise it is None.
    """
    features, reference = features.astype(np.float64), reference.astype(np.float64)
    across = kernel(features, reference)
    # Similarity to the images minus similarity to the reference, of each image and of each picture.
    of_images = kernel(features, features).mean(1) - across.mean(1)
    of_pictures = across.mean(0) - kernel(reference, reference).mean(1)
    value = float(of_images.mean() - of_pictures.mean())
    if len(set(prompts)) == 1 or len(features) != len(reference):
        return Estimate(value)
    return Estimate(value, standard_error(2 * (of_images - of_pictures), prompts))
