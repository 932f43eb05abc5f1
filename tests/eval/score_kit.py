"""What the tests of scores share: images, and a network whose features are known."""

import numpy as np
import torch
from PIL import Image

from arimage.eval.metrics.features import Space


class Moments:
    """Mean and spread of each channel: features [B, 6]."""

    weights = "published"

    def __init__(self, weights, resize="clean", device="cpu"):
        self.space = Space("moments", "0" * 64, resize)

    def __call__(self, images):
        pixels = torch.stack([torch.from_numpy(np.array(image)) for image in images]).flatten(1, 2) / 255
        return torch.cat([pixels.mean(1), pixels.std(1)], 1)

    def logits(self, features):
        return features @ np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32) * 40


def pictures(count, seed, shift=0):
    """Noise, uint8 [count, 8, 8, 3]."""
    return (np.random.default_rng(seed).integers(0, 200, (count, 8, 8, 3)) + shift).astype(np.uint8)


def save(folder, arrays):
    """Write images into a new folder; returns it."""
    folder.mkdir(parents=True)
    for i, array in enumerate(arrays):
        Image.fromarray(array).save(folder / f"{i:06d}.png")
    return folder
