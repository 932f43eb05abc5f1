"""`arimage bench`: decodings generate the same images in turn, which are timed, judged and scored."""

import math
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ..pipelines.base import ARPipeline
from .against import check_against
from .bench.judge import judge
from .bench.measure import choose_decodings, quiet
from .job import Job
from .report import make_report
from .runs.estimate import finished_images, measure_batch
from .runs.files import write_json
from .runs.generate import (
    Run,
    arguments,
    check_references,
    condition,
    generate_batch,
    make_config,
    missing_batches,
)
from .runs.manifest import label_rows, prompt_rows
from .runs.progress import duration_text, progress_bar, tell_left
from .runs.run_folder import DEVIATION
from .score import score


# Fewer images say little about a deviation.
FEWEST_JUDGED = 16
# By default, prompts of the command line fill as many calls.
CALLS = 5


def typed_rows(
    pipe: ARPipeline, prompts: list[str], labels: list[int | str], images: int | None, batch_size: int, seed: int
) -> tuple[list[dict], dict]:
    """The manifest of `images` images for each of the prompts, or else of the classes, and its source as in
    `make_manifest`."""
    images = images or math.ceil(CALLS * batch_size / len(prompts or labels))
    if prompts:
        return prompt_rows([{"prompt": text} for text in prompts], seed, images), {"per_prompt": images}
    ids = [pipe.get_label_ids(label)[0] if isinstance(label, str) else label for label in labels]
    pipe.prepare(class_labels=ids)
    return label_rows(ids, seed, images), {"per_class": images}


def configure_runs(
    pipe: ARPipeline,
    rows: list[dict],
    decodings: list[str],
    orders: Sequence[str] = (),
    against: dict | None = None,
    **asked,
) -> tuple[dict[str, dict], dict[str, str]]:
    """The configurations of one run per decoding and order.

    Args:
        rows: the manifest of all runs.
        decodings: as in `choose_decodings`.
        orders: orders of the tokens; by default the pipeline's.
        against: a report that the runs are to be compared with.
        asked: the other arguments of `generate.make_config`.

    Returns:
        The configurations by the names of the runs' folders, and the reason why each other preset was left out.
    """
    check_references(pipe, asked["model"], rows)
    configs, left_out = {}, {}
    for order in orders or [None]:
        settings = asked["sampling"] if order is None else {**asked["sampling"], "order": order}
        if order is not None and not pipe.abilities.accepts("order"):
            raise ValueError(f"{asked['model']} takes no order: leave out --order")
        chosen, without = choose_decodings(pipe, condition(rows[-1:]), decodings, settings)
        left_out |= without
        for name in chosen:
            folder = re.sub("[:,]", "-", name if order is None else f"{name}-{order}")
            configs[folder] = make_config(pipe, rows, decoding=name, order=order, **asked)
            if against is not None:
                check_against(against, configs[folder])
    return configs, left_out


def estimate(pipe: ARPipeline, configs: dict[str, dict], rows: list[dict], out: Path | None) -> str:
    """A text that says how long the runs would take to generate what is missing in folders of `out`, from a few
    forward passes of each. Writes nothing."""
    lines, seconds, size = [], 0.0, (0, 0)
    for folder, config in configs.items():
        done = 0 if out is None else finished_images(config, rows, out / folder)
        cost = measure_batch(pipe, config, rows)
        how = "all" if cost.finished else f"estimated from the first {cost.measured}"
        lines.append(
            f"{folder}: {cost.passes:.1f} forward passes per image ({how}), {cost.pass_seconds:.3g} s each"
            + (f"; {done} images are finished" if done else "")
        )
        batches = math.ceil((len(rows) - done) / config["batch_size"])
        # One more is not timed.
        seconds += cost.seconds * (batches + 1 if batches else 0)
        size = cost.size
    lines.insert(0, f"images: {len(rows)} of {size[1]}x{size[0]} pixels with each of {len(configs)} decodings")
    return "\n".join([*lines, f"time: about {duration_text(seconds)}; what --metrics measures comes on top"])


def warm_up(run: Run, pipe: ARPipeline) -> None:
    """Generate a batch that is not timed: it includes one-time setup. Two on a CUDA device, see
    `ARPipeline.capture`."""
    batch = run.rows[: run.config["batch_size"]]
    for _ in range(2 if pipe._execution_device.type == "cuda" else 1):
        quiet(pipe)(**arguments(run.config, batch), batch_size=run.config["batch_size"])
    run.warm = True


def generate_in_turn(runs: list[Run], pipe: ARPipeline) -> None:
    """Generate the missing calls. The runs take turns call by call, so that other work on the machine slows all of
    them down alike."""
    missing = {run.folder: set(missing_batches(run)) for run in runs}
    unknown, left = {folder for folder, some in missing.items() if some}, 0.0
    batches = max(math.ceil(len(run.rows) / run.call_size) for run in runs)
    # A log does not get a line per call.
    shown = sys.stderr.isatty()
    with progress_bar(total=sum(map(len, missing.values())), unit="batch") as progress:
        for run in runs:
            if missing[run.folder]:
                progress.set_description(f"{run.folder.name}, untimed", refresh=shown)
                warm_up(run, pipe)
        for index in range(batches):
            for run in runs:
                if index in missing[run.folder]:
                    progress.set_description(run.folder.name, refresh=shown)
                    began = time.perf_counter()
                    generate_batch(run, pipe, index)
                    progress.update()
                    missing[run.folder].remove(index)
                    # As soon as all have generated one.
                    if run.folder in unknown:
                        left += (time.perf_counter() - began) * len(missing[run.folder])
                        unknown.remove(run.folder)
                        if not unknown:
                            tell_left(progress, left)


def judge_run(run: Run, pipe: ARPipeline) -> None:
    """Write how far the decoding of a run is from the model's distribution, see `judge`, unless it is known."""
    path = run.folder / DEVIATION
    if path.exists():
        return
    asked = arguments(run.config, run.rows)
    given, decoding = condition(run.rows), asked.pop("decoding")
    others = {name: value for name, value in asked.items() if name not in (*given, "generator")}
    images = max(FEWEST_JUDGED, len(run.rows))
    write_json(path, judge(pipe, given, decoding, images=images, seed=run.config["seed"], sampling=others))


def bench(
    runs: list[Run], pipe: ARPipeline, metrics: list[str], make_job: Callable[[Path], Job], deviation: bool = False
) -> dict:
    """Generate the runs, score each with `make_job(folder)`, and compare them with the first. What exists already is
    kept.

    Args:
        deviation: whether to measure how far each decoding is from the model's distribution.

    Returns:
        The report, see `make_report`.
    """
    generate_in_turn(runs, pipe)
    for run in runs:
        if deviation:
            judge_run(run, pipe)
        if metrics:
            score(make_job(run.folder), metrics)
    folders = [run.folder for run in runs]
    return make_report(folders, folders[0].name)
