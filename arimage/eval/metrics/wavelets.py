"""Plain statistics of images, for a distance that needs no network: colours, and the energy of wavelets."""

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from ...media.files import to_rgb
from .features import Space


SIDE = 128
# Squares along each side, in which colours and energies are averaged.
COLOURS, ENERGIES = 4, 2
# Of the wavelets: differences of 1, 2, 4, 8 and 16 pixels.
LEVELS = 5
# Brightness, and red and blue less the brightness (ITU-R BT.601).
OPPONENT = ((0.299, 0.587, 0.114), (0.701, -0.587, -0.114), (-0.299, -0.587, 0.886))


class WaveletExtractor:
    """Features [B, 228] of images: the mean colour in 4 x 4 squares, and in 2 x 2 squares the root of the mean
    magnitude of Haar wavelets of five sizes and three directions (horizontal, vertical, diagonal), for brightness and
    two colour differences.

    They see colours and where they are, sharpness, noise, and how much detail of which size and direction there is.
    They see neither objects nor faces, nor whether a detail is in the right place. Images are resized to 128x128
    pixels whatever their aspect ratio, by Pillow's bicubic filter.
    """

    space = Space("colours-and-wavelets-228", "no weights", f"{SIDE}x{SIDE} bicubic")

    def __init__(self, device: str = "cpu"):
        self.device = device

    @torch.inference_mode()
    def __call__(self, images: list[Image.Image]) -> torch.FloatTensor:
        resized = [to_rgb("an image", one).resize((SIDE, SIDE), Image.Resampling.BICUBIC) for one in images]
        pixels = torch.from_numpy(np.stack([np.asarray(one) for one in resized])).to(self.device).float() / 255
        smooth = torch.einsum("bhwc,oc->bohw", pixels, pixels.new_tensor(OPPONENT))
        found = [F.adaptive_avg_pool2d(smooth, COLOURS)]
        for _ in range(LEVELS):
            left, right = smooth[..., ::2], smooth[..., 1::2]
            (above, below), (over, under) = (
                (half[..., ::2, :], half[..., 1::2, :]) for half in ((left + right) / 2, (left - right) / 2)
            )
            smooth = (above + below) / 2
            details = torch.cat([(above - below) / 2, (over + under) / 2, (over - under) / 2], dim=1)
            found.append(F.adaptive_avg_pool2d(details.abs(), ENERGIES).sqrt())
        return torch.cat([part.flatten(1) for part in found], dim=1)
