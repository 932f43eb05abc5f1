"""Tiny VAR models under the names of published files."""

from pathlib import Path

import published_layouts as layouts
from pipelines.var import tiny


def write(root: Path) -> None:
    layouts.copy(tiny.FOLDER / "var_d2.pth", root / "FoundationVision/var/var_d16.pth")
    layouts.copy(tiny.FOLDER / "vae_ch32v64z8.pth", root / "FoundationVision/var/vae_ch160v4096z32.pth")


MODELS = {
    "var-d16-256": (write, {"class_labels": [1]}, "VARPipeline", {}),
}
