"""Reads files of prompts: .tsv, .json, .jsonl, .txt, folders of .txt, and the installed ones."""

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from ...media.folders import finder, list_files
from ...media.texts import check_finite, lines_of, parse_json, read_rows, read_text, text_of
from ...settings.installed import installed
from ...settings.schema import Caption, check


def _distinct(texts: list[str]) -> list[str]:
    for text in texts:
        if texts.count(text) > 1:
            raise ValueError(f"{text!r} is there twice: leave one out")
    return texts


# The texts of each question, by its name; the first is what the prompt asks for.
Texts = Annotated[list[Caption], Field(min_length=2, max_length=1000), AfterValidator(_distinct)]
Alternatives = Annotated[dict[Caption, Texts], Field(min_length=1)]


def prompt_file(name: str | Path) -> Path:
    """The path of a file of prompts, which may be installed ones, by their name."""
    if not str(name):
        raise ValueError("the name of the prompts is empty: give a file, a folder or the name of installed prompts")
    entry = installed("prompts").get(str(name))
    return Path(name) if entry is None else entry.load().path


def prompt_metrics(name: str) -> list[str]:
    """The metrics of images of installed prompts; none for other files of prompts."""
    entry = installed("prompts").get(name)
    return [] if entry is None else entry.load().metrics


def read_prompts(path: Path) -> list[dict]:
    """The rows of a file of prompts, each with its "prompt" and all other fields.

    A .tsv has a column `prompt` or `Prompt`, a .jsonl objects that have a `prompt`, a .json one object of such
    objects, whose names become their "item_id" (meta_data.json of MJHQ-30K), or a list of objects with a `Prompt`
    (WISE), and a .txt one prompt per line, as a file without a suffix. Empty lines are ignored. Each .txt of a folder
    is one prompt, whose "item_id" is the name of the file (DPG-Bench). The "image" of a row of a .jsonl is the path of
    a reference image, or a list of paths, relative to the file; here it becomes a list of absolute paths. The
    "alternatives" of a row are the questions of the metric `clip-choice`."""
    if path.is_dir():
        return _read_folder(path)
    readers = {".tsv": _read_tsv, ".json": _read_json, ".jsonl": _read_jsonl, ".txt": _read_txt}
    if path.exists() and not path.suffix:
        # The standard input has no suffix.
        readers[""] = _read_txt
    if path.suffix.lower() not in readers:
        raise ValueError(
            f"{path} is not a file of prompts: give a .tsv, .json, .jsonl or .txt file, or the name of installed "
            f"prompts ({', '.join(installed('prompts')) or 'there are none'})"
        )
    rows = readers[path.suffix.lower()](path)
    if not rows:
        raise ValueError(f"{path} holds no prompts: give at least one")
    for row in rows:
        if "alternatives" in row:
            check(Alternatives, row["alternatives"], f"the alternatives of {row['prompt']!r} in {path}")
    return rows


def prompt_files(path: Path) -> list[Path]:
    """The files that `read_prompts` reads: `path`, or those of a folder."""
    if not path.is_dir():
        return [path]
    return [path / name for name in list_files(path, (".txt",)).files if "/" not in name]


def _read_folder(folder: Path) -> list[dict]:
    files = prompt_files(folder)
    if not files:
        raise ValueError(f"{folder} has no .txt files: name the folder of the prompts of DPG-Bench, or a file")
    return [_checked({"prompt": read_text(file).strip(), "item_id": file.stem}, file, "the file") for file in files]


def _read_txt(path: Path) -> list[dict]:
    return [{"prompt": line} for _, line in lines_of(read_text(path))]


def _read_json(path: Path) -> list[dict]:
    items = parse_json(read_text(path), path, "get the file again")
    if isinstance(items, list) and items and all(isinstance(row, dict) and "Prompt" in row for row in items):
        rows = [{"prompt": row.pop("Prompt"), **row} for row in items]
        return [_checked(row, path, f"entry {number}") for number, row in enumerate(rows, 1)]
    if not isinstance(items, dict):
        raise ValueError(f'{path} is not an object: write {{"NAME": {{"prompt": "..."}}}}')
    return [{**_checked(row, path, repr(name)), "item_id": name} for name, row in items.items()]


def _read_jsonl(path: Path) -> list[dict]:
    find = finder(path.parent)
    rows = [_with_images(_checked(row, path, where), find, path, where) for where, row in read_rows(path)]
    without = next((row for row in rows if "image" not in row), None)
    if without is not None and any("image" in row for row in rows):
        raise ValueError(f"{path} has no image for {without['prompt']!r}: give all prompts reference images, or none")
    return rows


def _with_images(row: dict, find: Callable[[str], Path | None], path: Path, where: str) -> dict:
    if "image" not in row:
        return row
    names = row["image"] if isinstance(row["image"], list) else [row["image"]]
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f'{path} has a wrong "image" in {where}: write a path, or a list of paths')
    files = [find(name) for name in names]
    missing = next((name for name, file in zip(names, files, strict=True) if file is None), None)
    if missing is not None:
        raise ValueError(f"{path} names {missing} in {where}, which is not there: write paths relative to the file")
    return {**row, "image": [str(file.resolve()) for file in files if file is not None]}


def _checked(row: object, path: Path, where: str) -> dict:
    if not isinstance(row, dict) or not text_of(row, "prompt", path, where).strip():
        raise ValueError(f'{path} has no "prompt" in {where}: write {{"prompt": "..."}}')
    check_finite(row, path, where)
    return row


def _read_tsv(path: Path) -> list[dict]:
    lines = csv.reader(io.StringIO(read_text(path), newline=""), delimiter="\t")
    try:
        return _rows(next(lines, []), lines, path)
    except csv.Error as error:
        raise ValueError(f"{path} cannot be read in line {lines.line_num} ({error}): correct it") from error


def _rows(columns: list[str], lines, path: Path) -> list[dict]:
    column = next((name for name in ("prompt", "Prompt") if name in columns), None)
    if column is None:
        raise ValueError(f"{path} has the columns {columns}: name the column of the prompts prompt or Prompt")
    if len(set(columns)) != len(columns):
        raise ValueError(f"{path} has the columns {columns}: give each another name")
    rows = []
    for cells in (cells for cells in lines if any(cells)):
        # An unclosed quotation mark takes the following lines into its cell.
        if len(cells) != len(columns) or any("\n" in cell for cell in cells):
            raise ValueError(
                f"{path} has {len(cells)} cells for {len(columns)} columns in line {lines.line_num}: "
                "write one cell per column, and double the quotation marks inside a quoted cell"
            )
        row = dict(zip(columns, cells, strict=True))
        prompt = row.pop(column).strip()
        if not prompt:
            raise ValueError(f"{path} has no prompt in line {lines.line_num}: write one, or delete the line")
        rows.append({"prompt": prompt, **row})
    return rows
