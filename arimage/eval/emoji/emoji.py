"""Scores of emoji against the pictures that the packaged models were trained on, without any download. The card in
`arimage/assets/emoji-reference` describes the reference."""

from pathlib import Path

import numpy as np
import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from PIL import Image
from torch import nn

from ...auto import ASSETS
from ..metrics.features import Space, file_sha256, image_paths
from ..metrics.kernel_distance import kernel
from ..metrics.standard_errors import Estimate
from ..runs.prompts import EMOJI_PROMPTS, read_prompts
from ..runs.run_folder import read_rows
from .retrieval import retrieval_hits


REFERENCE = ASSETS / "emoji-reference"
GALLERY_SIZE, GALLERY_COLUMNS = 32, 64


class EmojiClassifier(ModelMixin, ConfigMixin):
    """Classifies which emoji a picture shows, in any style.

    Args:
        num_classes (`int`): the number of concepts.
        channels (`list[int]`): of the four convolutions; the outputs of the last are the features.
        norm_num_groups (`int`): groups of the group normalisation.
        image_size (`int`): side in pixels of the training pictures.
    """

    @register_to_config
    def __init__(
        self,
        num_classes: int = 1893,
        channels: tuple[int, ...] = (32, 64, 96, 96),
        norm_num_groups: int = 8,
        image_size: int = 64,
    ):
        super().__init__()
        layers, width = [], 3
        for channel, kernel_size, stride in zip(channels, (7, 3, 3, 3), (4, 2, 1, 2), strict=True):
            layers.append(nn.Conv2d(width, channel, kernel_size, stride, padding=kernel_size // 2))
            layers += [nn.GroupNorm(norm_num_groups, channel), nn.SiLU()]
            width = channel
        self.convolutions = nn.Sequential(*layers)
        self.head = nn.Linear(width, num_classes)

    def features(self, images: torch.Tensor) -> torch.Tensor:
        """Images [B, 3, S, S] in [-1, 1] to features [B, D], spatial means of the last convolution."""
        return self.convolutions(images).mean((2, 3))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Images as in `features` to logits [B, num_classes]."""
        return self.head(self.features(images))


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
        pixels = np.stack([_pixels(image, self.size) for image in images]) * 2 - 1
        return self.classifier.features(torch.from_numpy(pixels).to(self.classifier.device)).float().cpu()


def reference_features(folder: Path = REFERENCE) -> np.ndarray:
    """float32 [M, D]: the features, in the space of `EmojiExtractor`, of the pictures of `prompts.jsonl`."""
    return np.load(folder / "features.npy").astype(np.float32)


def asked_features(run: Path) -> np.ndarray:
    """float32 [N, D]: the `reference_features` of the pictures that the images of a run should show, in manifest order.

    Raises:
        ValueError: if a row of the manifest has no name, or an unknown one.
    """
    names = [row["name"] for row in read_prompts(EMOJI_PROMPTS)]
    return reference_features()[[names.index(name) for name in _asked_names(run, names)]]


def _asked_names(run: Path, known: list[str]) -> list[str]:
    names = [row.get("metadata", {}).get("name") for row in read_rows(run)]
    strangers = sorted({str(name) for name in names} - set(known))
    if strangers:
        raise ValueError(
            f"the reference has no picture of {strangers[0]!r}, which {run} has: generate with --prompts emoji"
        )
    return names


def emoji_kernel_distance(features: np.ndarray, reference: np.ndarray, prompts: list[str]) -> Estimate:
    """Squared maximum mean discrepancy of features [N, D] and [M, D] under the kernel of KID, (x . y / D + 1)^3
    (https://arxiv.org/abs/1801.01401).

    Unlike KID it is not corrected for the number of images, because the reference is the whole population and not a sample:
    the same pictures in equal numbers score 0, and nothing scores less. The standard error is over other images of the same
    `prompts` [N]; with one image per prompt it is also over other prompts, and so an upper bound.
    """

    features, reference = features.astype(np.float64), reference.astype(np.float64)
    across = kernel(features, reference).mean(1)
    # Similarity of each image to the images, minus its similarity to the reference.
    added = kernel(features, features).mean(1) - across
    value = added.mean() - across.mean() + kernel(reference, reference).mean()
    _, group, sizes = np.unique(prompts, return_inverse=True, return_counts=True)
    if len(sizes) == len(added):
        group, sizes = np.zeros_like(group), np.array([len(added)])
    spread = (added - (np.bincount(group, added) / sizes)[group]) ** 2
    variance = spread.sum() / (len(added) - len(sizes))
    return Estimate(float(value), float(2 * (variance / len(added)) ** 0.5))


def read_gallery(folder: Path = REFERENCE) -> tuple[torch.Tensor, list[str]]:
    """The pictures float [K, 3, 32, 32] in [0, 1] in which samples are looked up, and the name of each."""
    names = (folder / "gallery.txt").read_text(encoding="utf-8").split("\n")[:-1]
    sheet = torch.from_numpy(np.asarray(Image.open(folder / "gallery.webp").convert("RGB")) / np.float32(255))
    tiles = sheet.unflatten(0, (-1, GALLERY_SIZE)).unflatten(2, (-1, GALLERY_SIZE)).permute(0, 2, 4, 1, 3)
    return tiles.flatten(0, 1)[: len(names)], names


def emoji_retrieval(run: Path, gallery: torch.Tensor, gallery_names: list[str]) -> torch.Tensor:
    """bool [N, 5] for the images of a run in manifest order: whether the nearest, second nearest, ... picture of the gallery
    has the name of the prompt. See `retrieval.retrieval_hits`.

    Raises:
        ValueError: if a row of the manifest has no name, or one that is not in the gallery.
    """
    names = _asked_names(run, gallery_names)
    pixels = np.stack([_pixels(Image.open(path), GALLERY_SIZE) for path in image_paths(run)])
    return retrieval_hits(torch.from_numpy(pixels), names, gallery, gallery_names)


def _pixels(image: Image.Image, size: int) -> np.ndarray:
    """float32 [3, size, size] in [0, 1]; downscaling averages the covered pixels."""
    image = image.convert("RGB").resize((size, size), Image.Resampling.BOX)
    return np.asarray(image, np.float32).transpose(2, 0, 1) / 255
