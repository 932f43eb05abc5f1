"""`--dry-run`: how long a run would take, from a few measured forward passes."""

from dataclasses import dataclass
from pathlib import Path

from ...pipelines.base import ARImagePipeline
from ..bench.measure import quiet
from .generate import arguments, check_resumed
from .run_folder import CONFIG, read_results


# How many forward passes are measured, and how many before them, since these include one-time setup.
PASSES, WARM_UP = 32, 2


@dataclass(frozen=True)
class Cost:
    """The cost of a batch.

    Attributes:
        size: height and width of the images.
        measured: forward passes that were measured.
        finished: whether these finished the images.
        passes: forward passes per image, counted if `finished`, else estimated from the tokens per pass so far.
        pass_seconds: seconds per forward pass after the prefill.
        other_seconds: seconds of the prefill, and of decoding tokens to pixels.
    """

    size: tuple[int, int]
    measured: int
    finished: bool
    passes: float
    pass_seconds: float
    other_seconds: float

    @property
    def seconds(self) -> float:
        return self.other_seconds + (self.passes - 1) * self.pass_seconds


def measure_batch(pipe: ARImagePipeline, config: dict, rows: list[dict]) -> Cost:
    """Generate the first batch of a run for up to `PASSES` forward passes, without writing anything.

    Args:
        config: from `make_config`.
        rows: the manifest.
    """
    rows, calls = rows[: config["batch_size"]], []
    pipe = quiet(pipe)

    def generate(most: int):
        def stop(pipe: ARImagePipeline, step: int, passes: int, tensors: dict) -> None:
            calls.append(pipe.current_call)
            pipe._interrupt = passes == most

        return pipe(**arguments(config, rows), output_type="pt", callback_on_step_end=stop).stats

    for _ in pipe.until_captured():
        generate(PASSES if pipe._execution_device.type == "cuda" else WARM_UP)
    stats = generate(PASSES)
    decided = float(stats.accepted.sum(0).float().mean())
    passes = float((stats.accepted > 0).sum(0).float().mean())
    count = calls[-1].model.num_tokens
    return Cost(
        size=calls[-1].size,
        measured=stats.forward_passes,
        finished=decided == count,
        passes=passes * count / decided,
        pass_seconds=stats.decode_seconds / max(stats.forward_passes - 1, 1),
        other_seconds=stats.prefill_seconds + stats.tokenizer_seconds,
    )


def finished_images(config: dict, rows: list[dict], folder: Path) -> int:
    """How many images the run in a folder has, which need not exist. Refuses another run."""
    if not (folder / CONFIG).is_file():
        return 0
    check_resumed(config, rows, folder)
    return len(read_results(folder))


def dry_run(pipe: ARImagePipeline, config: dict, rows: list[dict], out: Path, processes: int) -> str:
    """A text that says how long `processes` would take for the missing images of the run in `out`, and what they would
    write."""
    count, batch, done = len(rows), config["batch_size"], finished_images(config, rows, out)
    cost = measure_batch(pipe, config, rows)
    height, width = cost.size
    hours = (count - done) / min(batch, count) * cost.seconds / processes / 3600
    how = "all" if cost.finished else f"estimated from the first {cost.measured}"
    caution = "" if cost.finished else "; later forward passes attend to more tokens and take longer"
    gigabytes = 3 * height * width * count / 1e9
    return "\n".join(
        [
            f"images: {count} of {width}x{height} pixels, of which {done} are finished",
            f"steps: {cost.passes:.1f} forward passes per image with {config['decoding_name']} ({how})",
            f"measured: {cost.pass_seconds:.3g} s per forward pass of {min(batch, count)} images, and "
            f"{cost.other_seconds:.3g} s for prefill and pixels",
            f"time: {hours:.3g} hours with {processes} process{'es' if processes > 1 else ''}{caution}",
            f"writes: {out / CONFIG}, manifest.jsonl, results/ and {count} PNG files, at most {gigabytes:.3g} GB",
        ]
    )
