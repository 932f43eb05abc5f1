"""What an upscaler is measured by: distances that are zero for the same image, and images of the same tokens."""

import tiny
import torch
from pipelines.llamagen import tiny as tiny_llamagen
from upscaling import decode_both, interpolated


@torch.no_grad()
def test_both_sizes_show_the_same_tokens():
    pipe = tiny_llamagen.text_pipeline()
    pipe.register_modules(upscaler=type(tiny.upscaler())((4, 6), 1))
    decoded, upscaled = decode_both(pipe, ["a red heart", "tree"], 0)
    # A fresh upscaler interpolates, before levels are cut off.
    inside = interpolated(decoded, (16, 16))
    assert decoded.shape == (2, 3, 8, 8) and upscaled.shape == inside.shape
    assert (upscaled - inside).abs().median() < 0.02
