"""What a run draws, one row an image, and what became of it. All files of a run's folder are read here.

RUN/config.json           what was asked, see `generate.make_config`
RUN/manifest.jsonl        a row an image: id, prompt or class_label, seed, path, and under "metadata" what else its prompt's
                          row held
RUN/images/000000.png
RUN/results/rank-00000.jsonl    a row for each image that a process finished, see `generate.draw_batch`
"""

import csv
import hashlib
import io
import json
import os
from collections.abc import Callable
from pathlib import Path


CONFIG, MANIFEST, IMAGES, RESULTS = "config.json", "manifest.jsonl", "images", "results"
EMOJI_PROMPTS = Path(__file__).parents[1] / "assets" / "emoji-reference" / "prompts.jsonl"


def image_seed(seed: int, id: int) -> int:
    """The seed of image `id` under the run's `seed`: 63 bits of their SHA-256, whatever else is drawn and wherever."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{id}".encode()).digest()[:8]) >> 1


def prompt_file(name: str | Path) -> Path:
    """The file of prompts that is meant: "emoji" is the one of the package."""
    return EMOJI_PROMPTS if str(name) == "emoji" else Path(name)


def read_prompts(path: Path) -> list[dict]:
    """The rows of a file of prompts, each with its "prompt" and every other field: .tsv with a column `prompt` or `Prompt`,
    .jsonl with objects that have a `prompt`, .txt with a prompt on every line; empty lines count for nothing.

    Raises:
        ValueError: if the file is of another kind, holds no prompts, or has a row without one.
    """
    readers = {".tsv": _read_tsv, ".jsonl": _read_jsonl, ".txt": _read_txt}
    if path.suffix.lower() not in readers:
        raise ValueError(
            f"{path} is no file of prompts: give a .tsv, .jsonl or .txt, or emoji for those of the package"
        )
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error.reason} at byte {error.start}): save it as UTF-8") from error
    rows = readers[path.suffix.lower()](text, path)
    if not rows:
        raise ValueError(f"{path} holds no prompts: give at least one")
    return rows


def _read_txt(text: str, path: Path) -> list[dict]:
    return [{"prompt": line.strip()} for line in text.splitlines() if line.strip()]


def _read_jsonl(text: str, path: Path) -> list[dict]:
    rows = []
    # Not splitlines: a JSON string may hold the other characters at which that splits.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is no JSON in line {number} ({error.msg}): write one object a line") from error
        prompt = row.get("prompt") if isinstance(row, dict) else None
        if not isinstance(prompt, str) or not prompt.strip():
            raise ValueError(f'{path} has no "prompt" in line {number}: write {{"prompt": "..."}}')
        rows.append(row)
    return rows


def _read_tsv(text: str, path: Path) -> list[dict]:
    lines = csv.reader(io.StringIO(text, newline=""), delimiter="\t")
    columns = next(lines, [])
    column = next((name for name in ("prompt", "Prompt") if name in columns), None)
    if column is None:
        raise ValueError(f"{path} has the columns {columns}: name the one of the prompts prompt or Prompt")
    rows = []
    for cells in filter(any, lines):
        # A quotation mark that is never closed takes the lines after it into its cell.
        if len(cells) != len(columns) or any("\n" in cell for cell in cells):
            raise ValueError(
                f"{path} has {len(cells)} cells for {len(columns)} columns in line {lines.line_num}: "
                "write one a column, and quotation marks around a cell doubled within it"
            )
        row = dict(zip(columns, cells, strict=True))
        prompt = row.pop(column).strip()
        if not prompt:
            raise ValueError(f"{path} has no prompt in line {lines.line_num}: write one, or leave out the line")
        rows.append({"prompt": prompt, **row})
    return rows


def prompt_rows(prompts: list[dict], seed: int, per_prompt: int = 1) -> list[dict]:
    """The manifest of `per_prompt` images of each of the rows of `read_prompts`, those of a prompt one after another.

    Raises:
        ValueError: if `per_prompt` is less than 1.
    """
    if per_prompt < 1:
        raise ValueError(f"--per-prompt is {per_prompt}: give at least 1")
    conditions = []
    for row in prompts:
        metadata = {name: value for name, value in row.items() if name != "prompt"}
        conditions += [{"prompt": row["prompt"], **({"metadata": metadata} if metadata else {})}] * per_prompt
    return _rows(conditions, seed)


def class_rows(classes: int, seed: int, per_class: int) -> list[dict]:
    """The manifest of `per_class` images of each of the classes 0 .. `classes` - 1, those of a class one after another.

    Raises:
        ValueError: if one of the numbers is less than 1.
    """
    if min(classes, per_class) < 1:
        raise ValueError(f"--classes and --per-class are {classes} and {per_class}: give at least 1 of each")
    return _rows([{"class_label": label} for label in range(classes) for _ in range(per_class)], seed)


def _rows(conditions: list[dict], seed: int) -> list[dict]:
    return [
        {"id": id, **condition, "seed": image_seed(seed, id), "path": f"{IMAGES}/{id:06d}.png"}
        for id, condition in enumerate(conditions)
    ]


def read_config(run: Path) -> dict:
    """What was asked of the run in a folder.

    Raises:
        ValueError: if there is no run.
    """
    if not (run / CONFIG).exists():
        raise ValueError(f"{run} holds no run: make one with `arimage eval generate --out {run}`")
    return json.loads((run / CONFIG).read_text(encoding="utf-8"))


def read_rows(run: Path) -> list[dict]:
    """The manifest of the run in a folder, in the order of its ids."""
    return [json.loads(line) for line in (run / MANIFEST).read_text(encoding="utf-8").split("\n")[:-1]]


def read_results(run: Path) -> dict[int, dict]:
    """The rows of the finished images of the run in a folder, by their ids, of all processes together.

    A last line that a kill cut short counts for nothing, nor does a row whose picture is gone.
    """
    found = {}
    pictures = set(os.listdir(run / IMAGES))
    for path in sorted((run / RESULTS).glob("rank-*.jsonl")):
        for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
            row = json.loads(line)
            if f"{row['id']:06d}.png" in pictures:
                found[row["id"]] = row
    return dict(sorted(found.items()))


def write_rows(rows: list[dict], path: Path) -> None:
    """A JSON object a line; the file is there whole or not at all."""
    replace(path, lambda file: file.write_bytes(to_lines(rows)))


def to_lines(rows: list[dict]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def replace(path: Path, write: Callable[[Path], object]) -> None:
    """Put at `path` what `write` writes to the file it is given: all of it, or nothing, and then no trace of it."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        write(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
