"""Calls of a pipeline with one batch and several decodings, which take turns: what `gpu_day.py` measures."""

import torch

from arimage.decoding import Decoding
from arimage.eval.bench.measure import quiet, take
from arimage.eval.bench.memory import peak_memory, reset_peak_memory
from arimage.pipelines.base import ARImagePipeline


def measure(
    pipe: ARImagePipeline,
    condition: dict[str, list],
    decodings: dict[str, Decoding],
    *,
    batch_size: int,
    runs: int,
    seed: int,
) -> list[dict]:
    """Measure decodings in `runs` calls with different seeds. The decodings take turns.

    Args:
        condition: the pipeline's argument "prompt" or "class_labels" with its values, cycled to fill a batch.
        decodings: what to measure, by the name of its row.

    Returns:
        One row per decoding: its name, and for each run: passes (forward passes that decided a token of the image,
        mean over the batch), batch_passes, tokens_per_pass (of an image), seconds (prefill, decoding and pixels, but
        not those of a diffusion decoder), and peak_memory in MiB (of the GPU, or of the process; empty where the
        system does not report it).
    """
    batch = take(condition, 0, batch_size)
    pipe = quiet(pipe)
    device = pipe._execution_device
    # A diffusion decoder takes as long after any decoding of the tokens.
    output_type = "pt" if pipe.abilities.decodes_quickly else "latent"
    figures = "passes", "batch_passes", "tokens_per_pass", "seconds", "peak_memory"
    rows = [{"decoding": name, **{figure: [] for figure in figures}} for name in decodings]
    # The first call of each decoding is not timed: it includes one-time setup. Two on a CUDA device, see
    # `ARPipeline.capture`.
    untimed = 2 if device.type == "cuda" else 1
    for run in range(-untimed, runs):
        for row, decoding in zip(rows, decodings.values(), strict=True):
            generator = torch.Generator().manual_seed(seed + run)
            reset_peak_memory(device)
            stats = pipe(**batch, decoding=decoding, generator=generator, output_type=output_type).stats
            if run < 0:
                continue
            passes = float((stats.accepted > 0).sum(0).float().mean())
            row["passes"].append(passes)
            row["batch_passes"].append(stats.forward_passes)
            row["tokens_per_pass"].append(float(stats.accepted.sum(0).float().mean()) / passes)
            row["seconds"].append(stats.prefill_seconds + stats.decode_seconds + stats.tokenizer_seconds)
            row["peak_memory"] += peak_memory(device)
    return rows
