"""Several decodings of one model, drawn in turn, scored alike and reported side by side."""

import math
import re
from collections.abc import Callable
from pathlib import Path

from ..pipelines.base import ARImagePipeline
from .bench import choose_decodings
from .generate import Run, condition, draw_batch, make_config, missing_batches, prepare, progress_bar
from .report import make_report, write_report
from .score import Job, score


def prepare_runs(
    pipe: ARImagePipeline, rows: list[dict], decodings: list[str], out: Path, **asked
) -> tuple[list[Run], dict[str, str]]:
    """A run in a folder of `out` for each of `decodings`, as `bench.choose_decodings` takes them.

    Args:
        rows: the manifest of all of them.
        asked: the other arguments of `generate.make_config`.

    Returns:
        The runs, and why each of the presets that do not start was left out.

    Raises:
        ValueError: if a decoding does not start, or a run in `out` is another than is asked for.
    """
    chosen, left_out = choose_decodings(pipe, condition(rows[-1:]), decodings, [], asked["sampling"])
    runs = []
    for name in chosen:
        config = make_config(pipe, rows, decoding=name, **asked)
        runs.append(prepare(config, rows, out / re.sub("[:,]", "-", name)))
    return runs, left_out


def draw_in_turn(runs: list[Run], pipe: ARImagePipeline) -> None:
    """Draw what is missing batch by batch, the same batch of every run before the next, so that whatever else the machine
    does slows all of them down."""
    missing = {run.folder: set(missing_batches(run)) for run in runs}
    batches = math.ceil(len(runs[0].rows) / runs[0].config["batch_size"])
    with progress_bar(total=sum(map(len, missing.values())), unit="batch") as progress:
        for index in range(batches):
            for run in runs:
                if index in missing[run.folder]:
                    progress.set_description(run.folder.name)
                    draw_batch(run, pipe, index)
                    progress.update()


def compare(
    runs: list[Run], pipe: ARImagePipeline, metrics: list[str], make_job: Callable[[Path], Job], out: Path
) -> str:
    """Draw the runs, score each by `make_job(folder)` and write the report, whose baseline is the first, into `out`; returns
    its Markdown. What an earlier call did is not done again."""
    draw_in_turn(runs, pipe)
    for run in runs:
        if metrics:
            score(make_job(run.folder), metrics)
    folders = [run.folder for run in runs]
    return write_report(make_report(folders, folders[0].name), out)
