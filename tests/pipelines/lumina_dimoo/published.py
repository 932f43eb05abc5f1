"""A tiny Lumina-DiMOO under the names of published files. The page with their names was not seen: they are those that
the authors' code reads, and the weights are taken to be in one file."""

import json
from pathlib import Path

from pipelines.lumina_dimoo import tiny


def write(root: Path) -> None:
    folder = tiny.write_original(root / "Alpha-VLLM/Lumina-DiMOO")
    (folder / "model_index.json").write_text(json.dumps(tiny.AUTHORS_INDEX))


MODELS = {
    "lumina-dimoo": (write, {"prompt": "cup", "height": 32, "width": 48}, "LuminaDiMOOPipeline", {}),
}
