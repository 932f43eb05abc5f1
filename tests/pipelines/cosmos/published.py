"""A tiny Cosmos under the names of published files."""

from pathlib import Path

import published_layouts as layouts
from PIL import Image
from pipelines.cosmos import tiny


def write(root: Path) -> None:
    layouts.copy(tiny.FOLDER / "base.pt", root / "nvidia/Cosmos-Predict1-4B/model.pt")
    for name in ("encoder.jit", "decoder.jit"):
        layouts.copy(tiny.TOKENIZER / name, root / "nvidia/Cosmos-Tokenize1-DV8x16x16-720p" / name)
    for name in ("config.json", "README.md"):
        (root / "nvidia/Cosmos-Predict1-4B" / name).write_bytes(layouts.UNUSED)


MODELS = {
    "cosmos-4b": (
        write,
        {"image": Image.new("RGB", (64, 48)), "num_frames": 9},
        "CosmosPipeline",
        {"num_frames": 17, "height": 48, "width": 64},
    )
}
