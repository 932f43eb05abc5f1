"""Products of a few rows with weights in int8 on a processor, next to bfloat16: read as they are stored, and converted
first. Where the first takes longer than the second, `MOST_ROWS` of `arimage/kernels.linear.int8.py` ends.

Each shape has as many weights as exceed a cache, like the layers of a model, and the three take turns.
ATEN_CPU_CAPABILITY in the environment chooses the instructions that torch uses.

python benchmarks/int8_rows.py
"""

import argparse
import time

import torch
import torch.nn.functional as F
from side_by_side import begin, spread
from torch import nn

from arimage.kernels.linear.int8 import int8_product, most_rows
from arimage.kernels.step.linear import scaled_product
from arimage.models.quantized import QuantizedLinear


# Of LlamaGen-B, its head last, and of the packaged models.
SHAPES = ((2304, 768), (768, 768), (2048, 768), (768, 2048), (16384, 768), (256, 256))
BYTES = 1 << 27


def compare(shape: tuple[int, int], rows: int, repeats: int) -> list[str]:
    """The cells of a row of the table."""
    full = [nn.Linear(shape[1], shape[0], bias=False) for _ in range(BYTES // (4 * shape[0] * shape[1]))][:32]
    layers = [QuantizedLinear(layer, torch.int8) for layer in full]
    weights = [layer.weight.detach().bfloat16() for layer in full]
    x = torch.randn(rows, shape[1]).bfloat16()
    calls = {
        "bfloat16": lambda _, weight: F.linear(x, weight),
        "stored": lambda layer, _: int8_product(x, layer.weight, layer.scale),
        "converted": lambda layer, _: scaled_product(x, layer.weight, layer.scale),
    }
    times = {name: [] for name in calls}
    for repeat in range(-1, repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            for layer, weight in zip(layers, weights, strict=True):
                call(layer, weight)
            if repeat >= 0:
                times[name].append(1e6 * (time.perf_counter() - start) / len(layers))
    pairs = (("stored", "bfloat16"), ("converted", "bfloat16"), ("stored", "converted"))
    ratios = ([a / b for a, b in zip(times[one], times[other], strict=True)] for one, other in pairs)
    taken = "stored" if rows <= most_rows(shape[0] * shape[1]) else "converted"
    return [
        f"{shape[0]} x {shape[1]}",
        str(rows),
        spread(times["bfloat16"]),
        *(spread(each, 2) for each in ratios),
        taken,
    ]


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 12, 16, 32])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.set_defaults(device="cpu")
    arguments = parser.parse_args()
    begin(arguments)
    print(torch.backends.cpu.get_cpu_capability())
    columns = (
        "weight",
        "rows",
        "us in bfloat16",
        "stored / bfloat16",
        "converted / bfloat16",
        "stored / converted",
        "taken",
    )
    print(f"\n| {' | '.join(columns)} |\n|---|{'---:|' * (len(columns) - 1)}")
    for shape in SHAPES:
        for rows in arguments.rows:
            print(f"| {' | '.join(compare(shape, rows, arguments.repeats))} |", flush=True)


if __name__ == "__main__":
    main()
