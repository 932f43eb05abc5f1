"""The kernels on a GPU: Triton against the definition in torch, and against the time that its bytes take to copy.

Medians and, in brackets, the 10th and 90th percentile, with a cold L2 cache. `floor` is what the kernel must at least
read and write, over the bandwidth of a copy measured first.

python benchmarks/kernel_times.py --batch 4 --window 64 --vocab-size 16384
"""

import argparse
import importlib
import statistics
import time
from collections.abc import Callable

import torch

from arimage.kernels.operation import DEVICES
from arimage.kernels.siblings import sample_siblings


def measured(call: Callable[[], object], device: torch.device) -> tuple[float, float, float]:
    """Median, 10th and 90th percentile in microseconds; on a CPU median, minimum and maximum of three."""
    if device.type == "cuda":
        from triton.testing import do_bench

        median, low, high = (1000 * t for t in do_bench(call, quantiles=[0.5, 0.1, 0.9]))
        return median, low, high
    times = []
    for _ in range(3):
        start = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times), min(times), max(times)


def bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written, of a copy that no cache of a GPU holds."""
    source = torch.ones(1 << 30 if device.type == "cuda" else 1 << 24, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2e6 * source.nbytes / measured(lambda: target.copy_(source), device)[0]


def product_rate(device: torch.device) -> float:
    """Operations per second, two per product and sum, of a matrix product in bfloat16 that fills a GPU."""
    side = 8192 if device.type == "cuda" else 256
    left, right = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    return 2e6 * side**3 / measured(lambda: left @ right, device)[0]


def form(operation: str, function: str, name: str) -> Callable:
    """An operation in the form "reference", its definition in torch, or "triton"."""
    call = getattr(importlib.import_module(f"arimage.kernels.{operation}"), function)

    def defined(*inputs):
        devices = set(DEVICES)
        DEVICES.clear()
        try:
            return call(*inputs)
        finally:
            DEVICES.update(devices)

    return call if name == "triton" else defined


def cases(batch: int, window: int, vocab_size: int, device: torch.device, side: int = 256) -> list[tuple]:
    """Operation, function, arguments and the bytes that it must move, of every kernel."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device=device)

    def uniform(*shape):
        return torch.rand(shape, generator=generator, device=device)

    drafts = batch * window
    logits = (3 * normal(2, batch, window, vocab_size)).bfloat16()
    p = (3 * normal(batch, window, vocab_size)).softmax(-1)
    # About half of the drafts are accepted: 1 minus the total variation of p and q.
    q = (p + p.roll(1, -1)) / 2
    x = q.flatten(0, 1).multinomial(1, generator=generator).view(batch, window)
    live = torch.ones_like(x, dtype=torch.bool)
    noise = uniform(batch, window, 2)
    kept = noise[..., 0] * q.gather(-1, x[..., None])[..., 0] < p.gather(-1, x[..., None])[..., 0]
    rejected = int((~kept).sum())
    near = min(1000, vocab_size - 1)
    neighbours = torch.randint(vocab_size, (vocab_size, near), generator=generator, device=device, dtype=torch.int32)
    sibling_noise = uniform(batch, window, 5)
    siblings = sample_siblings(q, sibling_noise[..., :4].contiguous())
    first = siblings[..., :1]
    refused = sibling_noise[..., :1] * q.gather(-1, first) >= p.gather(-1, first)
    # A tokenizer's last level: `side` pixels per side, and three times as many.
    images, large = (
        normal(1, 128, k * side, k * side).bfloat16().to(memory_format=torch.channels_last) for k in (1, 3)
    )
    channels = normal(128).bfloat16()
    states, angles = normal(2 * batch, window, 20, 64).bfloat16(), normal(1, window, 32, 2)
    seeds, steps = torch.arange(batch, device=device), torch.zeros(batch, dtype=torch.long, device=device)
    rows = torch.full((batch,), 4.0, device=device), torch.ones(batch, device=device), steps + 2000, steps + 0.95
    probabilities_bytes = logits.nbytes + p.nbytes
    return [
        ("probabilities", "probabilities", (logits, 4.0, 1.0, 0, 1.0, None), probabilities_bytes),
        ("probabilities", "probabilities", (logits, 4.0, 1.0, 2000, 1.0, None), probabilities_bytes),
        ("probabilities", "probabilities", (logits, 4.0, 1.0, 2000, 0.95, None), probabilities_bytes),
        ("probabilities", "probabilities", (logits, *rows, None), probabilities_bytes),
        ("noise", "uniforms", (seeds, x, steps, 1, 2), 8 * drafts),
        ("noise", "exponentials", (seeds, x, steps, 4, vocab_size), p.nbytes),
        ("noise", "normals", (seeds, x, steps, 8, 16), 64 * drafts),
        ("coupling", "sample", (p, noise[..., 1].contiguous()), p.nbytes),
        ("coupling", "couple", (p, q, x, noise), 8 * vocab_size * rejected),
        ("coupling", "couple_window", (p, q, x, noise, live), 8 * vocab_size * rejected),
        ("siblings", "sample_siblings", (q, sibling_noise[..., :4].contiguous(), None), q.nbytes),
        ("siblings", "couple_siblings", (p, q, siblings, sibling_noise), 8 * vocab_size * int(refused.sum())),
        ("neighbours", "neighbour_mass", (p, x, neighbours, torch.full_like(noise[..., 0], 0.1)), 8 * near * drafts),
        ("rotary", "rotate", (states, angles), 2 * states.nbytes + angles.nbytes),
        ("group_norm", "group_norm_silu", (images, 32, channels, channels, 1e-6), 2 * images.nbytes),
        ("group_norm", "group_norm_silu", (large, 32, channels, channels, 1e-6), 2 * large.nbytes),
    ]


def described(arguments: tuple) -> str:
    return ", ".join("x".join(map(str, a.shape)) if isinstance(a, torch.Tensor) else str(a) for a in arguments)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--window", type=int, default=64)
    parser.add_argument("--vocab-size", type=int, default=16384)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA GPU was found: run this benchmark on a machine that has one")

    device = torch.device("cuda")
    rate = bandwidth(device)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copies at {rate / 1e12:.2f} TB/s\n")
    print("| operation | arguments | torch, µs | Triton, µs | floor, µs |\n| --- | --- | --- | --- | --- |")
    sizes = arguments.batch, arguments.window, arguments.vocab_size
    for operation, function, inputs, bytes_moved in cases(*sizes, device):
        times = []
        for name in ("reference", "triton"):
            kernel = form(operation, function, name)
            median, low, high = measured(lambda kernel=kernel, inputs=inputs: kernel(*inputs), device)
            times.append(f"{median:.1f} ({low:.1f}-{high:.1f})")
        floor = f"{1e6 * bytes_moved / rate:.1f}"
        print(f"| {function} | {described(inputs)} | {' | '.join(times)} | {floor} |", flush=True)


if __name__ == "__main__":
    main()
