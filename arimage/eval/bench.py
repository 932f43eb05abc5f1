"""Forward passes and seconds of decodings, measured in turn on one pipeline."""

import json
import platform
import statistics
from pathlib import Path

import torch

from ..pipelines.base import ARImagePipeline


def measure(
    pipe: ARImagePipeline, condition: dict[str, list], decodings: list[str], *, batch_size: int, runs: int, seed: int
) -> list[dict]:
    """A row for each decoding, from `runs` calls that differ in their seed, one of each decoding at a time.

    Args:
        condition: the pipeline's argument that says what to draw ("prompt" or "class_labels") and its values, repeated
            until there are `batch_size` of them.

    Returns:
        name, exact, and the lists of `runs` forward_passes and seconds (prefill, passes and pictures together).

    Raises:
        ValueError: if there is nothing to measure.
    """
    if min(batch_size, runs) < 1:
        raise ValueError(f"batch size and runs are {batch_size} and {runs}: give at least 1 of each")
    (name, values), *_ = condition.items()
    condition = {name: [values[i % len(values)] for i in range(batch_size)]}
    pipe.set_progress_bar_config(disable=True)
    rows = {decoding: {"decoding": decoding, "forward_passes": [], "seconds": []} for decoding in decodings}
    # The first call of each is not timed: it pays for what is set up once.
    for run in range(-1, runs):
        for decoding, row in rows.items():
            generator = torch.Generator().manual_seed(seed + run)
            stats = pipe(**condition, decoding=decoding, generator=generator, output_type="pt").stats
            row["exact"] = stats.exact
            if run >= 0:
                row["forward_passes"].append(stats.forward_passes)
                row["seconds"].append(stats.prefill_seconds + stats.decode_seconds + stats.tokenizer_seconds)
    for row in rows.values():
        row["images_per_second"] = [batch_size / seconds for seconds in row["seconds"]]
    return list(rows.values())


def to_markdown(rows: list[dict]) -> str:
    """The rows as a table of medians, with ranges in brackets."""

    def cell(values: list[float], digits: int) -> str:
        low, middle, high = min(values), statistics.median(values), max(values)
        return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"

    lines = ["| decoding | exact | forward passes | seconds | images/s |", "| --- | --- | --- | --- | --- |"]
    for row in rows:
        lines.append(
            f"| {row['decoding']} | {'yes' if row['exact'] else 'no'} | {cell(row['forward_passes'], 0)} "
            f"| {cell(row['seconds'], 2)} | {cell(row['images_per_second'], 2)} |"
        )
    return "\n".join(lines)


def write_json(rows: list[dict], path: Path, **settings) -> None:
    """Every run's figures, with what they were measured on."""
    machine = {"torch": torch.__version__, "python": platform.python_version(), "threads": torch.get_num_threads()}
    path.write_text(json.dumps({"settings": settings, "machine": machine, "rows": rows}, indent=2) + "\n")
