"""Quality and cost of several runs in one table, with their uncertainty: `arimage bench` and `arimage eval report`."""

import dataclasses
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from ..decoding import decoding_from_dict, decoding_to_text
from ..media.texts import parse_json
from ..settings.schema import read_whole
from .metrics.standard_errors import Z, paired_difference, paired_ratio, standard_error
from .runs.files import check_fields, sampling_text, write_json, write_whole
from .runs.run_folder import DEVIATION, NUMBER, call_size, manifest_digest, prompts_of, read_config, read_finished
from .score import check_comparable, estimate_text, figure_text, images_text, read_metrics


# Runs are comparable if these, their manifests and calls are equal and their scores pass `check_comparable`.
SHARED = (
    "model", "lora", "weights", "sampling", "source", "images", "seed", "batch_size", "dtype", "height", "width",
    "negative_prompt",
)  # fmt: skip
SHARED_MACHINE = ("device", "threads", "torch", "python", "arimage")
# The colours of `plot`.
EXACT, INEXACT = "#2f6f8f", "#d98032"
LOWER_IS_BETTER = ("sfid", "cmmd", "video-change", "video-collapse")


def make_report(runs: list[Path], baseline: str) -> dict:
    """The figures of finished runs, compared with the run whose folder is named `baseline`.

    Returns:
        `settings`, `machine` and `baseline` of all runs, and one row per run: name, decoding, settings, order, exact,
        `steps` (how they ran), `cost`, `deviation` (None if it was not measured), `metrics` as in `metrics.json`, and
        `paired`: for each metric with a value per image, the mean difference from the baseline over the same prompts
        and seeds, with its 95 % interval.

    Raises:
        ValueError: if two runs have the same name, none is the baseline, or one is unfinished or damaged; if they
            differ in anything but decoding and order, or were scored differently.
    """
    named = {run.resolve().name: run for run in runs}
    if len(named) < len(runs):
        raise ValueError(
            f"two of the runs have the same name ({', '.join(run.name for run in runs)}): rename a folder"
        )
    if baseline not in named:
        raise ValueError(f"--baseline is {baseline!r}: choose among {', '.join(named)}")
    configs = {name: read_config(run) for name, run in named.items()}
    for name, config in configs.items():
        pairs = [(key, configs[baseline].get(key), config.get(key)) for key in SHARED]
        pairs += [(key, configs[baseline]["machine"].get(key), config["machine"].get(key)) for key in SHARED_MACHINE]
        _check_equal(baseline, name, [*pairs, ("call size", call_size(configs[baseline]), call_size(config))])
    metrics = {name: read_metrics(run) for name, run in named.items()}
    check_comparable(metrics)
    finished = {name: read_finished(run) for name, run in named.items()}
    results = {name: found for name, (_, found) in finished.items()}
    images, _ = finished[baseline]
    for name, (others, _) in finished.items():
        _check_equal(baseline, name, [("manifest", manifest_digest(images), manifest_digest(others))])
    calls = {name: _timed_calls(rows, call_size(configs[name])) for name, rows in results.items()}
    rows, prompts = [], prompts_of(images)
    for name, run in named.items():
        shared = calls[name].keys() & calls[baseline].keys()
        seconds = [sum(calls[one][batch] for batch in shared) for one in (baseline, name)]
        ours, theirs = (np.array([row["passes"] for row in results[one]]) for one in (name, baseline))
        cost = {
            **_cost(results[name], calls[name], prompts),
            "passes_ratio": dataclasses.asdict(paired_ratio(ours, theirs, prompts)),
            "speedup": seconds[0] / seconds[1] if shared else None,
        }
        paired = {}
        for metric in metrics[name] if name != baseline else ():
            values, others = (_scores(folder, metric, len(results[name])) for folder in (run, named[baseline]))
            if values is not None and others is not None:
                paired[metric] = dataclasses.asdict(paired_difference(values, others, prompts))
        config = configs[name]
        rows.append(
            {
                "name": name,
                "decoding": config["decoding_name"],
                "settings": config["decoding"],
                "order": config.get("order"),
                "exact": all(row["exact"] for row in results[name]),
                "steps": " and ".join(sorted({row.get("steps", "eager") for row in results[name]})),
                "cost": cost,
                **_deviation(run),
                "metrics": metrics[name],
                "paired": paired,
            }
        )
    config = configs[baseline]
    settings = {key: config.get(key) for key in (*SHARED, "manifest")} | {"call_size": call_size(config)}
    return {"baseline": baseline, "settings": settings, "machine": config["machine"], "rows": rows}


def _check_equal(baseline: str, name: str, pairs: list[tuple]) -> None:
    for key, theirs, ours in pairs:
        if ours != theirs:
            raise ValueError(
                f"{baseline} and {name} cannot be compared, their {key} is {theirs} and {ours}: generate both with "
                "the same"
            )


def _timed_calls(results: list[dict], images: int) -> dict[int, float]:
    """Seconds per call, by the index of the call, without the first call of a process and calls of fewer images."""
    return {row["batch"]: row["seconds"] for row in results if row["warm"] and row["batch_size"] == images}


def _cost(results: list[dict], calls: dict[int, float], prompts: list[str] | None) -> dict:
    """Forward passes of an image, their standard error over other prompts, and tokens per pass; forward passes,
    sequential calls of a denoising head, and least, median and most seconds per call; images per second of one
    process; peak memory in MiB. None where nothing was measured."""
    passes = np.array([row["passes"] for row in results])
    tokens = np.array([row["tokens_per_pass"] for row in results]) * passes
    seconds = list(calls.values())
    memory = [row["peak_memory"] for row in results if row["peak_memory"] is not None]
    whole = list({row["batch"]: row for row in results}.values())
    return {
        "passes": float(passes.mean()),
        "passes_error": standard_error(passes, prompts),
        "tokens_per_pass": float(tokens.sum() / passes.sum()),
        "call_passes": statistics.mean(row["batch_passes"] for row in whole),
        "head_calls": statistics.mean(row["head_calls"] for row in whole) if "head_calls" in whole[0] else None,
        "timed_calls": len(calls),
        "seconds": [min(seconds), statistics.median(seconds), max(seconds)] if calls else None,
        "images_per_second": max(row["batch_size"] for row in results) / statistics.mean(seconds) if calls else None,
        "peak_memory": max(memory) if memory else None,
    }


def _deviation(run: Path) -> dict:
    """What `judge` found of the decoding of a run."""
    path, remedy = run / DEVIATION, "delete it, and repeat `arimage bench`"
    if not path.exists():
        return {"deviation": None, "tokens_fed": None}
    found = check_fields(parse_json(read_whole(path), path, remedy), {"deviation": dict}, path, remedy)
    fields: dict[str, tuple] = dict.fromkeys(("total_variation", "floor", "impossible", "codes"), NUMBER)
    check_fields(found["deviation"], fields, path, remedy)
    return {"deviation": found["deviation"], "tokens_fed": found.get("tokens_fed")}


def _scores(run: Path, metric: str, count: int) -> np.ndarray | None:
    """The values [N] of a metric in manifest order; None if it has no value per image."""
    path, remedy = run / "scores" / f"{metric}.json", f"repeat `arimage eval score {run}`"
    if not path.exists():
        return None
    scores = check_fields(parse_json(read_whole(path), path, remedy), {"ids": list, "values": list}, path, remedy)
    numbers = all(isinstance(value, NUMBER) and math.isfinite(value) for value in scores["values"])
    if scores["ids"] != list(range(count)) or len(scores["values"]) != count or not numbers:
        raise ValueError(f"{path} does not hold the values of the {count} images of the run: {remedy}")
    return np.array(scores["values"])


def to_markdown(report: dict) -> str:
    """The report as a table of all runs, a table of the paired differences, and their common settings."""
    settings, machine, rows = report["settings"], report["machine"], report["rows"]
    metrics = list(dict.fromkeys(name for row in rows for name in row["metrics"]))
    # On a CPU all are eager, unless they are compiled.
    replayed = any(row["steps"] != "eager" for row in rows)
    fed = any(row["tokens_fed"] for row in rows)
    head = ["decoding", "exact?", "passes per image", "passes ratio", "passes per call", "tokens per pass"]
    head += [*(["tokens fed per pass"] if fed else []), "seconds per call", "images/s", "speed-up", "peak MiB"]
    lines = markdown_table(
        [*head, *(["steps"] if replayed else []), *(f"{name} {_arrow(name)}" for name in metrics)],
        [
            _cells(row, fed)
            + ([row["steps"]] if replayed else [])
            + [figure_text(row["metrics"][name]) if name in row["metrics"] else "" for name in metrics]
            for row in rows
        ],
    )
    paired = list(dict.fromkeys(name for row in rows for name in row["paired"]))
    if paired:
        lines += ["", f"Mean differences from {report['baseline']} over images of the same prompt and seed:", ""]
        lines += markdown_table(
            ["decoding", *(f"{name} {_arrow(name)}" for name in paired)],
            [
                [row["name"], *(_difference(row["paired"].get(name)) for name in paired)]
                for row in rows
                if row["name"] != report["baseline"]
            ],
        )
    optional = [
        f"{text} {settings[key]}"
        for key, text in (("height", "height"), ("width", "width"), ("negative_prompt", "negative prompt"))
        if settings.get(key) is not None
    ]
    errors = " ± is a standard error" + ", brackets after scores are 95 % intervals, both" * bool(metrics)
    errors = f"{errors} over other prompts." if metrics or any(row["cost"]["passes_error"] for row in rows) else ""
    adapters = f" with {' and '.join(settings['lora'])}" if settings.get("lora") else ""
    lines += [
        "",
        f"{settings['model']}{adapters}, {settings['images']} images per run, seed {settings['seed']}, "
        f"{', '.join(filter(None, [sampling_text(settings['sampling']), *optional]))}; "
        f"batch size {settings['batch_size']}, calls of {settings['call_size']}, {settings['dtype']}; "
        f"{machine['device']}, {machine['threads']} threads, torch {machine['torch']}. The ratio is that of passes "
        f"per image to those of {report['baseline']}. Seconds are medians with ranges in brackets, of one process, "
        f"without one-time setup.{errors}",
    ]
    if any(row["cost"]["seconds"] is None for row in rows):
        lines.append("Seconds are missing where a run has fewer than two full calls: generate more images.")
    judged = next((row["deviation"]["codes"] for row in rows if row["deviation"]), None)
    if judged:
        lines.append(
            f"Exact: how far tokens are from the model's distribution, on {judged:,} tokens: a lower bound of their "
            "mean total variation. By chance an exact decoding has about the floor, not 0."
        )
    lines += [f"- {row['name']}: {_decoding_text(row)}" for row in rows]
    entries = {name: entry for row in rows for name, entry in row["metrics"].items()}
    lines += [f"- {name}: {_described(entry)}" for name, entry in entries.items()]
    return "\n".join(lines) + "\n"


def _cells(row: dict, fed: bool) -> list[str]:
    """The cells of a row before its metrics; `fed` says whether the table has a column of the tokens fed per pass."""
    cost = row["cost"]
    heads = f", {cost['head_calls']:.0f} head calls" if cost["head_calls"] else ""
    tokens_fed = f"{row['tokens_fed']:.1f}" if row["tokens_fed"] else ""
    return [
        row["name"],
        exactness(row),
        estimate_text(cost["passes"], cost["passes_error"], None) if cost["passes_error"] else f"{cost['passes']:.1f}",
        estimate_text(**cost["passes_ratio"]),
        f"{cost['call_passes']:.1f}{heads}",
        f"{cost['tokens_per_pass']:.2f}",
        *([tokens_fed] if fed else []),
        seconds_text(cost),
        f"{cost['images_per_second']:.2f}" if cost["seconds"] else "",
        f"{cost['speedup']:.2f}" if cost["speedup"] else "",
        f"{cost['peak_memory']:.0f}" if cost["peak_memory"] else "",
    ]


def exactness(row: dict) -> str:
    """What is known of the exactness of a row: its deviation, if it was measured."""
    if row["deviation"] is None:
        return "exact" if row["exact"] else "not exact"
    found = row["deviation"]
    figures = f"{found['total_variation']:.4f}, floor {found['floor']:.4f}"
    if found["impossible"]:
        figures += f", {found['impossible']:.2%} impossible"
    return f"exact ({figures})" if row["exact"] else figures


def seconds_text(cost: dict) -> str:
    """The median of the seconds per call, with their range."""
    if cost["seconds"] is None:
        return ""
    low, middle, high = (f"{value:.2f}" for value in cost["seconds"])
    return middle if low == high else f"{middle} ({low} to {high})"


def markdown_table(head: list[str], rows: list[list[str]]) -> list[str]:
    """The lines of a table in Markdown."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def _arrow(metric: str) -> str:
    distance = metric.endswith("kid") or metric.startswith(("fid", "fvd", "fd-", "nearest", "held-out-nearest"))
    lower = distance or metric in LOWER_IS_BETTER
    return "↓" if lower else "↑"


def _decoding_text(row: dict) -> str:
    text = decoding_to_text(decoding_from_dict(row["settings"])) if row["settings"] else row["decoding"]
    return f"{text}, order {row['order']}" if row["order"] else text


def _difference(estimate: dict | None) -> str:
    return "" if estimate is None else estimate_text(**estimate, sign="+")


def _bar(entry: dict) -> tuple[list[float], list[float]]:
    """How far the 95 % interval of a figure reaches below and above it."""
    half = Z * (entry["standard_error"] or 0)
    low, high = entry.get("interval", (entry["value"] - half, entry["value"] + half))
    return [entry["value"] - low], [high - entry["value"]]


def _described(entry: dict) -> str:
    text = f"{images_text(entry)} against {entry['reference']}"
    if entry["space"]:
        space = entry["space"]
        # A digest is shortened; a space without weights has a sentence in its place.
        weights = space["sha256"] if " " in space["sha256"] else space["sha256"][:8]
        text += f", {space['name']} {weights}, resize {space['resize']}"
    if "size" in entry:
        text += f", images at {entry['size']}"
    return text + (f", weights {entry['weights']}" if "weights" in entry else "")


def plot(report: dict, path: Path) -> None:
    """Write a PNG with panels for forward passes, seconds and metrics with 95 % intervals, and one line per run. Needs
    matplotlib."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = report["rows"]
    costs = [row["cost"] for row in rows]
    missing = {"value": math.nan, "standard_error": None}
    panels: dict[str, list[tuple[float, Any]]] = {"passes per image ↓": [(cost["passes"], None) for cost in costs]}
    if any(cost["images_per_second"] for cost in costs):
        panels["seconds per image ↓"] = [(1 / (cost["images_per_second"] or math.nan), None) for cost in costs]
    for name in dict.fromkeys(name for row in rows for name in row["metrics"]):
        entries = [row["metrics"].get(name, missing) for row in rows]
        panels[f"{name} {_arrow(name)}"] = [(entry["value"], _bar(entry)) for entry in entries]
    columns = min(5, len(panels))
    lines = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(2 + 2.2 * columns, (0.22 * len(rows) + 1) * lines), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False, sharey=True).flat
    for panel, (title, values) in zip(axes, panels.items(), strict=False):
        for line, (row, (value, bar)) in enumerate(zip(rows, values, strict=True)):
            panel.errorbar(value, line, xerr=bar, fmt="o", color=EXACT if row["exact"] else INEXACT, capsize=3)
        panel.set_title(title, fontsize=9, loc="left")
        panel.set_yticks(range(len(rows)), [row["name"] for row in rows])
        panel.locator_params(axis="x", nbins=5)
        panel.tick_params(labelsize=8)
        panel.margins(x=0.1)
        panel.grid(axis="x", alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylim(len(rows) - 0.5, -0.5)
    for panel in figure.axes[len(panels) :]:
        panel.remove()
    kinds = [Patch(color=EXACT, label="samples from the model's distribution"), Patch(color=INEXACT, label="does not")]
    figure.legend(handles=kinds, loc="outside lower left", ncols=2, frameon=False, fontsize=8)
    figure.savefig(path, format="png", dpi=150)


def write_report(report: dict, folder: Path) -> str:
    """Write report.json, report.md and report.png into `folder`, and return the Markdown."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "report.json", report)
    text = to_markdown(report)
    write_whole(folder / "report.md", lambda file: file.write_text(text, encoding="utf-8"))
    write_whole(folder / "report.png", lambda file: plot(report, file))
    return text
