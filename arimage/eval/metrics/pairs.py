"""Figures of images next to their originals: PSNR, SSIM and LPIPS. Pixels are [B, 3, H, W] from 0 to 1."""

from pathlib import Path
from typing import cast

import torch

from .features import fetch


# The squared error of 60 dB: an image that is reproduced exactly counts as that.
LEAST = 1e-6
# Of torchvision. The name tells how the file's SHA-256 begins.
ALEXNET, ALEXNET_SHA256 = "https://download.pytorch.org/models/alexnet-owt-7be5be79.pth", "7be5be79"


def psnr(images: torch.FloatTensor, originals: torch.FloatTensor) -> torch.FloatTensor:
    """Peak signal-to-noise ratios [B] in dB, 60 at most."""
    return -10 * (images - originals).square().mean((1, 2, 3)).clamp(min=LEAST).log10()


def ssim(images: torch.FloatTensor, originals: torch.FloatTensor) -> torch.FloatTensor:
    """Structural similarities [B] (https://doi.org/10.1109/TIP.2003.819861), 1 for equal images: the mean over the
    colours and all pixels, with the authors' Gaussian window of 11 pixels, which sees mirrored pixels at borders."""
    from torchmetrics.functional.image import structural_similarity_index_measure

    found = structural_similarity_index_measure(images, originals, data_range=1.0, reduction="none")
    return cast(torch.FloatTensor, found).flatten()


class Lpips:
    """Learned perceptual distances [B] (https://arxiv.org/abs/1801.03924) of AlexNet, 0 for equal images.

    Args:
        download: whether to download AlexNet, with a progress bar, if it is not in the cache of torch.

    Raises:
        ValueError: if it is not there and may not be downloaded, or is another file.
        ConnectionError: if it cannot be downloaded.
    """

    def __init__(self, device: str = "cpu", download: bool = False):
        from torchmetrics.image.lpip import LearnedPerceptualImagePatchSimilarity

        path = Path(torch.hub.get_dir()) / "checkpoints" / Path(ALEXNET).name
        if not path.is_file():
            if not download:
                raise ValueError(f"lpips needs {path.name} of torchvision: give --download, or leave lpips out")
            fetch(ALEXNET, path, ALEXNET_SHA256, f"put it at {path}")
        self._network = LearnedPerceptualImagePatchSimilarity("alex").net.to(device)

    @torch.inference_mode()
    def __call__(self, images: torch.FloatTensor, originals: torch.FloatTensor) -> torch.FloatTensor:
        return self._network(images, originals, normalize=True).flatten()
