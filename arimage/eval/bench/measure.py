"""Chooses the decodings that run on a pipeline, and measures their forward passes, seconds and memory in turn."""

import copy
import dataclasses
import platform
from typing import TypeVar

import torch
from tqdm import tqdm

from ... import __version__
from ...decoding import Decoding, decoding_names, decoding_to_dict, parse_decoding
from ...decoding.presets import needs_of_preset
from ...kernels.timings import device_name
from ...pipelines.base import ARImagePipeline, ARPipeline
from .memory import peak_memory, reset_peak_memory
from .tables import FIGURES


P = TypeVar("P", bound=ARPipeline)


def choose_decodings(
    pipe: ARImagePipeline, condition: dict[str, list], texts: list[str], windows: list[int], sampling: dict
) -> tuple[dict[str, Decoding], dict[str, str]]:
    """The decodings to measure, by the text that names each.

    Args:
        texts: decodings as `parse_decoding` reads them; if empty, every preset that runs on the model of `pipe`.
        windows: a decoding whose window is not set in its text is measured with each of these.

    Returns:
        The decodings, and the reason why each other preset was left out.

    Raises:
        ValueError: if one of `texts` is not a decoding or does not run on the model, or if no preset does.
    """
    model = pipe.prepare(**take(condition, 0, 1), **sampling).model
    chosen, left_out = {}, {}
    for text in texts or decoding_names():
        variants = _variants(pipe, text, windows)
        reason = next(filter(None, (decoding.supports(model) for decoding in variants.values())), None)
        if reason is None:
            chosen |= variants
        elif texts:
            raise ValueError(f"{text}: {reason}")
        # Those of other kinds of model are expected.
        elif model.kind in needs_of_preset(text):
            left_out[text] = reason
    if not chosen:
        raise ValueError(f"no decoding runs on this model: {'; '.join(left_out.values())}")
    return chosen, left_out


def _variants(pipe: ARImagePipeline, text: str, windows: list[int]) -> dict[str, Decoding]:
    decoding, (_, settings) = pipe.as_decoding(text), parse_decoding(text)
    if not windows or "window" not in decoding.__dataclass_fields__ or "window" in settings:
        return {text: decoding}
    separator = "," if settings else ":"
    return {f"{text}{separator}window={window}": dataclasses.replace(decoding, window=window) for window in windows}


def measure(
    pipe: ARImagePipeline,
    condition: dict[str, list],
    decodings: dict[str, Decoding],
    *,
    batch_size: int,
    runs: int,
    seed: int,
    sampling: dict | None = None,
    orders: dict[str, dict] | None = None,
) -> list[dict]:
    """Measure decodings in `runs` calls with different seeds. The decodings take turns.

    Args:
        condition: the pipeline's argument "prompt" or "class_labels" with its values, cycled to fill a batch.
        decodings: what to measure, by the name of its row.
        sampling: arguments of `pipe.sampling` that override the checkpoint's.
        orders: the pipeline's argument "order", by the name of the row.

    Returns:
        One row per decoding: its name, settings and sampling, steps (how they ran, see `DecodingStats`), and for each
        run: passes (forward passes that decided a token of the image, mean over the batch), batch_passes,
        tokens_per_pass (of an image), seconds (prefill, decoding and pixels, but not those of a diffusion decoder),
        images_per_second, speedup (over the first decoding in the same run), and peak_memory in MiB (of the GPU, or of
        the process; empty where the system does not report it). For a model of continuous tokens also head_calls
        (sequential calls of the denoising head).

    Raises:
        ValueError: if batch_size or runs is less than 1.
    """
    if min(batch_size, runs) < 1:
        raise ValueError(f"batch_size and runs are {batch_size} and {runs}: give at least 1 for both")
    sampling = sampling or {}
    batch = take(condition, 0, batch_size)
    pipe = quiet(pipe)
    device = pipe._execution_device
    # A diffusion decoder takes as long after any decoding of the tokens.
    output_type = "pt" if pipe.abilities.decodes_quickly else "latent"
    rows = [
        {
            "decoding": name,
            "settings": decoding_to_dict(decoding),
            "exact": decoding.exact,
            "batch_size": batch_size,
            "sampling": {**pipe.generation_config, **sampling},
            **{figure: [] for figure in FIGURES},
        }
        for name, decoding in decodings.items()
    ]
    # The first call of each decoding is not timed: it includes one-time setup. Two on a CUDA device, see
    # `ARPipeline.capture`.
    untimed = 2 if device.type == "cuda" else 1
    for run in tqdm(range(-untimed, runs), desc=f"batch {batch_size}", unit="run", disable=None, leave=False):
        for row, (name, decoding) in zip(rows, decodings.items(), strict=True):
            order = (orders or {}).get(name, {})
            generator = torch.Generator().manual_seed(seed + run)
            reset_peak_memory(device)
            output = pipe(
                **batch, **sampling, **order, decoding=decoding, generator=generator, output_type=output_type
            )
            if run < 0:
                continue
            stats = output.stats
            passes = float((stats.accepted > 0).sum(0).float().mean())
            seconds = stats.prefill_seconds + stats.decode_seconds + stats.tokenizer_seconds
            row["steps"] = stats.steps
            row["passes"].append(passes)
            row["batch_passes"].append(stats.forward_passes)
            if stats.head_calls:
                row.setdefault("head_calls", []).append(stats.head_calls)
            row["tokens_per_pass"].append(float(stats.accepted.sum(0).float().mean()) / passes)
            row["seconds"].append(seconds)
            row["images_per_second"].append(batch_size / seconds)
            row["speedup"].append(rows[0]["seconds"][run] / seconds)
            row["peak_memory"] += peak_memory(device)
    return rows


def quiet(pipe: P) -> P:
    """A copy of a pipeline, with the same components, that shows no progress and does not warn of unknown captions."""
    pipe = copy.copy(pipe)
    pipe.set_progress_bar_config(disable=True)
    pipe.known_captions = None
    return pipe


def machine(device: torch.device) -> dict:
    """The hardware and software that figures were measured on."""
    return {
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "arimage": __version__,
    }


def take(condition: dict[str, list], start: int, count: int) -> dict[str, list]:
    """`count` values of the condition from the `start`-th on, cycling through them."""
    return {name: [values[i % len(values)] for i in range(start, start + count)] for name, values in condition.items()}
