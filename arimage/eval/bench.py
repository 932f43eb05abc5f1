"""Decodings measured in turn on one pipeline: passes, seconds, memory, and how far their codes are from the model's law."""

import dataclasses
import json
import os
import platform
import statistics
from pathlib import Path

import torch
from tqdm import tqdm

from .. import __version__
from ..decoding import (
    Decoding,
    check_kind,
    decode,
    decoding_from_name,
    decoding_names,
    decoding_to_dict,
    parse_decoding,
)
from ..pipelines.base import ARImagePipeline
from .deviation import code_places, deviation


# What two results must share for their figures to be compared, beside models, batch sizes and sampling.
SHARED = (("machine", "device"), ("machine", "threads"), ("settings", "condition"))
# The colours of `plot`.
EXACT, INEXACT = "#2f6f8f", "#d98032"


def choose_decodings(
    pipe: ARImagePipeline, condition: dict[str, list], texts: list[str], windows: list[int], sampling: dict
) -> tuple[dict[str, Decoding], dict[str, str]]:
    """The decodings to measure, by the text that names each.

    Args:
        texts: as `parse_decoding` reads them; if empty, every preset that starts on the model of `pipe`.
        windows: where a decoding has a window that its text does not set, it is measured with each of these.

    Returns:
        The decodings, and why each of the presets that do not start was left out.

    Raises:
        ValueError: if one of `texts` cannot be made or does not start, or if none of the presets does.
    """
    model = pipe.bind(**_take(condition, 0, 1), guidance_scale=sampling.get("guidance_scale"))
    chosen, left_out = {}, {}
    for text in texts or decoding_names(scales=hasattr(model, "scales")):
        name, settings = parse_decoding(text)
        try:
            decoding = decoding_from_name(name, **settings)
            variants = {text: decoding}
            if windows and hasattr(decoding, "window") and "window" not in settings:
                variants = {
                    f"{text}{',' if settings else ':'}window={window}": dataclasses.replace(decoding, window=window)
                    for window in windows
                }
            with torch.no_grad():
                for decoding in variants.values():
                    check_kind(model, decoding)
                    decoding.start(model, pipe.sampling(**sampling), torch.zeros(1, dtype=torch.long).to(model.device))
        except ValueError as error:
            if texts:
                raise
            left_out[text] = str(error)
            continue
        chosen.update(variants)
    if not chosen:
        raise ValueError(f"no decoding starts on this model: {'; '.join(left_out.values())}")
    return chosen, left_out


def measure(
    pipe: ARImagePipeline,
    condition: dict[str, list],
    decodings: dict[str, Decoding],
    *,
    batch_size: int,
    runs: int,
    seed: int,
    sampling: dict | None = None,
) -> list[dict]:
    """A row for each decoding, from `runs` calls that differ in their seed, one of each decoding at a time.

    Args:
        condition: the pipeline's argument that says what to draw ("prompt" or "class_labels") and its values, repeated
            until there are `batch_size` of them.
        decodings: what to measure, by the name that its row gets.
        sampling: arguments of `pipe.sampling`, where they are not the checkpoint's.

    Returns:
        What was measured and, for each run: passes (of an image: those that decided some code of it, mean of the batch),
        batch_passes, tokens_per_pass (of an image), seconds (prefill, passes and pictures together), images_per_second,
        speedup (over the first decoding in the same run) and peak_memory in MiB (of the GPU, or of the process; empty
        where the system does not tell).

    Raises:
        ValueError: if there is nothing to measure.
    """
    if min(batch_size, runs) < 1:
        raise ValueError(f"batch size and runs are {batch_size} and {runs}: give at least 1 of each")
    sampling = sampling or {}
    batch = _take(condition, 0, batch_size)
    pipe.set_progress_bar_config(disable=True)
    device = pipe._execution_device
    figures = ("passes", "batch_passes", "tokens_per_pass", "seconds", "images_per_second", "speedup", "peak_memory")
    rows = [
        {
            "decoding": name,
            "settings": decoding_to_dict(decoding),
            "exact": decoding.exact,
            "batch_size": batch_size,
            "sampling": {**pipe.generation_config, **sampling},
            **{figure: [] for figure in figures},
        }
        for name, decoding in decodings.items()
    ]
    # The first call of each is not timed: it pays for what is set up once.
    for run in tqdm(range(-1, runs), desc=f"batch {batch_size}", unit="run", disable=None, leave=False):
        for row, decoding in zip(rows, decodings.values(), strict=True):
            generator = torch.Generator().manual_seed(seed + run)
            reset_peak_memory(device)
            output = pipe(**batch, **sampling, decoding=decoding, generator=generator, output_type="pt")
            if run < 0:
                continue
            stats = output.stats
            passes = float((stats.accepted > 0).sum(0).float().mean())
            seconds = stats.prefill_seconds + stats.decode_seconds + stats.tokenizer_seconds
            row["passes"].append(passes)
            row["batch_passes"].append(stats.forward_passes)
            row["tokens_per_pass"].append(float(stats.accepted.sum(0).float().mean()) / passes)
            row["seconds"].append(seconds)
            row["images_per_second"].append(batch_size / seconds)
            row["speedup"].append(rows[0]["seconds"][run] / seconds)
            row["peak_memory"] += peak_memory(device)
    return rows


class CountedModel:
    """A `TokenModel` that counts in `fed` the codes that it is fed."""

    def __init__(self, model):
        self._model, self.fed = model, 0

    def __getattr__(self, name):
        return getattr(self._model, name)

    def forward(self, tokens, positions, *arguments, **options):
        self.fed = self.fed + (positions >= 0).sum()
        return self._model.forward(tokens, positions, *arguments, **options)


@torch.no_grad()
def judge(
    pipe: ARImagePipeline,
    condition: dict[str, list],
    decoding: Decoding,
    *,
    images: int,
    seed: int,
    sampling: dict | None = None,
) -> dict:
    """The `deviation` of `images` images from the model's law (a dict of `Deviation`), and, of a `TokenModel`, `tokens_fed`:
    how many codes it is fed for an image in a pass after the prefill."""
    sampling = sampling or {}
    places, fed, passes = [], 0, 0
    for start in range(0, images, 16):
        count = min(16, images - start)
        batch = _take(condition, start, count)
        model = pipe.bind(**batch, guidance_scale=sampling.get("guidance_scale"))
        counted = model if hasattr(model, "scales") else CountedModel(model)
        seeds = torch.arange(start, start + count, device=model.device) + (seed << 32)
        state = decode(counted, decoding, pipe.sampling(**sampling), seeds)
        if counted is not model:
            fed += int(counted.fed)
            passes += int((torch.stack(state.accepted)[1:] > 0).sum())
        places.append(code_places(model, pipe.sampling(**sampling), state.tokens))
    found = deviation(*(torch.cat(parts) for parts in zip(*places, strict=True)))
    return {"deviation": dataclasses.asdict(found), **({"tokens_fed": fed / passes} if passes else {})}


def machine(device: torch.device) -> dict:
    """What the figures were measured on."""
    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    elif Path("/proc/cpuinfo").exists():
        fields = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
        name = next((value.strip() for key, _, value in fields if key.strip() == "model name"), name)
    return {
        "device": name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "arimage": __version__,
    }


def to_markdown(results: dict) -> str:
    """The rows of `results` (machine, settings, rows) as tables of medians with ranges, one for a model and batch size."""
    lines = []
    for (model, batch_size), rows in _sections(results["rows"]).items():
        sampling = ", ".join(f"{name} {value:g}" for name, value in rows[0]["sampling"].items())
        lines += [
            f"**{model}, {batch_size} image{'s' * (batch_size > 1)} a call** ({sampling})",
            "",
            "| decoding | the model's law? | passes an image | passes a batch | codes a pass | codes fed a pass | seconds "
            "| images/s | speed-up | peak MiB |",
            "| --- " * 10 + "|",
        ]
        for row in rows:
            cells = [
                row["decoding"],
                _law_cell(row),
                _cell(row["passes"], 1),
                _cell(row["batch_passes"], 0),
                _cell(row["tokens_per_pass"], 2),
                f"{row['tokens_fed']:.1f}" if "tokens_fed" in row else "",
                _cell(row["seconds"], 2),
                _cell(row["images_per_second"], 2),
                _cell(row["speedup"], 2),
                _cell(row["peak_memory"], 0),
            ]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    machine, settings = results["machine"], results["settings"]
    lines.append(
        f"Medians of {settings['runs']} runs, ranges in brackets; {machine['device']}, {machine['threads']} threads, "
        f"torch {machine['torch']}."
    )
    if settings["images"]:
        lines.append(
            f"The model's law: total variation per code, measured from below on {settings['images']} images; draws from the "
            "law itself have about the floor."
        )
    return "\n".join(lines)


def write_json(results: dict, path: Path) -> None:
    path.write_text(json.dumps(results, indent=2) + "\n")


def read_json(path: Path) -> dict:
    """What `write_json` wrote.

    Raises:
        ValueError: if the file holds something else.
    """
    try:
        results = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON: give a file that `arimage bench --out` wrote") from error
    if not isinstance(results, dict) or not {"machine", "settings", "rows"} <= results.keys():
        raise ValueError(f"{path} holds no figures: give a file that `arimage bench --out` wrote")
    return results


def compare(old: dict, new: dict) -> str:
    """The decodings that two results share, side by side as a table of medians; a ratio above 1 means that the new is faster.

    Raises:
        ValueError: if they differ in more than what was measured: in machine, models, batch sizes or sampling.
    """
    for part, name in SHARED:
        values = old[part][name], new[part][name]
        if values[0] != values[1]:
            raise ValueError(f"the results differ in their {name} ({values[0]} and {values[1]}): measure both alike")
    sections = [_sections(results["rows"]) for results in (old, new)]
    if sections[0].keys() != sections[1].keys():
        described = [", ".join(f"{model} at batch {size}" for model, size in section) for section in sections]
        raise ValueError(f"the results are of {described[0]} and of {described[1]}: measure the same in both")
    lines, missing = [], []
    for (model, batch_size), old_rows in sections[0].items():
        new_rows = {row["decoding"]: row for row in sections[1][model, batch_size]}
        if old_rows[0]["sampling"] != next(iter(new_rows.values()))["sampling"]:
            raise ValueError(f"the results of {model} differ in their sampling: measure both alike")
        lines += [
            f"**{model}, {batch_size} image{'s' * (batch_size > 1)} a call**",
            "",
            "| decoding | passes: old | new | ratio | seconds: old | new | ratio | the model's law: old | new |",
            "| --- " * 9 + "|",
        ]
        missing += new_rows.keys() ^ {row["decoding"] for row in old_rows}
        for row in old_rows:
            if row["decoding"] not in new_rows:
                continue
            pair = (row, new_rows[row["decoding"]])
            cells = [row["decoding"]]
            for figure, digits in (("passes", 1), ("seconds", 2)):
                before, after = (statistics.median(one[figure]) for one in pair)
                cells += [_cell(one[figure], digits) for one in pair] + [f"{before / after:.2f}"]
            lines.append(f"| {' | '.join(cells + [_law_cell(one) for one in pair])} |")
        lines.append("")
    if missing:
        lines.append(f"In one of the two only: {', '.join(sorted(set(missing)))}.")
    return "\n".join(lines).rstrip()


def plot(results: dict, path: Path) -> None:
    """Codes a pass and speed-up of the rows as bars, one line of panels for a model and batch size; needs matplotlib."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    sections = _sections(results["rows"])
    longest = max(len(rows) for rows in sections.values())
    figure = Figure(figsize=(11, (0.34 * longest + 1.3) * len(sections)), layout="constrained")
    panels = figure.subplots(len(sections), 2, squeeze=False, sharey="row")
    first = results["rows"][0]["decoding"]
    for line, ((model, batch_size), rows) in zip(panels, sections.items(), strict=True):
        names = [f"{row['decoding']}\n{_law_cell(row)}" for row in rows]
        colours = [EXACT if row["exact"] else INEXACT for row in rows]
        for panel, key, title in zip(
            line, ("tokens_per_pass", "speedup"), ("codes a pass", f"times as fast as {first}"), strict=True
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
    kinds = [Patch(color=EXACT, label="draws from the model's own law"), Patch(color=INEXACT, label="does not")]
    figure.legend(handles=kinds, loc="outside lower left", ncols=2, frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)


def _sections(rows: list[dict]) -> dict[tuple[str, int], list[dict]]:
    """Rows that were measured in turn, by their model and batch size."""
    sections = {}
    for row in rows:
        sections.setdefault((row["model"], row["batch_size"]), []).append(row)
    return sections


def _cell(values: list[float], digits: int) -> str:
    if not values:
        return ""
    low, middle, high = (f"{f(values):.{digits}f}" for f in (min, statistics.median, max))
    return middle if low == high else f"{middle} ({low} to {high})"


def _law_cell(row: dict) -> str:
    if "deviation" not in row:
        return "exact" if row["exact"] else "not exact"
    found = row["deviation"]
    figures = f"{found['total_variation']:.4f}, floor {found['floor']:.4f}"
    if found["impossible"]:
        figures += f", {found['impossible']:.2%} impossible"
    return f"exact ({figures})" if row["exact"] else figures


def _take(condition: dict[str, list], start: int, count: int) -> dict[str, list]:
    """`count` of the condition's values from the `start`-th on, repeated as often as it takes."""
    return {name: [values[i % len(values)] for i in range(start, start + count)] for name, values in condition.items()}


CLEAR_REFS = Path("/proc/self/clear_refs")


def reset_peak_memory(device: torch.device) -> None:
    """Begin to look for a new peak, see `peak_memory`."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif os.access(CLEAR_REFS, os.W_OK):
        # Linux: the process's peak of resident memory starts anew.
        CLEAR_REFS.write_text("5")


def peak_memory(device: torch.device) -> list[float]:
    """The peak since the last reset in MiB, or nothing where it cannot be known."""
    if device.type == "cuda":
        return [torch.cuda.max_memory_allocated(device) / 2**20]
    if not os.access(CLEAR_REFS, os.W_OK):
        return []
    status = Path("/proc/self/status").read_text()
    return [int(line.split()[1]) / 2**10 for line in status.splitlines() if line.startswith("VmHWM")]
