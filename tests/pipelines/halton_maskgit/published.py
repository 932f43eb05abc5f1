"""A tiny Halton-MaskGIT under the names of published files."""

from pathlib import Path

import published_layouts as layouts
from pipelines.halton_maskgit import tiny
from pipelines.llamagen import tiny as tiny_llamagen


def write(root: Path) -> None:
    layouts.copy(tiny.FOLDER / "halton_tiny.pth", root / "llvictorll/Halton-Maskgit/ImageNet_256_tiny.pth")
    layouts.copy(tiny_llamagen.FIXTURES / "c2i" / "vq_ds4_c2i.pt", root / "FoundationVision/LlamaGen/vq_ds16_c2i.pt")


MODELS = {"halton-maskgit-tiny-256": (write, {"class_labels": [1]}, "HaltonMaskGITPipeline", {"num_heads": 5})}
