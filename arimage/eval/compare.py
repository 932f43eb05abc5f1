"""`arimage eval compare`: generates with several decodings in turn, scores the images, and writes one report."""

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from ..pipelines.base import ARPipeline
from .bench.measure import choose_decodings
from .job import Job
from .report import make_report, write_report
from .runs.generate import (
    Run,
    check_references,
    condition,
    generate_batch,
    make_config,
    missing_batches,
    prepare,
    progress_bar,
)
from .score import score


def prepare_runs(
    pipe: ARPipeline, rows: list[dict], decodings: list[str], out: Path, orders: Sequence[str] = (), **asked
) -> tuple[list[Run], dict[str, str]]:
    """Start or resume one run per decoding and order, each in a folder of `out`. Nothing is written unless all of them
    can be generated.

    Args:
        rows: the manifest of all runs.
        decodings: as in `choose_decodings`.
        orders: orders of the tokens; by default the pipeline's.
        asked: the other arguments of `generate.make_config`.

    Returns:
        The runs, and the reason why each other preset was left out.

    Raises:
        ValueError: if a decoding does not run on the model, or a run in `out` has another configuration.
    """
    check_references(pipe, asked["model"], rows)
    configs, left_out = {}, {}
    for order in orders or [None]:
        settings = asked["sampling"] if order is None else {**asked["sampling"], "order": order}
        if order is not None and not pipe.abilities.accepts("order"):
            raise ValueError(f"{asked['model']} takes no order: leave out --order")
        chosen, without = choose_decodings(pipe, condition(rows[-1:]), decodings, [], settings)
        left_out |= without
        for name in chosen:
            folder = re.sub("[:,]", "-", name if order is None else f"{name}-{order}")
            configs[folder] = make_config(pipe, rows, decoding=name, order=order, **asked)
    return [prepare(config, rows, out / folder) for folder, config in configs.items()], left_out


def generate_in_turn(runs: list[Run], pipe: ARPipeline) -> None:
    """Generate the missing calls. The runs take turns call by call, so that other work on the machine slows all of
    them down alike."""
    missing = {run.folder: set(missing_batches(run)) for run in runs}
    batches = max(math.ceil(len(run.rows) / run.call_size) for run in runs)
    with progress_bar(total=sum(map(len, missing.values())), unit="batch") as progress:
        for index in range(batches):
            for run in runs:
                if index in missing[run.folder]:
                    progress.set_description(run.folder.name)
                    generate_batch(run, pipe, index)
                    progress.update()


def compare(runs: list[Run], pipe: ARPipeline, metrics: list[str], make_job: Callable[[Path], Job], out: Path) -> str:
    """Generate the runs, score each with `make_job(folder)`, and write the report into `out`, with the first run as
    the baseline. Images that exist already are kept. Returns the Markdown of the report."""
    generate_in_turn(runs, pipe)
    for run in runs:
        if metrics:
            score(make_job(run.folder), metrics)
    folders = [run.folder for run in runs]
    return write_report(make_report(folders, folders[0].name), out)
