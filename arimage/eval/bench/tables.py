"""Results of `arimage bench`: their JSON file, Markdown tables, plot, and a comparison of two."""

import importlib.util
import math
import statistics
from pathlib import Path

from ...media.texts import parse_json
from ..runs.files import check_fields, check_sampling, sampling_text, to_json


# Two results are comparable if these, their models, batch sizes and for each model the fields of rows are equal.
SHARED = (("machine", "device"), ("machine", "threads"), ("settings", "condition"), ("settings", "seed"))
SHARED_ROWS = ("lora", "weights", "dtype", "sampling")
# The colours of `plot`.
EXACT, INEXACT = "#2f6f8f", "#d98032"
NUMBER = (int, float)
FIGURES = ("passes", "batch_passes", "tokens_per_pass", "seconds", "images_per_second", "speedup", "peak_memory")
REMEDY = "give a file that `arimage bench --out` wrote"


def write_json(results: dict, path: Path) -> None:
    """Write the results of `arimage bench`."""
    path.write_text(to_json(results), encoding="utf-8")


def read_json(path: Path) -> dict:
    """The results that `write_json` wrote.

    Raises:
        ValueError: if the file cannot be read, or does not hold results.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): {REMEDY}") from error
    fields = {"machine": dict, "settings": dict, "rows": list}
    results = check_fields(parse_json(text, path, REMEDY), fields, path, REMEDY)
    check_fields(results["machine"], {"device": str, "threads": int, "torch": str}, f"machine in {path}", REMEDY)
    fields = {"condition": dict, "runs": int, "images": int}
    check_fields(results["settings"], fields, f"settings in {path}", REMEDY)
    if not results["rows"]:
        raise ValueError(f"{path} has no rows: {REMEDY}")
    fields = {"model": str, "decoding": str, "exact": bool, "batch_size": int, "sampling": dict}
    for number, row in enumerate(results["rows"], 1):
        name = f"row {number} of {path}"
        check_fields(row, fields | dict.fromkeys(FIGURES, list), name, REMEDY)
        check_sampling(row["sampling"], name, REMEDY)
        for figure in FIGURES:
            # Not every system reports the peak memory.
            complete = row[figure] or figure == "peak_memory"
            if not complete or not all(isinstance(value, NUMBER) and 0 < value < math.inf for value in row[figure]):
                raise ValueError(f"{name} has a wrong {figure}: {REMEDY}")
        optional = {"settings": dict, "lora": list, "weights": str, "dtype": str, "steps": str}
        check_fields(row, {field: kind for field, kind in optional.items() if field in row}, name, REMEDY)
        if "tokens_fed" in row:
            check_fields(row, {"tokens_fed": NUMBER}, name, REMEDY)
        if "deviation" in row:
            fields_of_deviation: dict[str, tuple] = dict.fromkeys(("total_variation", "floor", "impossible"), NUMBER)
            check_fields(row["deviation"], fields_of_deviation, f"deviation in {name}", REMEDY)
    return results


def to_markdown(results: dict) -> str:
    """The `results` (machine, settings, rows) as tables of medians with ranges, one per model and batch size."""
    lines = []
    for (model, batch_size), rows in _sections(results["rows"]).items():
        adapters = f" with {' and '.join(rows[0]['lora'])}" if rows[0].get("lora") else ""
        settings = ", ".join(filter(None, [sampling_text(rows[0]["sampling"]), rows[0].get("dtype")]))
        # On a CPU all are eager, unless they are compiled.
        replayed = any(row.get("steps", "eager") != "eager" for row in rows)
        lines += [
            f"**{model}{adapters}, {batch_size} image{'s' * (batch_size > 1)} per call** ({settings})",
            "",
        ]
        head = ["decoding", "exact?", "passes per image", "passes per batch", "tokens per pass", "tokens fed per pass"]
        head += ["seconds", "images/s", "speed-up", "peak MiB", *(["steps"] if replayed else [])]
        cells = [
            [
                row["decoding"],
                _exactness(row),
                _cell(row["passes"], 1),
                _cell(row["batch_passes"], 0)
                + (f", {_cell(row['head_calls'], 0)} head calls" if "head_calls" in row else ""),
                _cell(row["tokens_per_pass"], 2),
                f"{row['tokens_fed']:.1f}" if "tokens_fed" in row else "",
                _cell(row["seconds"], 2),
                _cell(row["images_per_second"], 2),
                _cell(row["speedup"], 2),
                _cell(row["peak_memory"], 0),
                *([row.get("steps", "")] if replayed else []),
            ]
            for row in rows
        ]
        lines += [*markdown_table(head, cells), ""]
    machine, settings = results["machine"], results["settings"]
    lines.append(
        f"Medians of {settings['runs']} runs, ranges in brackets; {machine['device']}, {machine['threads']} threads, "
        f"torch {machine['torch']}."
    )
    if any("deviation" in row for row in results["rows"]):
        lines.append(
            "Exact: lower bound of the total variation per token from the model's distribution, on "
            f"{settings['images']} images; samples of the distribution itself have about the floor."
        )
    return "\n".join(lines)


def compare(old: dict, new: dict) -> str:
    """Tables of medians of two results; a ratio above 1 means that the new one is faster or takes fewer passes.

    Raises:
        ValueError: if they differ in machine, condition, seed, models, adapters, weights, dtype, batch sizes or
            sampling.
    """
    for part, name in SHARED:
        _check_equal("the results", name, old[part], new[part])
    sections = [_sections(results["rows"]) for results in (old, new)]
    if sections[0].keys() != sections[1].keys():
        described = [", ".join(f"{model} at batch {size}" for model, size in section) for section in sections]
        raise ValueError(f"the results are of {described[0]} and of {described[1]}: measure the same in both")
    lines, missing, changed = [], [], {}
    for (model, batch_size), old_rows in sections[0].items():
        new_rows = {row["decoding"]: row for row in sections[1][model, batch_size]}
        for name in SHARED_ROWS:
            _check_equal(f"the results of {model}", name, old_rows[0], next(iter(new_rows.values())))
        table = []
        missing += new_rows.keys() ^ {row["decoding"] for row in old_rows}
        for row in old_rows:
            if row["decoding"] not in new_rows:
                continue
            pair = (row, new_rows[row["decoding"]])
            before, after = (one.get("settings", {}) for one in pair)
            for name in sorted(before.keys() | after.keys()):
                if before.get(name) != after.get(name):
                    text = f"{name} of {row['decoding']} was {before.get(name)} and is {after.get(name)}"
                    changed[text] = None
            before, after = (one.get("steps", "eager") for one in pair)
            if before != after:
                changed[f"the steps of {row['decoding']} were {before} and are {after}"] = None
            cells = [row["decoding"]]
            for figure, digits in (("passes", 1), ("seconds", 2)):
                before, after = (statistics.median(one[figure]) for one in pair)
                cells += [_cell(one[figure], digits) for one in pair] + [f"{before / after:.2f}"]
            table.append(cells + [_exactness(one) for one in pair])
        head = ["decoding", "passes: old", "new", "ratio", "seconds: old", "new", "ratio", "exact: old", "new"]
        lines += [f"**{model}, {batch_size} image{'s' * (batch_size > 1)} per call**", ""]
        lines += [*markdown_table(head, table), ""]
    for name in ("arimage", "torch", "python"):
        before, after = (results["machine"].get(name) for results in (old, new))
        if before != after:
            changed[f"{name} was {before} and is {after}"] = None
    if changed:
        lines.append(f"Changed: {'; '.join(changed)}.")
    if missing:
        lines.append(f"Only in one of the two: {', '.join(sorted(set(missing)))}.")
    return "\n".join(lines).rstrip()


def _check_equal(what: str, name: str, old: dict, new: dict) -> None:
    if old.get(name) != new.get(name):
        raise ValueError(
            f"{what} differ in their {name} ({old.get(name)} and {new.get(name)}): measure both under the same "
            "conditions"
        )


def check_plot(path: Path) -> None:
    """Refuse a path that `plot` cannot write. Called before anything is measured.

    Raises:
        ValueError: if matplotlib is not installed, or does not write files of this kind.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install 'arimage[eval]'")
    from matplotlib.figure import Figure

    suffixes = [f".{suffix}" for suffix in sorted(Figure().canvas.get_supported_filetypes())]
    if path.suffix.lower() not in suffixes:
        raise ValueError(f"--plot is {path}: end it in one of {', '.join(suffixes)}")


def plot(results: dict, path: Path) -> None:
    """Plot tokens per pass and speed-up as bars, one row of panels per model and batch size, into a picture file.

    Raises:
        ValueError: if `check_plot` refuses the path.
    """
    check_plot(path)
    from matplotlib.figure import Figure

    sections = _sections(results["rows"])
    longest = max(len(rows) for rows in sections.values())
    figure = Figure(figsize=(11, (0.34 * longest + 1.3) * len(sections)), layout="constrained")
    panels = figure.subplots(len(sections), 2, squeeze=False, sharey="row")
    first = results["rows"][0]["decoding"]
    for line, ((model, batch_size), rows) in zip(panels, sections.items(), strict=True):
        names = [f"{row['decoding']}\n{_exactness(row)}" for row in rows]
        colours = [EXACT if row["exact"] else INEXACT for row in rows]
        for panel, key, title in zip(
            line, ("tokens_per_pass", "speedup"), ("tokens per pass", f"speed-up over {first}"), strict=True
        ):
            middle = [statistics.median(row[key]) for row in rows]
            spread = [
                [m - min(row[key]) for m, row in zip(middle, rows, strict=True)],
                [max(row[key]) - m for m, row in zip(middle, rows, strict=True)],
            ]
            bars = panel.barh(range(len(rows)), middle, color=colours, xerr=spread, ecolor="#00000060", height=0.7)
            panel.bar_label(bars, [f" {value:.1f}" for value in middle], fontsize=8, padding=3)
            panel.set_title(f"{model}, batch {batch_size}: {title}", fontsize=9, loc="left")
            panel.set_yticks(range(len(rows)), names, fontsize=7)
            panel.margins(x=0.12)
            panel.spines[["top", "right"]].set_visible(False)
        line[0].invert_yaxis()
    add_legend(figure)
    figure.savefig(path, dpi=150)


def add_legend(figure) -> None:
    """Say in a figure what its colours mean."""
    from matplotlib.patches import Patch

    kinds = [Patch(color=EXACT, label="samples from the model's distribution"), Patch(color=INEXACT, label="does not")]
    figure.legend(handles=kinds, loc="outside lower left", ncols=2, frameon=False, fontsize=8)


def markdown_table(head: list[str], rows: list[list[str]]) -> list[str]:
    """The lines of a table in Markdown."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def _sections(rows: list[dict]) -> dict[tuple[str, int], list[dict]]:
    """Rows by their model and batch size."""
    sections = {}
    for row in rows:
        sections.setdefault((row["model"], row["batch_size"]), []).append(row)
    return sections


def _cell(values: list[float], digits: int) -> str:
    if not values:
        return ""
    low, middle, high = (f"{f(values):.{digits}f}" for f in (min, statistics.median, max))
    return middle if low == high else f"{middle} ({low} to {high})"


def _exactness(row: dict) -> str:
    if "deviation" not in row:
        return "exact" if row["exact"] else "not exact"
    found = row["deviation"]
    figures = f"{found['total_variation']:.4f}, floor {found['floor']:.4f}"
    if found["impossible"]:
        figures += f", {found['impossible']:.2%} impossible"
    return f"exact ({figures})" if row["exact"] else figures
