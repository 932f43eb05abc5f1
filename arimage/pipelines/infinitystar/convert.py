"""From the published files of InfinityStar (https://github.com/FoundationVision/InfinityStar)."""

import re
from pathlib import Path

import torch

from ...convert.checkpoint import OriginalTensors
from .vq_infinitystar import InfinityStarVideoTokenizer


# Patterns of ours and the original's names, replaced from top to bottom.
TOKENIZER_NAMES = (
    (r"\.mid\.", ".mid_block."),
    (r"^encoder\.levels\.", "encoder.down_blocks."),
    (r"^decoder\.levels\.", "decoder.up_blocks."),
    (r"\.res\.", ".resnets."),
    # The original wraps every convolution in a module of its own.
    (r"\.(conv\w*)\.(weight|bias)$", r".\1.conv.\2"),
    (r"^encoder(.*)\.resample\.", r"encoder\1.downsamplers.0.conv."),
    (r"^decoder(.*)\.resample\.", r"decoder\1.upsamplers.0.conv."),
    (r"\.norm\.weight$", ".norm.gamma"),
    (r"\.scale\.(weight|bias)$", r".conv_y.conv.\1"),
    (r"\.shift\.(weight|bias)$", r".conv_b.conv.\1"),
    (r"(norm1|norm2|norm_out)\.norm\.gamma$", r"\1.norm_layer.gamma"),
    (r"(norm1|norm2|norm_out)\.weight$", r"\1.gamma"),
    (r"^scale$", "scale_learnable_parameters"),
)


def infinitystar_tokenizer_from_original(
    state: dict[str, torch.Tensor], *, source: str | Path = "the tokenizer's file"
) -> InfinityStarVideoTokenizer:
    """The video tokenizer whose tensors are `state`, in float32 and in evaluation mode.

    Args:
        state: tensors by their original names, see `load_original`.
        source: what errors call the file.

    Raises:
        CheckpointError: if a tensor is missing, unknown or of an unexpected shape.
    """
    state = OriginalTensors(state, "InfinityStar tokenizer", source)
    levels = range(state.count("encoder.down_blocks."))
    widths = [state.shape(f"encoder.down_blocks.{level}.resnets.0.conv1.conv.weight", 5)[0] for level in levels]
    latent_channels = state.shape("decoder.conv_in.conv.weight", 5)[1]
    with torch.device("meta"):
        vq = InfinityStarVideoTokenizer(tuple(widths), state.count("encoder.down_blocks.0.resnets."), latent_channels)
    # One entry per quantiser of the original's training; the first serves.
    state.shape("scale_learnable_parameters", 1)
    state["scale_learnable_parameters"] = state["scale_learnable_parameters"][0]
    for key in state:
        if key.endswith(".gamma"):
            state[key] = state[key].flatten()
    ignored = r"proj_(down|up)_two\..*|quantizer?\.lfq_(semantic|detail)\.mask"
    return state.fill(vq, _original_name, dtype=torch.float32, ignored=ignored)


def _original_name(name: str) -> str:
    for ours, original in TOKENIZER_NAMES:
        name = re.sub(ours, original, name)
    return name
