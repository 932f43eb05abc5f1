"""Several decodings of one model: generate with each in turn, score all alike, and report them side by side."""

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from ..pipelines.base import ARPipeline
from .bench.measure import choose_decodings
from .report import make_report, write_report
from .runs.generate import Run, condition, generate_batch, make_config, missing_batches, prepare, progress_bar
from .score import Job, score


def prepare_runs(
    pipe: ARPipeline, rows: list[dict], decodings: list[str], out: Path, orders: Sequence[str] = (), **asked
) -> tuple[list[Run], dict[str, str]]:
    """One run per decoding and order, each in a folder of `out`. Nothing is written unless all can be generated.

    Args:
        rows: the manifest of all runs.
        decodings: as `choose_decodings` takes them.
        orders: of the tokens; none is that of the pipeline.
        asked: the other arguments of `generate.make_config`.

    Returns:
        The runs, and the reason why each other preset was left out.

    Raises:
        ValueError: if a decoding does not run on the model, or a run in `out` has another configuration.
    """
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
    """Generate the missing calls, the same call of every run before the next one, so that other work on the machine slows
    all runs down alike."""
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
    """Generate the runs, score each by `make_job(folder)`, and write the report with the first run as the baseline into `out`.
    Images of an earlier call are reused. Returns the Markdown of the report."""
    generate_in_turn(runs, pipe)
    for run in runs:
        if metrics:
            score(make_job(run.folder), metrics)
    folders = [run.folder for run in runs]
    return write_report(make_report(folders, folders[0].name), out)
