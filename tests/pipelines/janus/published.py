"""A tiny Janus under the names of published files."""

import shutil
from collections.abc import Callable
from pathlib import Path

import published_layouts as layouts
from pipelines.janus import tiny


def write(repository: str) -> Callable[[Path], None]:
    return lambda root: layouts.publish(root, repository, tiny.write_original(root / "source"))


def write_as_transformers(root: Path) -> None:
    folder = shutil.copytree(tiny.FOLDER, root / "deepseek-community/Janus-Pro-1B")
    (folder / "expected.safetensors").unlink()
    tiny.processor().save_pretrained(folder)


MODELS = {
    "janus-1.3b": (write("deepseek-ai/Janus-1.3B"), {"prompt": "a cat"}, "JanusPipeline", {}),
    "janus-pro-1b": (write("deepseek-ai/Janus-Pro-1B"), {"prompt": "a cat"}, "JanusPipeline", {}),
    "deepseek-ai/Janus-Pro-7B": (write("deepseek-ai/Janus-Pro-7B"), {"prompt": "a cat"}, "JanusPipeline", {}),
    "deepseek-community/Janus-Pro-1B": (write_as_transformers, {"prompt": "a cat"}, "JanusPipeline", {}),
}
