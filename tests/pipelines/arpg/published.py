"""A tiny ARPG under the names of published files."""

from pathlib import Path

import published_layouts as layouts
from pipelines.arpg import tiny
from pipelines.llamagen import tiny as tiny_llamagen


def write(root: Path) -> None:
    layouts.copy(tiny.FOLDER / "arpg_tiny.pt", root / "hp-l33/ARPG/arpg_300m.pt")
    layouts.copy(tiny_llamagen.FIXTURES / "c2i" / "vq_ds4_c2i.pt", root / "FoundationVision/LlamaGen/vq_ds16_c2i.pt")


MODELS = {"arpg-300m-256": (write, {"class_labels": [1]}, "ARPGPipeline", {"image_size": 96, "num_heads": 4})}
