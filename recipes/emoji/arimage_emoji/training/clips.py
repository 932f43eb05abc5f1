"""Clips: short videos that models of videos and their tokenizers are trained on."""

import torch

from .captioned import ImageCaptions


# Frames per second at which a clip is shown.
FPS = 8


def frames_of(clips: ImageCaptions) -> ImageCaptions:
    """The frames of clips as single images without captions."""
    count = clips.images.shape[1]
    names = [name for name in clips.names for _ in range(count)]
    return ImageCaptions(
        images=clips.images.flatten(0, 1),
        alpha=clips.alpha.flatten(0, 1),
        captions=[[] for _ in names],
        names=names,
        bases=names,
        weights=torch.ones(len(names)),
    )
