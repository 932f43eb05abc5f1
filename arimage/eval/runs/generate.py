"""Generates the images of a run. They are the same bit for bit with any number of processes and interruptions.

The unit of work is a call of the pipeline, which generates rows k * call_size to (k + 1) * call_size - 1 of the
manifest. A call has up to `BATCHES` times `batch_size` images, and a finished image makes room for the next one. The
seed of an image makes it independent of the other images of its call only up to the rounding of differently shaped
matrix products, and a token that depends on the last bit changes the rest of its image. So an image is always
generated in the same call, which depends on the tokens and never on the clock, and a call with a missing or damaged
image is repeated as a whole. A decoding must not depend on the clock either: with the window "auto", which follows
measured times, the images follow the model's distribution but are not reproducible.
"""

import contextlib
import hashlib
import io
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import PartialState
from filelock import FileLock
from torch import nn

from ...cli.options import Steps, adapter_text, supported
from ...decoding import decoding_from_dict, decoding_to_dict, decoding_to_text
from ...media.files import read_image
from ...pipelines.base import ARPipeline
from ...pipelines.quantized import dtype_name
from ..bench.measure import choose_decodings, machine, quiet
from ..bench.memory import peak_memory, reset_peak_memory
from .files import append, check_same, hold, remove_leftovers, space_in, to_lines, write_json, write_whole
from .progress import progress_bar, tell_left
from .run_folder import (
    CONFIG,
    IMAGES,
    MANIFEST,
    RESULTS,
    call_size,
    manifest_digest,
    read_config,
    read_results,
    read_rows,
)


# The most batches per call, and the fewest calls per run (if it has as many batches): calls are shared among
# processes, timed, and lost to an interruption.
BATCHES = CALLS = 8


@dataclass
class Run:
    """A run: its folder, configuration and manifest.

    Attributes:
        lock: keeps other commands out of the folder while it is held.
        warm: whether this process has generated a batch of the run.
    """

    folder: Path
    config: dict
    rows: list[dict]
    lock: FileLock | None = None
    warm: bool = False

    @property
    def call_size(self) -> int:
        """Images per call."""
        return call_size(self.config)

    def batch(self, index: int) -> list[dict]:
        """The rows of a call."""
        return self.rows[index * self.call_size : (index + 1) * self.call_size]


def make_config(
    pipe: ARPipeline,
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
    negative_prompt: str | None = None,
    order: str | None = None,
    lora: list[str] | None = None,
    steps: Steps = "captured",
) -> dict:
    """The configuration of a run as stored in config.json, with defaults filled in.

    Args:
        rows: the manifest.
        model: the name that `pipe` was loaded by.
        source: where the rows come from, see `make_manifest`.
        decoding: as `parse_decoding` reads it; by default the pipeline's.
        sampling: guidance_scale, temperature, top_k, top_p, min_p, num_inference_steps and decoder_guidance_scale that
            override the checkpoint's.
        negative_prompt: one for all images, for models that take one.
        order: order of the tokens, for models that take one; by default the pipeline's.
        lora: the adapters that were loaded, each FILE[:SCALE].
        steps: how steps run, on which rounding depends; the default is not stored.

    Raises:
        ValueError: if the pipeline cannot generate the last row with these settings, or reads fewer references.
    """
    check_references(pipe, model, rows)
    if "class_label" in rows[0] and pipe.num_classes is None:
        raise ValueError(f"{model} generates from text and takes no class_labels: give --prompts")
    sampling = supported(pipe, model, sampling or {})
    optional = supported(pipe, model, {"negative_prompt": negative_prompt, "order": order})
    if "image" in rows[0] and pipe.reference_guidance_scale is not None:
        sampling.setdefault("guidance_scale", pipe.reference_guidance_scale)
    pipe.sampling(**sampling)
    if decoding is None:
        settings, decoding = decoding_to_dict(pipe.decoding), decoding_to_text(pipe.decoding)
    else:
        asked = sampling if order is None else {**sampling, "order": order}
        chosen, _ = choose_decodings(pipe, condition(rows[-1:]), [decoding], asked)
        settings = decoding_to_dict(chosen[decoding])
    if pipe.abilities.accepts("order"):
        optional.setdefault("order", pipe.order)
    pipe.prepare(**condition(rows[-1:]), **optional, **sampling, height=height, width=width)
    return {
        "model": model,
        **({"lora": [adapter_text(text) for text in lora]} if lora else {}),
        "weights": weights_digest(pipe),
        "decoding_name": decoding,
        "decoding": settings,
        "sampling": {**pipe.generation_config, **sampling},
        "source": source,
        "manifest": manifest_digest(rows),
        "images": len(rows),
        **({"prompts": len(rows) // source["per_prompt"]} if "per_prompt" in source else {}),
        "seed": seed,
        "batch_size": batch_size,
        "call_size": batch_size * min(max(len(rows) // (batch_size * CALLS), 1), BATCHES),
        "height": height,
        "width": width,
        **optional,
        "dtype": dtype_name(pipe),
        **({} if steps == "captured" else {"steps": steps}),
        "machine": machine(pipe._execution_device),
    }


def condition(rows: list[dict]) -> dict[str, list]:
    """The pipeline's arguments with the prompts and references, or the classes, of `rows`."""
    if "class_label" in rows[0]:
        return {"class_labels": [row["class_label"] for row in rows]}
    prompts = {"prompt": [row["prompt"] for row in rows]}
    if "image" not in rows[0]:
        return prompts
    # Pipelines encode an image once that several prompts share.
    images = {path: read_image(Path(path)) for row in rows for path in row["image"]}
    return {**prompts, "image": [[images[path] for path in row["image"]] for row in rows]}


def check_references(pipe: ARPipeline, model: str, rows: list[dict]) -> None:
    """Refuse prompts with references that the model does not read."""
    most, found = pipe.abilities.max_references, max(len(row.get("image", ())) for row in rows)
    if found > most:
        raise ValueError(
            f"{model} reads {most or 'no'} reference images, and a prompt has {found}: "
            + (f"give at most {most}" if most else "give prompts without image, or a model that edits by references")
        )


def arguments(config: dict, rows: list[dict]) -> dict:
    """The arguments of the pipeline's call that generates `rows` of a run."""
    return {
        **condition(rows),
        **{name: config[name] for name in ("negative_prompt", "order") if name in config},
        **config["sampling"],
        "height": config["height"],
        "width": config["width"],
        "generator": [torch.Generator().manual_seed(row["seed"]) for row in rows],
        "decoding": decoding_from_dict(config["decoding"]),
    }


def weights_digest(pipe: ARPipeline, without: tuple[str, ...] = ()) -> str:
    """SHA-256 of about 256 values of every weight tensor: fast, and different for weights of another training. All
    values of adapters and their scales count, since adapters are small and may differ from others in little.

    Args:
        without: names of components that are left out.
    """
    digest = hashlib.sha256()
    for component, module in sorted(pipe.components.items()):
        if component in without or not isinstance(module, nn.Module):
            continue
        for name, value in module.state_dict().items():
            stride = 1 if ".lora_" in name else value.numel() // 256 + 1
            some = value.flatten()[::stride].contiguous().cpu()
            digest.update(f"{component}.{name}".encode() + some.view(torch.uint8).numpy().tobytes())
        for name, layer in module.named_modules():
            # The scale of each adapter of a layer of peft, with its alpha.
            if isinstance(scales := getattr(layer, "scaling", None), dict):
                digest.update(f"{component}.{name}.{sorted(scales.items())}".encode())
    return digest.hexdigest()


def prepare(config: dict, rows: list[dict], folder: Path, rank: int = 0) -> Run:
    """Start a run in `folder`, or resume the one that is there. The processes of one run call this one after another,
    rank 0 first; only rank 0 locks the folder.

    Raises:
        ValueError: if another command uses the folder, or it holds images without a run, or a run with another
            configuration or manifest.
        OSError: if the folder cannot be written.
    """
    config = json.loads(json.dumps(config))
    lock = None
    with space_in(folder):
        if rank == 0:
            new = not (folder / CONFIG).exists()
            if new and (folder / IMAGES).is_dir() and any((folder / IMAGES).iterdir()):
                raise ValueError(f"{folder / IMAGES} holds images but {folder} has no {CONFIG}: give another --out")
            folder.mkdir(parents=True, exist_ok=True)
            lock = hold(folder)
            for name in (CONFIG, MANIFEST, f"{IMAGES}/*.png"):
                remove_leftovers(folder / name)
            if new:
                write_whole(folder / MANIFEST, lambda file: file.write_bytes(to_lines(rows)))
                write_json(folder / CONFIG, config)
            (folder / IMAGES).mkdir(exist_ok=True)
            (folder / RESULTS).mkdir(exist_ok=True)
    check_resumed(config, rows, folder)
    return open_run(folder, lock)


def check_resumed(config: dict, rows: list[dict], folder: Path) -> None:
    """Refuse a run in `folder` that has another configuration or manifest."""
    old = read_config(folder)
    # A run keeps its number of threads.
    machine = {**config["machine"], "threads": old["machine"]["threads"]}
    # The digest of the manifest and its number of prompts are not compared, since the comparison of its rows names the
    # image that differs; nor is the size of calls, since a run of an earlier version keeps its own.
    same = {"manifest": None, "prompts": None, "call_size": call_size(old)}
    check_same(folder / CONFIG, old | same, config | same | {"machine": machine})
    before, after = ({f"image {row['id']}": row for row in some} for some in (read_rows(folder), rows))
    check_same(folder / MANIFEST, before, after)


def open_run(folder: Path, lock: FileLock | None = None) -> Run:
    """The run in `folder`."""
    return Run(folder, read_config(folder), read_rows(folder), lock)


def missing_batches(run: Run) -> list[int]:
    """The indices of calls with a missing or damaged image or result."""
    finished = read_results(run.folder)
    return sorted({row["id"] // run.call_size for row in run.rows if row["id"] not in finished})


@contextlib.contextmanager
def _threads(count: int):
    # Rounding depends on their number.
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def generate_images(run: Run, pipe: ARPipeline, index: int) -> list[dict]:
    """Generate the images of a call and write them.

    Returns:
        One row per image: id, batch (the index of the call), batch_size (images in this call), seconds (of the call:
        prefill, decoding and pixels), passes (forward passes that decided a token of the image), batch_passes (forward
        passes of the call), head_calls (sequential calls of the denoising head, for a model of continuous tokens),
        stages (the seconds of each stage, with a diffusion decoder), tokens_per_pass (of the image), exact, steps (how
        they ran, see `DecodingStats`), peak_memory in MiB (of the GPU, or of the process; None where the system does
        not report it), warm (False for the first call of a run in a process, which includes one-time setup), sha256
        (of the file).
    """
    rows, config = run.batch(index), run.config
    # A benchmark may ask for captions that the model does not know: the scores show it.
    pipe = quiet(pipe)
    reset_peak_memory(pipe._execution_device)
    with _threads(config["machine"]["threads"]):
        output = pipe(**arguments(config, rows), batch_size=config["batch_size"])
    stats = output.stats
    passes = (stats.accepted > 0).sum(0)
    common = {
        "batch": index,
        "batch_size": len(rows),
        "seconds": stats.prefill_seconds + stats.decode_seconds + stats.tokenizer_seconds,
        "batch_passes": stats.forward_passes,
        **({"head_calls": stats.head_calls} if stats.head_calls else {}),
        **({"stages": stats.seconds} if stats.decoder_steps else {}),
        "exact": stats.exact,
        "steps": stats.steps,
        "peak_memory": next(iter(peak_memory(pipe._execution_device)), None),
        "warm": run.warm,
    }
    run.warm = True
    digests = []
    with space_in(run.folder):
        for row, image in zip(rows, output.frames if pipe.abilities.generates_video else output.images, strict=True):
            # An animated PNG keeps every pixel, and programs that expect an image read its first frame.
            first, *others = image if pipe.abilities.generates_video else [image]
            png = io.BytesIO()
            first.save(png, "PNG", **({"save_all": True, "append_images": others} if others else {}))
            write_whole(run.folder / row["path"], lambda file, png=png: file.write_bytes(png.getvalue()))
            digests.append(hashlib.sha256(png.getvalue()).hexdigest())
    own = zip(rows, passes.tolist(), (stats.accepted.sum(0) / passes).tolist(), digests, strict=True)
    return [
        {"id": row["id"], **common, "passes": count, "tokens_per_pass": tokens, "sha256": digest}
        for row, count, tokens, digest in own
    ]


def record(run: Run, results: list[dict], rank: int = 0) -> None:
    """Append rows from `generate_images` to the file of this process, all of them or none."""
    with space_in(run.folder):
        append(run.folder / RESULTS / f"rank-{rank:05d}.jsonl", results)


def generate_batch(run: Run, pipe: ARPipeline, index: int, rank: int = 0) -> None:
    """Generate the images of a call and record their results."""
    record(run, generate_images(run, pipe, index), rank)


def generate(run: Run, pipe: ARPipeline, batches: list[int] | None = None, rank: int = 0) -> None:
    """Generate the calls `batches`, by default all missing ones. Rank 0 shows the progress of all processes, and after
    its first call without one-time setup how long the others take."""

    def finished() -> int:
        return sum(name.endswith(".png") for name in os.listdir(run.folder / IMAGES))

    batches = missing_batches(run) if batches is None else batches
    told = rank > 0
    with progress_bar(
        total=len(run.rows), initial=finished(), unit="image", desc=run.folder.name, disable=rank > 0
    ) as progress:
        for number, index in enumerate(batches, 1):
            timed, began = run.warm, time.perf_counter()
            generate_batch(run, pipe, index, rank)
            progress.update(finished() - progress.n)
            if timed and not told:
                tell_left(progress, (time.perf_counter() - began) * (len(batches) - number))
                told = True


def join_processes(device: str | None) -> PartialState:
    """Join the processes that torchrun or `accelerate launch` started, if there are any."""
    launched = os.environ.get("WORLD_SIZE", "1")
    try:
        state = PartialState(cpu=device == "cpu" or not torch.cuda.is_available())
        joined = f"this process has joined a group of {state.num_processes}"
    # What accelerate raises if the variables of a launcher are incomplete or no numbers.
    except (ValueError, KeyError) as error:
        state, joined = None, f"this process cannot join a group ({error})"
    if state is None or launched != str(state.num_processes):
        raise ValueError(
            f"the launcher says WORLD_SIZE={launched}, but {joined}: start the command with torchrun or "
            "`accelerate launch --multi_gpu`, or unset WORLD_SIZE, RANK and LOCAL_RANK"
        )
    return state


def generate_by_processes(pipe: ARPipeline, config: dict, rows: list[dict], folder: Path, state: PartialState) -> None:
    """Prepare the run and generate this process's share of the missing calls. See `prepare` for the errors."""
    rank, world = state.process_index, state.num_processes
    with state.main_process_first():
        run = prepare(config, rows, folder, rank)
    batches = missing_batches(run)[rank::world]
    # No process starts before all have seen what is missing.
    state.wait_for_everyone()
    generate(run, pipe, batches, rank)
