"""What an upscaler is measured by: distances that are zero for the same image, and images of the same tokens."""

import tiny
import torch
import torch.nn.functional as F
from pipelines.llamagen import tiny as tiny_llamagen
from upscaling import decode_both, feature_distance, interpolated

from arimage_emoji.metrics.emoji_kid import EmojiExtractor
from arimage_emoji.metrics.reference import read_gallery


@torch.no_grad()
def test_the_distance_of_features_grows_with_blur():
    classifier = EmojiExtractor().classifier
    images = interpolated(read_gallery()[0][:6], (64, 64))
    blurred = [F.avg_pool2d(images, size, stride=1, padding=size // 2, count_include_pad=False) for size in (3, 7)]
    none, little, much = (feature_distance(classifier, images, others) for others in (images, *blurred))
    assert none.abs().max() < 1e-5 and (little > 1e-3).all() and (much > little).all()


@torch.no_grad()
def test_both_sizes_show_the_same_tokens():
    pipe = tiny_llamagen.text_pipeline()
    pipe.register_modules(upscaler=type(tiny.upscaler())((4, 6), 1))
    decoded, upscaled = decode_both(pipe, ["a red heart", "tree"], 0)
    # A fresh upscaler interpolates, before levels are cut off.
    inside = interpolated(decoded, (16, 16))
    assert decoded.shape == (2, 3, 8, 8) and upscaled.shape == inside.shape
    assert (upscaled - inside).abs().median() < 0.02
