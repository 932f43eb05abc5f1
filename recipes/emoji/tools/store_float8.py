"""Stores the large matrices of a component in float8 (e4m3), which halves its file; it loads as before.

python recipes/emoji/tools/store_float8.py recipes/emoji/arimage_emoji/assets/emoji-llamagen/drafter
"""

import argparse
import os
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file


# Smaller ones save nothing, and norms, biases and embeddings of a few rows need their precision.
LEAST = 4096


def store_float8(file: Path) -> None:
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    weights = {
        name: weight.to(torch.float8_e4m3fn) if weight.ndim == 2 and weight.numel() >= LEAST else weight
        for name, weight in load_file(file).items()
    }
    partial = file.with_suffix(".partial")
    save_file(weights, partial, metadata=metadata)
    os.replace(partial, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    for folder in parser.parse_args().folders:
        (file,) = folder.glob("*.safetensors")
        before = file.stat().st_size
        store_float8(file)
        print(f"{file}: {before:,} -> {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
