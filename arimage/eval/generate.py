"""Many images into a folder, by any number of processes, with any interruption: the same images bit for bit.

The unit of work is the batch, rows k * batch_size ... of the manifest, and not the row. The seed of an image makes it
independent of its neighbours only up to the rounding of differently shaped matrix products, and a code that hangs on the last
bit changes the rest of its image. So an image is always drawn in one and the same batch: a batch of which anything is missing
is drawn again whole. What a decoding does must not depend on the clock either: the window "auto" follows measured times, so
that its images keep the model's law but are not the same twice.

A caller that draws several runs in turn, so that all of them see the same machine, uses the parts:

    runs = [prepare(make_config(pipe, rows, ...), rows, folder) for ...]
    missing = [set(missing_batches(run)) for run in runs]
    for index in range(math.ceil(len(rows) / batch_size)):
        for run, indices in zip(runs, missing):
            if index in indices:
                draw_batch(run, pipe, index)
"""

import contextlib
import errno
import hashlib
import io
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import PartialState
from filelock import FileLock, Timeout
from torch import nn
from tqdm import tqdm

from ..decoding import decoding_from_dict, decoding_from_name, decoding_names, decoding_to_dict
from ..pipelines.base import ARImagePipeline
from .bench import choose_decodings, machine, peak_memory, reset_peak_memory
from .manifest import CONFIG, IMAGES, MANIFEST, RESULTS, read_config, read_results, read_rows, replace, to_lines


@dataclass
class Run:
    """A run that can be drawn: its folder, what was asked, its manifest, and whether this process has drawn a batch of it.

    `lock` keeps other commands from the folder for as long as it lives.
    """

    folder: Path
    config: dict
    rows: list[dict]
    lock: FileLock | None = None
    warm: bool = False

    def batch(self, index: int) -> list[dict]:
        size = self.config["batch_size"]
        return self.rows[index * size : (index + 1) * size]


def make_config(
    pipe: ARImagePipeline,
    rows: list[dict],
    *,
    model: str,
    source: dict,
    seed: int,
    batch_size: int,
    decoding: str | None = None,
    sampling: dict | None = None,
    height: int | None = None,
    width: int | None = None,
) -> dict:
    """What is asked of a run, as its config.json says it; every choice that the call leaves open is filled in.

    Args:
        rows: the manifest.
        model: what `pipe` was loaded by.
        source: where the rows came from.
        decoding: as `bench.parse_decoding` reads it; by default that of the pipeline.
        sampling: guidance_scale, temperature, top_k and top_p where they are not the checkpoint's.

    Raises:
        ValueError: if the pipeline cannot draw the last row, or not with this decoding.
    """
    if batch_size < 1:
        raise ValueError(f"--batch-size is {batch_size}: give at least 1")
    sampling = {name: value for name, value in (sampling or {}).items() if value is not None}
    pipe.sampling(**sampling)
    if decoding is None:
        settings = decoding_to_dict(pipe.decoding)
        presets = [name for name in decoding_names() if decoding_to_dict(decoding_from_name(name)) == settings]
        decoding = presets[0] if presets else type(pipe.decoding).__name__
        pipe.bind(**condition(rows[-1:]), guidance_scale=sampling.get("guidance_scale"))
    else:
        chosen, _ = choose_decodings(pipe, condition(rows[-1:]), [decoding], [], sampling)
        settings = decoding_to_dict(chosen[decoding])
    return {
        "model": model,
        "weights": weights_digest(pipe),
        "decoding_name": decoding,
        "decoding": settings,
        "sampling": {**pipe.generation_config, **sampling},
        "source": source,
        "images": len(rows),
        "seed": seed,
        "batch_size": batch_size,
        "height": height,
        "width": width,
        "dtype": str(pipe.dtype).removeprefix("torch."),
        "machine": machine(pipe._execution_device),
    }


def condition(rows: list[dict]) -> dict[str, list]:
    """The pipeline's argument that says what the images of `rows` show."""
    if "class_label" in rows[0]:
        return {"class_labels": [row["class_label"] for row in rows]}
    return {"prompt": [row["prompt"] for row in rows]}


def weights_digest(pipe: ARImagePipeline) -> str:
    """SHA-256 of 256 values or so of every weight: another training gives another digest, and 7 billion weights take seconds."""
    digest = hashlib.sha256()
    for component, module in sorted(pipe.components.items()):
        for name, value in module.state_dict().items() if isinstance(module, nn.Module) else ():
            some = value.flatten()[:: value.numel() // 256 + 1].contiguous().cpu()
            digest.update(f"{component}.{name}".encode() + some.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def prepare(config: dict, rows: list[dict], folder: Path, rank: int = 0) -> Run:
    """Make a run in `folder`, or go on with the one that is there. Several processes that draw one run call it one after
    another, rank 0 first; only this one locks the folder.

    Raises:
        ValueError: if another command draws into the folder, if it holds pictures of no run, or if the run there is another
            than is asked for.
        OSError: if the folder cannot be written.
    """
    config = json.loads(json.dumps(config))
    lock = None
    with _room_in(folder):
        if rank == 0:
            (folder / IMAGES).mkdir(parents=True, exist_ok=True)
            (folder / RESULTS).mkdir(exist_ok=True)
            lock = FileLock(folder / ".lock", blocking=False, is_singleton=True)
            try:
                lock.acquire()
            except Timeout as error:
                raise ValueError(f"another command draws into {folder}: wait for it, or give another --out") from error
            if not (folder / CONFIG).exists():
                if os.listdir(folder / IMAGES):
                    raise ValueError(f"{folder / IMAGES} holds pictures of no run: give another --out")
                replace(folder / MANIFEST, lambda file: file.write_bytes(to_lines(rows)))
                replace(folder / CONFIG, lambda file: file.write_text(json.dumps(config, indent=2) + "\n"))
    run = open_run(folder, lock)
    config["machine"]["threads"] = run.config["machine"]["threads"]
    _check_same(folder / CONFIG, run.config, config)
    old, new = ({f"image {row['id']}": row for row in some} for some in (run.rows, rows))
    _check_same(folder / MANIFEST, old, new)
    return run


def open_run(folder: Path, lock: FileLock | None = None) -> Run:
    """The run that `prepare` made in `folder`. This process gets as many threads as the run was begun with.

    Raises:
        ValueError: if there is none.
    """
    config = read_config(folder)
    torch.set_num_threads(config["machine"]["threads"])
    return Run(folder, config, read_rows(folder), lock)


def _check_same(where: Path, old: dict, new: dict, path: str = "") -> None:
    for key in dict.fromkeys([*new, *old]):
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            _check_same(where, before, after, f"{path}{key}.")
        elif before != after:
            raise ValueError(
                f"{where} says {path}{key} = {before!r} and you ask for {after!r}: ask for the same, or give another --out"
            )


@contextlib.contextmanager
def _room_in(folder: Path):
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise OSError(
            f"there is no room for more in {folder} ({error.strerror}): make room and give the same command again, what is "
            "drawn is kept"
        ) from error


def missing_batches(run: Run) -> list[int]:
    """The batches of which a picture or a result is missing."""
    size = run.config["batch_size"]
    finished = read_results(run.folder)
    return sorted({row["id"] // size for row in run.rows if row["id"] not in finished})


def draw(run: Run, pipe: ARImagePipeline, index: int) -> list[dict]:
    """Draw the batch and write its pictures, each whole or not at all.

    Returns:
        a row for each image: id, batch, batch_size (images in this batch), seconds (of the call: prefill, passes and
        pictures), passes (that decided some code of the image), batch_passes, tokens_per_pass (of the image), exact,
        peak_memory in MiB (of the GPU, or of the process; None where the system does not tell), warm (False for the first
        batch that a process draws of a run: it pays for what is set up once).

    Raises:
        OSError: if a picture cannot be written.
    """
    rows, config = run.batch(index), run.config
    pipe.set_progress_bar_config(disable=True)
    reset_peak_memory(pipe._execution_device)
    output = pipe(
        **condition(rows),
        **config["sampling"],
        height=config["height"],
        width=config["width"],
        generator=[torch.Generator().manual_seed(row["seed"]) for row in rows],
        decoding=decoding_from_dict(config["decoding"]),
    )
    stats = output.stats
    passes = (stats.accepted > 0).sum(0)
    common = {
        "batch": index,
        "batch_size": len(rows),
        "seconds": stats.prefill_seconds + stats.decode_seconds + stats.tokenizer_seconds,
        "batch_passes": stats.forward_passes,
        "exact": stats.exact,
        "peak_memory": next(iter(peak_memory(pipe._execution_device)), None),
        "warm": run.warm,
    }
    run.warm = True
    with _room_in(run.folder):
        for row, image in zip(rows, output.images, strict=True):
            png = io.BytesIO()
            image.save(png, "PNG")
            replace(run.folder / row["path"], lambda file, png=png: file.write_bytes(png.getvalue()))
    tokens_per_pass = stats.accepted.sum(0) / passes
    return [
        {"id": row["id"], **common, "passes": int(passes[i]), "tokens_per_pass": float(tokens_per_pass[i])}
        for i, row in enumerate(rows)
    ]


def record(run: Run, results: list[dict], rank: int = 0) -> None:
    """Append the rows that `draw` returned to the file of this process, all of them or none.

    Raises:
        OSError: if they cannot be written.
    """
    path = run.folder / RESULTS / f"rank-{rank:05d}.jsonl"
    with _room_in(run.folder), open(path, "a+b", buffering=0) as file:
        # A kill may have cut the last line short.
        begin = max(0, file.seek(0, os.SEEK_END) - 2**16)
        file.seek(begin)
        whole = begin + file.read().rfind(b"\n") + 1
        file.truncate(whole)
        lines = to_lines(results)
        try:
            # Without a buffer a write may be partial; the next one then says why.
            written = 0
            while written < len(lines):
                written += file.write(lines[written:])
        except OSError:
            file.truncate(whole)
            raise


def draw_batch(run: Run, pipe: ARImagePipeline, index: int, rank: int = 0) -> list[dict]:
    """`draw` a batch and `record` its results, which are returned."""
    results = draw(run, pipe, index)
    record(run, results, rank)
    return results


def generate(run: Run, pipe: ARImagePipeline, batches: list[int] | None = None, rank: int = 0) -> None:
    """Draw `batches`, by default all that are missing; rank 0 shows how far all processes together are, with images a second
    and the time that is left."""

    def drawn() -> int:
        return sum(name.endswith(".png") for name in os.listdir(run.folder / IMAGES))

    batches = missing_batches(run) if batches is None else batches
    with progress_bar(
        total=len(run.rows), initial=drawn(), unit="image", desc=run.folder.name, disable=rank > 0
    ) as progress:
        for index in batches:
            draw_batch(run, pipe, index, rank)
            progress.update(drawn() - progress.n)


def progress_bar(**options) -> tqdm:
    """tqdm's, with its `options`: moving on a terminal, and now and then a word in the log of a job."""
    return tqdm(**options, mininterval=0.1 if sys.stderr.isatty() else 30)


def join_processes(device: str | None) -> PartialState:
    """This process among those that torchrun or `accelerate launch` started, or alone.

    Raises:
        ValueError: if a launcher started more processes than have found each other: all would do all the work.
    """
    state = PartialState(cpu=device == "cpu" or not torch.cuda.is_available())
    launched = int(os.environ.get("WORLD_SIZE", 1))
    if launched != state.num_processes:
        raise ValueError(
            f"the launcher says WORLD_SIZE={launched}, but this process has joined a group of {state.num_processes}: start "
            "the command by torchrun or `accelerate launch --multi_gpu`, or unset WORLD_SIZE"
        )
    return state


def generate_by_processes(
    pipe: ARImagePipeline, config: dict, rows: list[dict], folder: Path, state: PartialState
) -> None:
    """Prepare the run and draw this process's share of what is missing; see `prepare` for what is refused."""
    rank, world = state.process_index, state.num_processes
    with state.main_process_first():
        run = prepare(config, rows, folder, rank)
    batches = missing_batches(run)[rank::world]
    # Nobody draws before everybody has seen what is missing.
    state.wait_for_everyone()
    generate(run, pipe, batches, rank)
