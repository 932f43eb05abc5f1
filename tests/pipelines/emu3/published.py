"""A tiny Emu3 under the names of published files."""

import shutil
from pathlib import Path

import published_layouts as layouts
from pipelines.emu3 import tiny


def write(root: Path) -> None:
    layouts.publish(root, "BAAI/Emu3-Gen", tiny.write_original(root / "source"))
    layouts.publish(root, "BAAI/Emu3-VisionTokenizer", tiny.write_vision_tokenizer(root / "vision"))


def write_as_transformers(root: Path) -> None:
    folder = root / "BAAI/Emu3-Gen-hf"
    tiny.character_tokenizer().save_pretrained(folder)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tiny.FIXTURES / name, folder)


MODELS = {
    "emu3-gen": (write, {"prompt": "a cat", "height": 32, "width": 40}, "Emu3Pipeline", {}),
    "BAAI/Emu3-Gen-hf": (write_as_transformers, {"prompt": "a cat", "height": 32, "width": 40}, "Emu3Pipeline", {}),
}
