"""From a published folder of a discrete video tokenizer of Cosmos (https://github.com/NVIDIA/Cosmos-Tokenizer) to a
`CosmosVideoTokenizer`."""

import re
from pathlib import Path

import torch

from ...convert.checkpoint import OriginalTensors, save_whole
from ...convert.paths import CheckpointError, check_vacant
from ...convert.torchscript import load_torchscript
from .fsq_cosmos import CosmosVideoTokenizer


KIND = "discrete Cosmos video tokenizer"
# Constants, which the model has of its own.
CONSTANTS = r".*patcher3d\..*|(inv_quant\.)?quantizer\..*"
# Names here and the original's, replaced from top to bottom.
NAMES = (
    (r"(quant_conv)\.", r"\1.conv3d."),
    (r"\.conv_s\.", ".0.conv3d."),
    (r"\.conv_t\.", ".1.conv3d."),
    (r"\.conv_shortcut\.", ".nin_shortcut.conv3d."),
    (r"\.(down|up)samplers\.0\.(conv\d)\.", r".\1sample.\2.conv3d."),
    (r"\.to_([qkv])\.", r".\1.conv3d."),
    (r"\.to_out\.0\.", ".proj_out.conv3d."),
    (r"\.mid_block\.attentions\.0\.", ".mid.attn_1.0."),
    (r"\.mid_block\.temp_attentions\.0\.", ".mid.attn_1.1."),
    (r"\.mid_block\.resnets\.0\.", ".mid.block_1."),
    (r"\.mid_block\.resnets\.1\.", ".mid.block_2."),
    (r"\.down_blocks\.", ".down."),
    (r"\.resnets\.", ".block."),
)


def convert_cosmos_tokenizer(folder: str | Path, *, out: str | Path | None = None) -> CosmosVideoTokenizer:
    """The tokenizer of a published folder, in the dtype of its files and in evaluation mode.

    Args:
        folder: with `encoder.jit` and `decoder.jit`, or with `autoencoder.jit`, of a discrete video tokenizer such as
            Cosmos-Tokenize1-DV8x16x16-720p. Nothing in the files is executed.
        out: a new or empty folder to save the tokenizer to. It appears when all of it is written, or not at all.

    Raises:
        CheckpointError: if a file is missing, damaged, or that of another kind of tokenizer, or `out` is taken.
    """
    check_vacant(out)
    folder = Path(folder)
    if (folder / "encoder.jit").is_file():
        state = load_torchscript(folder / "encoder.jit") | load_torchscript(folder / "decoder.jit")
    elif (folder / "autoencoder.jit").is_file():
        state = load_torchscript(folder / "autoencoder.jit")
    else:
        raise CheckpointError(
            f"{folder} has neither encoder.jit and decoder.jit nor autoencoder.jit: give the folder of a {KIND}"
        )
    tokenizer = cosmos_tokenizer_from_original(state, source=folder)
    save_whole(tokenizer.save_pretrained, out)
    return tokenizer


def cosmos_tokenizer_from_original(
    state: dict[str, torch.Tensor], *, source: str | Path = "the tokenizer's files"
) -> CosmosVideoTokenizer:
    """The tokenizer whose tensors are `state`, by their original names, in their dtype."""
    if "quantizer._levels" not in state:
        raise CheckpointError(f"{source} has no 'quantizer._levels', as every {KIND} has: give the folder of one")
    state = OriginalTensors(state, KIND, source)
    first = state.shape("encoder.conv_in.0.conv3d.weight", 5)
    patch_size = round((first[1] / 3) ** (1 / 3))
    widths = {
        half: [
            state.shape(f"{half}.{way}.{level}.block.0.conv1.0.conv3d.weight", 5)[0]
            for level in range(state.count(f"{half}.{way}."))
        ]
        for half, way in (("encoder", "down"), ("decoder", "up"))
    }
    if first[1] != 3 * patch_size**3 or not widths["encoder"] or not widths["decoder"]:
        raise CheckpointError(f"{source} is not that of a {KIND}: give the folder of one")
    deepest = state.shape("decoder.conv_in.0.conv3d.weight", 5)[0]
    levels = len(widths["encoder"])
    downs = {
        axis: sum(f"encoder.down.{level}.downsample.{conv}.conv3d.weight" in state for level in range(levels))
        for axis, conv in (("spatial", "conv1"), ("temporal", "conv2"))
    }
    dtype = state["encoder.conv_in.0.conv3d.weight"].dtype
    # Not on the meta device, since no file holds its constants.
    tokenizer = CosmosVideoTokenizer(
        encoder_block_out_channels=(first[0], *widths["encoder"]),
        decoder_block_out_channels=(*widths["decoder"], deepest),
        latent_channels=state.shape("encoder.conv_out.0.conv3d.weight", 5)[0],
        num_layers=state.count("encoder.down.0.block."),
        patch_size=patch_size,
        spatial_compression_ratio=patch_size * 2 ** downs["spatial"],
        temporal_compression_ratio=patch_size * 2 ** downs["temporal"],
        levels=tuple(state["quantizer._levels"].tolist()),
    )
    highest = len(widths["decoder"]) - 1
    return state.fill(tokenizer, lambda name: _original_name(name, highest), dtype=dtype, ignored=CONSTANTS)


def _original_name(name: str, highest: int) -> str:
    for ours, original in NAMES:
        name = re.sub(ours, original, name)
    return re.sub(r"\.up_blocks\.(\d+)\.", lambda match: f".up.{highest - int(match[1])}.", name)
