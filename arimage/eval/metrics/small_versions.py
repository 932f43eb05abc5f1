"""Small versions of images, whose pixels are compared where no network is needed."""

from pathlib import Path

import numpy as np

from ...media.files import read_image
from ...training.tokens.views import centre_crop
from .features import image_batches


# Pixels along each side.
SIDE = 64


def small_versions(paths: list[Path], batch_size: int = 256) -> np.ndarray:
    """The middle of each image in `SIDE` x `SIDE` pixels, as the images of a training set are read: uint8
    [N, 3, SIDE, SIDE].

    Args:
        paths: as `extract` takes them.
    """
    batches = image_batches(paths, batch_size, "small versions", read_image)
    arrays = [np.asarray(centre_crop(image, (SIDE, SIDE))) for images in batches for image in images]
    return np.stack(arrays).transpose(0, 3, 1, 2)
