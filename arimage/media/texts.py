"""Texts and tables that users write: lists of prompts, captions, metadata.jsonl. Every such file is read here."""

import csv
import io
import json
import re
import unicodedata
from pathlib import Path
from typing import NoReturn

from ..settings.schema import check_encodable, read_whole


# The words of a text, without case, articles and punctuation.
Words = tuple[str, ...]
ARTICLES = frozenset(("a", "an", "the"))


def read_text(path: Path, name: str | None = None) -> str:
    """The text of a file in UTF-8, or in UTF-16 with a byte order mark, as Notepad and PowerShell write them. The mark
    is not part of the text. `name` begins the sentence of an error: "--classes is x.txt, which"; by default it is the
    path.

    Raises:
        ValueError: if the file is in another encoding, naming the line, or is no file or too large.
    """
    data = read_whole(path, name)
    encoding = "utf-16" if data.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        _refuse(name or str(path), data[: error.start].decode(encoding, "ignore"), error.reason)
    # UTF-16 without a mark, and UTF-32, are valid UTF-8 and UTF-16.
    if "\0" in text:
        _refuse(name or str(path), text.partition("\0")[0], "a null character")
    return text


def _refuse(name: str, before: str, reason: str) -> NoReturn:
    raise ValueError(f"{name} is not UTF-8 in line {before.count(chr(10)) + 1} ({reason}): save it as UTF-8")


def lines_of(text: str) -> list[tuple[int, str]]:
    """The lines that are not blank, stripped, with their numbers. Only line feeds end a line: captions from web pages
    hold other separators, at which `str.splitlines` would split them."""
    # Files with a byte order mark that were joined have one inside.
    lines = (line.strip().removeprefix("\ufeff") for line in text.split("\n"))
    return [(number, line) for number, line in enumerate(lines, 1) if line]


def read_rows(path: Path) -> list[tuple[str, dict]]:
    """The objects in a file of one JSON object per line, and where each is, as in "line 3". Blank lines are ignored.

    Raises:
        ValueError: if a line is something else, see `parse_json`, or has a number that is not finite, naming file and
            line.
    """
    rows = []
    for number, line in lines_of(read_text(path)):
        where, remedy = f"line {number}", "write one object per line"
        row = parse_json(line, f"{where} of {path}", remedy)
        if not isinstance(row, dict):
            raise ValueError(f"{path} has no object in {where}: {remedy}")
        check_finite(row, path, where)
        rows.append((where, row))
    return rows


def read_table(path: Path) -> list[tuple[str, dict]]:
    """The rows of a .csv file, whose first line names the columns, or of a file for `read_rows`, and where each is.

    Raises:
        ValueError: if it cannot be read, or a row has more or fewer cells, naming file and line.
    """
    if path.suffix != ".csv":
        return read_rows(path)
    rows, lines = [], csv.DictReader(io.StringIO(read_text(path), newline=""), strict=True)
    try:
        for row in lines:
            if None in row or None in row.values():
                raise ValueError(f"{path} has too few or many cells in line {lines.line_num}: write one per column")
            rows.append((f"line {lines.line_num}", row))
    except csv.Error as error:
        raise ValueError(f"{path} cannot be read in line {lines.line_num} ({error}): correct it") from error
    return rows


def parse_json(text: str | bytes, name: str | Path, remedy: str) -> object:
    """What JSON text holds.

    Args:
        name: of the file, and of the line if it is one, for the error.
        remedy: what the user can do.

    Raises:
        ValueError: if it is not JSON, or too deeply nested, or has a name twice.
    """
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError as error:
        raise ValueError(f"{name} is too deeply nested: {remedy}") from error
    except ValueError as error:
        raise ValueError(f"{name} is not valid JSON ({error}): {remedy}") from error


def _object(pairs: list[tuple[str, object]]) -> dict:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is there twice")
    return found


def check_finite(row: dict, path: Path, where: str) -> None:
    """Refuse a row of a file with a number that JSON cannot hold."""
    try:
        json.dumps(row, allow_nan=False)
    except ValueError as error:
        raise ValueError(f"{path} has a number that is not finite in {where}: write null") from error


def text_of(row: dict, field: str, path: Path, where: str) -> str:
    """A text of a row of a file."""
    value = row.get(field)
    if not isinstance(value, str):
        raise ValueError(f'{path} has no "{field}" in {where}: write {{"{field}": "..."}}')
    check_encodable(f"{field} in {where} of {path}", value)
    return value


def composed(text: str) -> str:
    """The text with composed letters (NFC), by which texts that look the same are compared."""
    return unicodedata.normalize("NFC", text)


def as_words(text: str) -> Words:
    """The words of a text without case, articles and punctuation. Accents may be composed or decomposed."""
    words = re.findall(r"[^\W_]+(?:'[^\W_]+)?", composed(text.casefold()).replace("’", "'"))
    return tuple(word for word in words if word not in ARTICLES)
