"""A tiny Lumina-DiMOO under the names of published files."""

from pathlib import Path

import published_layouts as layouts
from pipelines.lumina_dimoo import tiny


def write(root: Path) -> None:
    layouts.publish(root, "Alpha-VLLM/Lumina-DiMOO", tiny.write_original(root / "source"))


MODELS = {
    "lumina-dimoo": (write, {"prompt": "cup", "height": 32, "width": 48}, "LuminaDiMOOPipeline", {}),
}
