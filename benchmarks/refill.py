"""Seconds for many images in three ways, in one process, interleaved:

- batches: one batch after another, each of which runs until its slowest image is finished
- shrinking: the same, but images that are finished leave the batch, as the pipelines do it on a CPU
- rows: one call with `batch_size`, where other images take the rows of finished ones

python benchmarks/refill.py --images 64 --rows 8 --decoding sjd-coupled
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch

from arimage import AutoPipeline
from arimage.decoding import decode, decoding_from_text
from arimage.eval.runs.prompts import prompt_file, read_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="emoji-llamagen")
    parser.add_argument("--decoding", default="sjd-coupled", help="a name with settings, as in sjd-coupled:window=16")
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    arguments = parser.parse_args()
    size, decoding = arguments.rows, decoding_from_text(arguments.decoding)
    pipe = AutoPipeline.from_pretrained(arguments.model, dtype=getattr(torch, arguments.dtype))
    pipe.set_progress_bar_config(disable=True)
    pipe.decoding = decoding
    prompts = [row["prompt"] for row in read_prompts(prompt_file("emoji"))][: arguments.images]
    parts = [slice(first, first + size) for first in range(0, len(prompts), size)]

    def seeds(part: slice = slice(None)) -> list[torch.Generator]:
        return [torch.Generator().manual_seed(seed) for seed in range(len(prompts))[part]]

    @torch.no_grad()
    def batches() -> int:
        passes = 0
        for part in parts:
            call = pipe.prepare(prompts[part], generator=seeds(part))
            state = decode(call.model, decoding, call.sampling, call.seeds)
            pipe.to_images(call, pipe.decode_tokens(call, state.tokens))
            passes += state.forward_passes
        return passes

    def shrinking() -> int:
        return sum(pipe(prompts[part], generator=seeds(part)).stats.forward_passes for part in parts)

    def rows() -> int:
        return pipe(prompts, batch_size=size, generator=seeds()).stats.forward_passes

    ways: list[Callable[[], int]] = [batches, shrinking, rows]
    found: dict[Callable, list[tuple[float, float]]] = {way: [] for way in ways}
    passes = {}
    pipe(prompts[:1])
    for k in range(arguments.rounds):
        for way in ways[k % 3 :] + ways[: k % 3]:
            began = time.perf_counter(), time.process_time()
            passes[way] = way()
            found[way].append((time.perf_counter() - began[0], time.process_time() - began[1]))
            print(f"round {k + 1}, {way.__name__}: {found[way][-1][0]:.2f} s", file=sys.stderr)
    print(f"{len(prompts)} images, {size} at a time, {arguments.decoding}, {torch.get_num_threads()} threads")
    print(f"{'':12}passes   seconds (range)          of batches   CPU seconds   of batches")
    for way in ways:
        columns = []
        for kind in (0, 1):
            seconds = [row[kind] for row in found[way]]
            # Of the same round, which the machine's other work slows alike.
            gain = statistics.median(
                old[kind] / new[kind] for old, new in zip(found[batches], found[way], strict=True)
            )
            columns.append((statistics.median(seconds), min(seconds), max(seconds), gain))
        wall, cpu = columns
        print(
            f"{way.__name__:12}{passes[way]:6}   {wall[0]:7.2f} ({wall[1]:.2f} to {wall[2]:.2f})   x {wall[3]:.2f}"
            f"       {cpu[0]:7.2f}       x {cpu[3]:.2f}"
        )


if __name__ == "__main__":
    main()
