"""Products of a few rows on a processor: with weights in bfloat16, by our rule and by `F.linear`, and in int8, as
bytes where the processor multiplies them and converted.

Each shape has as many weights as exceed a cache, like the layers of a model, and all take turns. Times are those of
the CPU. ONEDNN_MAX_CPU_ISA in the environment chooses the instructions, such as AVX512_CORE_BF16 for no AMX.

python benchmarks/int8_rows.py
"""

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from side_by_side import begin, spread
from torch import nn

from arimage.kernels.linear import linear
from arimage.kernels.linear.int8 import describe
from arimage.kernels.step.linear import scaled_product
from arimage.models.quantized import QuantizedLinear


# Of LlamaGen-B, its head last, of Janus-Pro-1B and of the packaged models.
SHAPES = ((2304, 768), (768, 768), (768, 2048), (16384, 768), (5632, 2048), (256, 256))
BYTES = 1 << 27
PAIRS = (("bfloat16", "F.linear"), ("int8", "bfloat16"), ("int8", "F.linear"), ("converted", "F.linear"))


def compare(shape: tuple[int, int], rows: int, repeats: int) -> list[str]:
    """The cells of a row of the table."""
    full = [nn.Linear(shape[1], shape[0], bias=False) for _ in range(BYTES // (4 * shape[0] * shape[1]))][:32]
    layers = [QuantizedLinear(layer, torch.int8) for layer in full]
    weights, scales = [layer.weight.data for layer in layers], [layer.scale for layer in layers]
    wide = [layer.weight.detach().bfloat16() for layer in full]
    x = torch.randn(rows, shape[1]).bfloat16()
    calls: dict[str, Callable[[int], torch.Tensor]] = {
        "F.linear": lambda i: F.linear(x, wide[i]),
        "bfloat16": lambda i: linear(x, wide[i]),
        "int8": lambda i: layers[i](x),
        "converted": lambda i: scaled_product(x, weights[i], scales[i]),
    }
    times = {name: [] for name in calls}
    for repeat in range(-1, repeats):
        for name, call in calls.items():
            start = time.process_time()
            for i in range(len(layers)):
                call(i)
            if repeat >= 0:
                times[name].append(1e6 * (time.process_time() - start) / len(layers))
    ratios = ([a / b for a, b in zip(times[one], times[other], strict=True)] for one, other in PAIRS)
    return [f"{shape[0]} x {shape[1]}", str(rows), spread(times["bfloat16"], 0), *(spread(each, 2) for each in ratios)]


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 8, 16, 64])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.set_defaults(device="cpu")
    arguments = parser.parse_args()
    begin(arguments)
    print(describe())
    columns = ("weight", "rows", "us in bfloat16", *(" / ".join(pair) for pair in PAIRS))
    print(f"\n| {' | '.join(columns)} |\n|---|{'---:|' * (len(columns) - 1)}")
    for shape in SHAPES:
        for rows in arguments.rows:
            print(f"| {' | '.join(compare(shape, rows, arguments.repeats))} |", flush=True)


if __name__ == "__main__":
    main()
