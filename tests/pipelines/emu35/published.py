"""A tiny Emu3.5 under the names of published files."""

import shutil
from pathlib import Path

import published_layouts as layouts
from pipelines.emu35 import tiny


def write(root: Path) -> None:
    layouts.publish(root, "BAAI/Emu3.5-Image", tiny.write_original(root / "source"))
    folder = root / "BAAI/Emu3.5-VisionTokenizer"
    shutil.copytree(tiny.VISION_TOKENIZER, folder)
    (folder / "model.ckpt").write_bytes(layouts.UNUSED)


MODELS = {"emu3.5-image": (write, {"prompt": "a cat", "height": 32, "width": 48}, "Emu35Pipeline", {})}
