"""Reads the files of a run, and checks that they are complete and unchanged.

RUN/config.json                 the configuration, see `generate.make_config`
RUN/manifest.jsonl              one row per image: id, prompt or class_label, seed, path, the paths of
                                references as "image"; other fields are "metadata"
RUN/images/000000.png           a video is an animated PNG
RUN/results/rank-00000.jsonl    one row per finished image, see `generate.generate_images`
RUN/deviation.json              how far the decoding is from the model's distribution, if it was measured
"""

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...media.texts import parse_json
from ...settings.schema import Classes, Count, Items
from .files import check_fields, check_sampling, to_lines


CONFIG, MANIFEST, IMAGES, RESULTS = "config.json", "manifest.jsonl", "images", "results"
DEVIATION = "deviation.json"
NUMBER = (int, float)
ROW_FIELDS = {"id": int, "seed": int, "path": str}
RESULT_FIELDS = {
    "id": int,
    "batch": int,
    "batch_size": int,
    "seconds": NUMBER,
    "batch_passes": int,
    "exact": bool,
    "peak_memory": (*NUMBER, type(None)),
    "warm": bool,
    "passes": int,
    "tokens_per_pass": NUMBER,
}
RESTORE = "restore the original file, or generate the run again in another folder"
STRICT = ConfigDict(strict=True, allow_inf_nan=False)
# How every complete PNG file ends.
PNG_END = b"IEND\xaeB`\x82"


class Machine(BaseModel):
    model_config = STRICT
    device: str
    threads: Count
    torch: str


class Source(BaseModel):
    """Where the rows of a manifest come from, see `make_manifest`."""

    model_config = STRICT
    prompts: str | None = None
    per_prompt: Items | None = None
    classes: Classes | None = None
    per_class: Items | None = None


class Config(BaseModel):
    """What config.json must hold. Keys that runs of earlier versions do not have are optional."""

    model_config = STRICT
    model: str
    lora: list[str] | None = None
    weights: str
    decoding_name: str
    decoding: dict[str, Any]
    sampling: dict[str, Any]
    source: Source
    manifest: str | None = None
    images: Items
    prompts: Items | None = None
    seed: Annotated[int, Field(ge=0)]
    batch_size: Count
    call_size: Count | None = None
    height: Count | None = None
    width: Count | None = None
    negative_prompt: str | None = None
    order: str | None = None
    dtype: str
    steps: str | None = None
    machine: Machine


def image_path(id: int) -> str:
    """The path of an image in the folder of its run."""
    return f"{IMAGES}/{id:06d}.png"


def call_size(config: dict) -> int:
    """Images per call of a run. In runs of earlier versions, a call was a batch."""
    return config.get("call_size", config["batch_size"])


def manifest_digest(rows: list[dict]) -> str:
    """SHA-256 of the file manifest.jsonl."""
    return hashlib.sha256(to_lines(rows)).hexdigest()


def read_config(run: Path) -> dict:
    """The configuration of a run."""
    path = run / CONFIG
    if not path.is_file():
        raise ValueError(f"{run} holds no run: make one with `arimage eval generate --out {run}`")
    config = check_fields(parse_json(path.read_bytes(), path, RESTORE), {}, path, RESTORE)
    try:
        Config.model_validate(config)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        state = f"no {name}" if first["type"] == "missing" else f"a wrong {name} ({first['input']!r:.60})"
        raise ValueError(f"{path} has {state}: {RESTORE}") from error
    check_sampling(config["sampling"], path, RESTORE)
    return config


def read_rows(run: Path) -> list[dict]:
    """The manifest of a run, in the order of its ids."""
    config, path = read_config(run), run / MANIFEST
    data = path.read_bytes()
    lines = data.split(b"\n")[:-1]
    # Runs of earlier versions have no digest of their manifest.
    digest = config.get("manifest")
    if len(lines) != config["images"] or digest not in (None, hashlib.sha256(data).hexdigest()):
        raise ValueError(
            f"{path} is not the manifest of the {config['images']} images that {CONFIG} describes: {RESTORE}"
        )
    source = config["source"]
    for each, count in (
        (source.get("per_prompt"), config.get("prompts")),
        (source.get("per_class"), source.get("classes")),
    ):
        if each is not None and count is not None and each * count != len(lines):
            raise ValueError(
                f"{run / CONFIG} says {each} images for each of {count}, and there are {len(lines)}: {RESTORE}"
            )
    rows = []
    for id, line in enumerate(lines):
        name = f"line {id + 1} of {path}"
        row = check_fields(parse_json(line, name, RESTORE), ROW_FIELDS, name, RESTORE)
        kinds = [isinstance(row.get("prompt"), str), isinstance(row.get("class_label"), int)]
        if row["id"] != id or row["path"] != image_path(id) or sum(kinds) != 1:
            raise ValueError(f"{name} is not the row of image {id}: {RESTORE}")
        check_fields(row.get("metadata", {}), {}, f"metadata in {name}", RESTORE)
        rows.append(row)
    return rows


def prompts_of(rows: list[dict]) -> list[str] | None:
    """The prompt of each row of a manifest, with its references, over which errors are measured. None for classes,
    which are not a sample: a run has all of them."""
    if "prompt" not in rows[0]:
        return None
    return [json.dumps([row["prompt"], row.get("image")]) for row in rows]


def read_results(run: Path) -> dict[int, dict]:
    """The results of all finished and intact images of a run, by their ids.

    An image is intact if its file has the digest in its row. Rows of earlier versions have none, so that only missing
    and cut files are noticed. A last line that was cut short is ignored."""
    found, files, images = {}, {}, call_size(read_config(run))
    for path in sorted((run / RESULTS).glob("rank-*.jsonl")):
        for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
            name = f"line {number} of {path}"
            remedy = "delete the line, and `arimage eval generate` makes its image again"
            row = check_fields(parse_json(line, name, remedy), RESULT_FIELDS, name, remedy)
            id = row["id"]
            if row["batch"] != id // images:
                raise ValueError(
                    f"{name} has image {id} in call {row['batch']}, and calls are of {images} images by {CONFIG}: "
                    f"{RESTORE}"
                )
            if id not in files:
                files[id] = _state(run / image_path(id))
            complete, digest = files[id]
            if complete and row.get("sha256", digest) == digest:
                found[id] = row
    return dict(sorted(found.items()))


def _state(path: Path) -> tuple[bool, str]:
    """Whether a PNG file is complete, and its digest."""
    data = path.read_bytes() if path.is_file() else b""
    return data.endswith(PNG_END), hashlib.sha256(data).hexdigest()


def read_finished(run: Path) -> tuple[list[dict], list[dict]]:
    """The manifest of a finished run, and the results of its images in the same order."""
    rows, results = read_rows(run), read_results(run)
    damaged = [row for row in rows if row["id"] not in results]
    if damaged:
        raise ValueError(
            f"{run / damaged[0]['path']} is missing or damaged ({len(damaged)} of {len(rows)} images are): repeat the "
            "`arimage eval generate` of this run, which generates them again"
        )
    return rows, [results[row["id"]] for row in rows]
