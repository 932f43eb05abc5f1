"""`arimage bench --against`: two reports of the same images on the same machine, side by side."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field

from ..media.texts import parse_json
from ..settings.schema import Flag, Positive, Text, check, read_whole
from .report import exactness, markdown_table, seconds_text
from .runs.files import check_fields


REMEDY = "give the report.json of an `arimage bench --out`"
# Reports are comparable if these and all of their settings are equal.
SHARED_MACHINE = ("device", "threads")


class _Cost(BaseModel):
    passes: Positive
    seconds: tuple[Positive, Positive, Positive] | None


class _Row(BaseModel):
    name: Text
    settings: dict[str, Any]
    exact: Flag
    steps: Text
    cost: _Cost
    deviation: dict[str, Any] | None


class _Report(BaseModel):
    settings: dict[str, Any]
    machine: dict[str, Any]
    rows: Annotated[list[_Row], Field(min_length=1)]


def read_report(path: Path) -> dict:
    """A report that `write_report` wrote."""
    try:
        data = read_whole(path)
    except OSError as error:
        raise ValueError(f"--against is {path}, which cannot be read ({error.strerror}): {REMEDY}") from error
    found = check_fields(parse_json(data, path, REMEDY), {}, path, REMEDY)
    check(_Report, found, f"--against is {path}, which is not a report")
    return found


def check_against(old: dict, config: dict) -> None:
    """Refuse to compare a report with a run that has another configuration, before anything is generated."""
    pairs = [(name, value, config.get(name)) for name, value in old["settings"].items()]
    pairs += [(name, old["machine"].get(name), config["machine"][name]) for name in SHARED_MACHINE]
    for name, theirs, ours in pairs:
        if theirs != ours:
            raise ValueError(
                f"--against has another {name} ({theirs}) than this command ({ours}): measure both under the same "
                "conditions"
            )


def compare(old: dict, new: dict) -> str:
    """A table of two reports; a ratio above 1 means that the new one is faster or takes fewer passes. And what has
    changed."""
    after = {row["name"]: row for row in new["rows"]}
    before = {row["name"]: row for row in old["rows"]}
    table, changed = [], []
    for name in filter(after.__contains__, before):
        pair = before[name], after[name]
        passes = [row["cost"]["passes"] for row in pair]
        seconds = [row["cost"]["seconds"] for row in pair]
        table.append(
            [name, *(f"{value:.1f}" for value in passes), f"{passes[0] / passes[1]:.2f}"]
            + [seconds_text(row["cost"]) for row in pair]
            + [f"{seconds[0][1] / seconds[1][1]:.2f}" if all(seconds) else ""]
            + [exactness(row) for row in pair]
        )
        for setting in sorted({**pair[0]["settings"], **pair[1]["settings"]}):
            values = [row["settings"].get(setting) for row in pair]
            if values[0] != values[1]:
                changed.append(f"{setting} of {name} was {values[0]} and is {values[1]}")
        if pair[0]["steps"] != pair[1]["steps"]:
            changed.append(f"the steps of {name} were {pair[0]['steps']} and are {pair[1]['steps']}")
    for name in ("arimage", "torch", "python"):
        values = [report["machine"].get(name) for report in (old, new)]
        if values[0] != values[1]:
            changed.append(f"{name} was {values[0]} and is {values[1]}")
    head = ["decoding", "passes: old", "new", "ratio", "seconds: old", "new", "ratio", "exact: old", "new"]
    lines = [*markdown_table(head, table), ""]
    lines += [f"Changed: {'; '.join(changed)}."] if changed else []
    alone = sorted(before.keys() ^ after.keys())
    lines += [f"Only in one of the two: {', '.join(alone)}."] if alone else []
    return "\n".join(lines).rstrip()
