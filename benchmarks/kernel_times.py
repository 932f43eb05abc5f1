"""The kernels on a GPU: Triton against the definition in torch, and against the time that its bytes take to copy.

Medians and, in brackets, the 10th and 90th percentile, with a cold L2 cache. `floor` is what the kernel must at least
read and write, over the bandwidth of a copy measured first.

python benchmarks/kernel_times.py --batch 4 --window 64 --vocab-size 16384
"""

import argparse
import importlib

import torch
import torch.nn.functional as F


def cases(batch: int, window: int, vocab_size: int, device: str) -> list[tuple]:
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
    neighbours = torch.randint(vocab_size, (vocab_size, 1000), generator=generator, device=device, dtype=torch.int32)
    codebook = F.normalize(normal(vocab_size, 8), dim=-1)
    latents = F.normalize(normal(batch * 1024, 8), dim=-1)
    images = normal(1, 128, 256, 256).bfloat16().to(memory_format=torch.channels_last)
    channels = normal(128).bfloat16()
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
        ("coupling", "sample", (p, noise[..., 1].contiguous()), p.nbytes),
        ("coupling", "couple_window", (p, q, x, noise, live), 8 * vocab_size * rejected),
        ("neighbours", "neighbour_mass", (p, x, neighbours, torch.full_like(noise[..., 0], 0.1)), 8 * 1000 * drafts),
        ("codebook", "nearest_code", (latents, codebook), latents.nbytes + codebook.nbytes + 8 * len(latents)),
        ("group_norm", "group_norm_silu", (images, 32, channels, channels, 1e-6), 2 * images.nbytes),
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
        raise SystemExit("there is no CUDA GPU here: run this benchmark on a machine that has one")

    from triton.testing import do_bench

    def measured(function, *inputs) -> list[float]:
        """Median, 10th and 90th percentile in microseconds."""
        return [1000 * t for t in do_bench(lambda: function(*inputs), quantiles=[0.5, 0.1, 0.9])]

    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    bandwidth = 2 * source.nbytes / measured(torch.empty_like(source).copy_, source)[0]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copies at {bandwidth / 1e6:.2f} TB/s\n")
    print("| operation | arguments | torch, µs | Triton, µs | floor, µs |\n| --- | --- | --- | --- | --- |")
    for operation, function, inputs, bytes_moved in cases(
        arguments.batch, arguments.window, arguments.vocab_size, "cuda"
    ):
        times = []
        for form in ("reference", "triton"):
            module = importlib.import_module(f"arimage.kernels.{operation}.{form}")
            median, low, high = measured(getattr(module, function), *inputs)
            times.append(f"{median:.1f} ({low:.1f}-{high:.1f})")
        floor = f"{bytes_moved / bandwidth:.1f}"
        print(f"| {function} | {described(inputs)} | {' | '.join(times)} | {floor} |", flush=True)


if __name__ == "__main__":
    main()
