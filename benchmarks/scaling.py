"""How a step of LlamaGen scales with the images at a time, the window and the grid, next to the least that it must
take here.

Random weights of a published size, guided. The floor of a step is the longer of two times: to copy the bytes of its
weights and of the keys and values of half of the image, and to multiply its matrices, at the rates that this machine
reached in the same run. Steps are timed by whole images, or by their first --steps steps. Random weights do not tell
how many steps a window saves.

python benchmarks/scaling.py --size b --batch-size 1 4 --window 8 16 32 64 --grid 16 24 --out scaling.png
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from side_by_side import Run, add_sampling, begin, cases, in_turn, make_parser, run_steps, sampling_of, spread

from arimage.decoding import AutoregressiveDecoding, Layout, SpeculativeJacobiDecoding
from arimage.pipelines.llamagen.transformer_llamagen import LlamaGenTokenModel, LlamaGenTransformer


SIZES = {
    "b": {"hidden_size": 768, "intermediate_size": 2048, "num_layers": 12, "num_attention_heads": 12},
    "l": {"hidden_size": 1024, "intermediate_size": 2816, "num_layers": 24, "num_attention_heads": 16},
    "xl": {"hidden_size": 1280, "intermediate_size": 3584, "num_layers": 36, "num_attention_heads": 20},
}
BRANCHES = 2


class Point(NamedTuple):
    """The runs of one decoding, and the milliseconds that its step must at least take: for its bytes, for its
    products."""

    title: str
    batch: int
    window: int
    runs: list[Run]
    floors: tuple[float, float]

    @property
    def milliseconds(self) -> list[float]:
        return [1000 * run.wall for run in self.runs]


def fastest(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of several calls."""

    def once() -> int:
        call()
        return 1

    return min(run.wall for run in in_turn({"": once}, 7, device)[""])


def bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written, of a copy that no cache holds."""
    source = torch.ones(1 << 28, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / fastest(lambda: target.copy_(source), device)


def peak(dtype: torch.dtype, device: torch.device) -> float:
    """Operations per second of a product of large matrices."""
    side = 8192 if device.type == "cuda" else 2048
    left, right = torch.ones(2, side, side, dtype=dtype, device=device)
    forms = [lambda: left @ right]
    if device.type == "cpu":
        # float32 products reach a fraction of it in MKL on some CPUs.
        forms.append(lambda: torch.ops.mkldnn._linear_pointwise(left, right, None, "none", [], ""))
    return 2 * side**3 / min(fastest(form, device) for form in forms)


def floors(network: LlamaGenTransformer, rows: int, queries: int, tokens: int, rates: tuple) -> tuple[float, float]:
    """Milliseconds of a step with `queries` queries in each of `rows` rows, which attend to `tokens` tokens, at these
    bytes and operations per second."""
    weights = sum(p.numel() for name, p in network.named_parameters() if "embedding" not in name)
    states = 2 * network.config.num_layers * network.config.hidden_size * tokens
    moved = network.head.weight.itemsize * (weights + rows * states)
    return 1000 * moved / rates[0], 1000 * 2 * rows * queries * (weights + states) / rates[1]


def measure(
    network: LlamaGenTransformer, title: str, batch: int, rates: tuple, arguments: argparse.Namespace
) -> list[Point]:
    """The points of one table: `ar` and every window, in turn."""
    device, side, sampling = network.device, network.config.grid_size, sampling_of(arguments)

    def bind() -> LlamaGenTokenModel:
        condition = {"class_labels": 7 * torch.arange(batch, device=device)}
        return LlamaGenTokenModel(network, condition, Layout((side, side)), guided=True)

    steps = arguments.steps or side**2
    decodings = {1: AutoregressiveDecoding(), **{w: SpeculativeJacobiDecoding(window=w) for w in arguments.window}}
    calls = {w: partial(run_steps, bind, decoding, sampling, batch, steps) for w, decoding in decodings.items()}
    runs = in_turn(calls, arguments.repeats, device)
    return [
        Point(title, batch, w, runs[w], floors(network, BRANCHES * batch, w, side**2 // 2, rates)) for w in decodings
    ]


def draw(points: list[Point], out: str) -> None:
    """One panel per dtype and grid, one line per batch size, and the floor of each below it."""
    from matplotlib import pyplot

    titles = list(dict.fromkeys(point.title for point in points))
    figure, axes = pyplot.subplots(1, len(titles), figsize=(5 * len(titles), 4), squeeze=False)
    for axis, title in zip(axes[0], titles, strict=True):
        panel = [point for point in points if point.title == title]
        for i, batch in enumerate(dict.fromkeys(point.batch for point in panel)):
            line = [point for point in panel if point.batch == batch]
            windows, middles = [p.window for p in line], [statistics.median(p.milliseconds) for p in line]
            ranges = [[m - min(p.milliseconds), max(p.milliseconds) - m] for p, m in zip(line, middles, strict=True)]
            bars = list(zip(*ranges, strict=True))
            axis.errorbar(windows, middles, bars, color=f"C{i}", marker="o", label=f"batch {batch}")
            axis.plot(windows, [max(p.floors) for p in line], f"C{i}--", label=f"batch {batch}, floor")
        axis.set(title=title, xlabel="window (1 is ar)", ylabel="ms per step", xscale="log", yscale="log")
        axis.set_xticks(windows, map(str, windows), minor=False)
        axis.legend()
    figure.tight_layout()
    figure.savefig(out, dpi=150)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--size", choices=SIZES, default="b")
    parser.add_argument("--window", nargs="+", type=int, default=[8, 16, 32, 64], help="of sjd-coupled")
    parser.add_argument("--grid", nargs="+", type=int, default=[16], help="tokens along each side of the image")
    parser.add_argument("--steps", type=int, help="timed steps of each call; by default those of a whole image")
    parser.add_argument("--out", help="image file for the plot; needs matplotlib")
    add_sampling(parser, guidance_scale=4.0, top_k=2000)
    arguments = parser.parse_args()
    if arguments.guidance_scale <= 1:
        parser.error("--guidance-scale is at most 1: give more, the floors are those of guided steps")
    device, points = begin(arguments), []
    copied = bandwidth(device)
    rates_of = {dtype: (copied, peak(dtype, device)) for dtype in dict(cases(arguments))}
    for dtype, rates in rates_of.items():
        print(f"{dtype}: copies at {rates[0] / 1e9:.1f} GB/s, products at {rates[1] / 1e9:.0f} GFLOP/s")
    for side in arguments.grid:
        for dtype, batch in cases(arguments):
            torch.manual_seed(0)
            network = LlamaGenTransformer(grid_size=side, **SIZES[arguments.size]).to(device, dtype).eval()
            title = f"LlamaGen-{arguments.size.upper()}, {side}x{side} tokens, {dtype}"
            print(f"\n{title}, {batch} images")
            print("| window | steps | ms per step, wall | CPU | floor: bytes | products | wall / floor | wall / ar |")
            print("|---:|---:|---:|---:|---:|---:|---:|---:|")
            table = measure(network, title, batch, rates_of[dtype], arguments)
            for point in table:
                of_ar = [run.wall / ar.wall for run, ar in zip(point.runs, table[0].runs, strict=True)]
                cells = [str(point.window), f"{statistics.median(run.units for run in point.runs):.0f}"]
                cells += [spread(point.milliseconds), spread([1000 * run.cpu for run in point.runs])]
                cells += [f"{floor:.1f}" for floor in point.floors]
                cells += [spread([value / max(point.floors) for value in point.milliseconds], 2), spread(of_ar, 2)]
                print(f"| {' | '.join(cells)} |", flush=True)
            points += table
    if arguments.out:
        draw(points, arguments.out)


if __name__ == "__main__":
    main()
