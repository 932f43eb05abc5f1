"""A tiny LPD under the names of published files."""

from pathlib import Path

import published_layouts as layouts
from pipelines.llamagen import tiny as tiny_llamagen
from pipelines.lpd import tiny


def write(root: Path) -> None:
    layouts.copy(tiny.FOLDER / "lpd_tiny.pth", root / "mit-han-lab/lpd_l_256/lpd_l_256.pth")
    layouts.copy(tiny_llamagen.FIXTURES / "c2i" / "vq_ds4_c2i.pt", root / "FoundationVision/LlamaGen/vq_ds16_c2i.pt")


MODELS = {
    "mit-han-lab/lpd_l_256": (write, {"class_labels": [1]}, "LPDPipeline", {"num_heads": 4}),
}
