"""The manifest of a run: one row per image, with its prompt or class and its seed."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil

from ...settings.schema import read_whole
from .prompts import prompt_file, prompt_files, read_prompts
from .run_folder import image_path


def image_seed(seed: int, id: int) -> int:
    """The seed of image `id` under the run's `seed`: 63 bits of their SHA-256, independent of all other images."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{id}".encode()).digest()[:8]) >> 1


# What a row of a manifest takes of the memory, without its prompt.
ROW_BYTES = 500


def make_manifest(
    prompts: str | None, per_prompt: int, classes: int | None, per_class: int, seed: int
) -> tuple[list[dict], dict]:
    """The rows of a manifest, and where they come from for config.json. `prompts` is a file or the name of installed
    prompts."""
    if classes is not None and prompts is None:
        return label_rows(range(classes), seed, per_class), {"classes": classes, "per_class": per_class}
    if prompts is None or classes is not None:
        raise ValueError("give either --prompts or --classes")
    path = prompt_file(prompts)
    prompts_read = read_prompts(path)
    source = {"prompts": path.name, "sha256": _digest(prompt_files(path)), "per_prompt": per_prompt}
    images = dict.fromkeys(Path(image) for row in prompts_read for image in row.get("image", ()))
    if images:
        source["images_sha256"] = _digest(images)
    return prompt_rows(prompts_read, seed, per_prompt), source


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(read_whole(file))
    return digest.hexdigest()


def prompt_rows(prompts: list[dict], seed: int, per_prompt: int = 1) -> list[dict]:
    """The manifest of `per_prompt` images for each row of `read_prompts`. Images of one prompt are consecutive."""

    def condition(row: dict) -> dict:
        known = {name: value for name, value in row.items() if name in ("prompt", "image")}
        metadata = {name: value for name, value in row.items() if name not in known}
        return {**known, "metadata": metadata} if metadata else known

    return _rows(prompts, seed, per_prompt, condition)


def label_rows(labels: Sequence[int], seed: int, per_class: int) -> list[dict]:
    """The manifest of `per_class` images for each of some classes. Images of one class are consecutive."""
    return _rows(labels, seed, per_class, lambda label: {"class_label": label})


def _rows(given: Sequence, seed: int, each: int, condition: Callable[[Any], dict]) -> list[dict]:
    images, most = len(given) * each, psutil.virtual_memory().total // ROW_BYTES
    if images > most:
        raise ValueError(
            f"{images:,} images are asked for, of which the memory holds {most:,} rows: make several runs"
        )
    return [
        {"id": id, **condition(given[id // each]), "seed": image_seed(seed, id), "path": image_path(id)}
        for id in range(images)
    ]
