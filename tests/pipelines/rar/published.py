"""A tiny RAR under the names of published files."""

from pathlib import Path

import published_layouts as layouts
from pipelines.rar.tiny import FIXTURES


def write(root: Path) -> None:
    layouts.copy(FIXTURES / "rar_tiny.bin", root / "yucornetto/RAR/rar_b.bin")
    vq = root / "fun-research/TiTok/maskgit-vqgan-imagenet-f16-256.bin"
    layouts.copy(FIXTURES / "maskgit-vqgan-tiny-f4.bin", vq)


MODELS = {"rar-b-256": (write, {"class_labels": [1]}, "RARPipeline", {})}
