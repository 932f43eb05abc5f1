"""The part `step` of gpu_day.py: where the time of a captured step of LlamaGen-XL goes, and what its kernels save.

- rates: reads, and the time between two kernels of a graph, with and without programmatic dependent launch
- image: mean milliseconds per step of whole images, with the kernels of PyTorch ("torch"), with ours ("kernels"), and
  with ours without programmatic dependent launch ("no early launch")
- product, attention: every kernel of a layer next to PyTorch's, in a graph whose weights no cache holds
- checks: rows alone against rows in a batch, early launches against none, and NaN after the ends of the rows
- profile: the kernels of one step by name
- compiled: the same images with `torch.compile`
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import kernel_times
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from arimage.decoding import decode, decoding_from_text
from arimage.decoding.run.capture import CompiledSteps
from arimage.kernels.step.attention import attention
from arimage.kernels.step.linear import linear
from arimage.models import step as step_layers


MODEL = "llamagen-xl-384"
DECODINGS = ("ar", "sjd-coupled:window=16", "sjd-coupled:window=32")
# Weights of a chain of products: more than the L2 cache of an H100 holds.
_BYTES = 400 << 20
_ROWS = (2, 16, 32, 64)
FORMS = ("torch", "kernels", "no early launch")


@contextmanager
def form(name: str) -> Iterator[None]:
    """Run steps in one of the `FORMS`."""
    with ExitStack() as stack:
        if name == "torch":
            stack.enter_context(patch.object(step_layers, "ENABLED", False))
        if name == "no early launch":
            # The card before the first that can.
            stack.enter_context(patch.object(torch.cuda, "get_device_capability", lambda *_: (8, 0)))
        yield


def in_graph(calls: list[Callable[[], object]], device: torch.device) -> float:
    """Microseconds per call, of a CUDA graph that makes them all; on a CPU without one."""

    def run() -> None:
        for call in calls:
            call()

    if device.type == "cpu":
        return kernel_times.measured(run, device)[0] / len(calls)
    run()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return kernel_times.measured(graph.replay, device)[0] / len(calls)


def weights(shape: tuple[int, ...], device: torch.device) -> list[torch.Tensor]:
    """So many weights that no cache holds them; a few on a CPU."""
    one = 2 * shape[0] * shape[1]
    count = max(_BYTES // one, 2) if device.type == "cuda" else 2
    return [torch.randn(shape, device=device).bfloat16() / shape[1] ** 0.5 for _ in range(count)]


def layer_shapes(config: Any) -> dict[str, tuple[int, int]]:
    """Rows and columns of the weights of a layer, and of the head."""
    width, hidden = config.hidden_size, config.intermediate_size
    return {
        "qkv": (3 * width, width),
        "out": (width, width),
        "gate and up": (hidden, width),
        "down": (width, hidden),
        "head": (config.vocab_size, width),
    }


def products(day: Any, config: Any) -> None:
    device = day.plan.device

    def run(shape: tuple[int, int], rows: int, gated: bool, kind: str) -> dict:
        x = torch.randn(rows, shape[1], device=device).bfloat16()
        pairs = weights(shape, device)
        if kind == "torch":
            calls = [partial(_gated if gated else F.linear, x, each, *([each] if gated else [])) for each in pairs]
        else:
            ups = [{"up": pairs[i - 1]} if gated else {} for i in range(len(pairs))]
            calls = [partial(linear, x, each, **up) for each, up in zip(pairs, ups, strict=True)]
        with form(kind):
            microseconds = in_graph(calls, device)
        moved = (1 + gated) * pairs[0].nbytes
        return {"us": microseconds, "bytes_per_s": 1e6 * moved / microseconds}

    sizes = _ROWS if device.type == "cuda" else _ROWS[:1]
    for (name, shape), rows, kind in product(layer_shapes(config).items(), sizes, FORMS):
        day.measure(partial(run, shape, rows, name == "gate and up", kind), product=name, rows=rows, form=kind)


def _gated(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def attentions(day: Any, config: Any) -> None:
    device, heads = day.plan.device, config.num_attention_heads
    width = config.hidden_size // heads

    def run(queries: int, keys: int, kind: str) -> dict:
        caches = [torch.randn(2, 2, heads, keys, width, device=device).bfloat16() for _ in range(8)]
        query = torch.randn(2 * queries, heads, width, device=device).bfloat16()
        slots = torch.full((queries,), keys - 2, device=device)
        seen = torch.ones(2, 1, dtype=torch.bool, device=device)
        if kind == "torch":
            mask = torch.zeros(2, 1, queries, keys, device=device, dtype=query.dtype)
            states = query.view(2, queries, heads, width).transpose(1, 2)
            calls = [partial(F.scaled_dot_product_attention, states, *cache, attn_mask=mask) for cache in caches]
        else:
            calls = [partial(attention, query, *cache, seen, 1, 1, slots) for cache in caches]
        with form(kind):
            return {"us": in_graph(calls, device)}

    sizes = product((1, 16, 32), (289, 577)) if device.type == "cuda" else [(1, 17)]
    for (queries, keys), kind in product(sizes, FORMS):
        day.measure(partial(run, queries, keys, kind), attention=f"{queries} queries, {keys} keys", form=kind)


def gaps(day: Any) -> None:
    """Kernels that do nothing, one after another."""
    device = day.plan.device
    x, weight = torch.zeros(1, 64, device=device).bfloat16(), torch.zeros(16, 64, device=device).bfloat16()

    def run(kind: str) -> dict:
        call = partial(F.linear if kind == "torch" else linear, x, weight)
        with form(kind):
            return {"us": in_graph([call] * 200, device)}

    for kind in FORMS:
        day.measure(partial(run, kind), gap="200 products of one row", form=kind)


def reads(day: Any) -> None:
    """Bytes per second of a sum, which writes nothing."""
    size = 4 << 30 if day.plan.device.type == "cuda" else 1 << 20
    numbers = torch.ones(size // 4, device=day.plan.device)
    day.measure(
        lambda: {"bytes_per_s": 1e6 * size / kernel_times.measured(numbers.sum, day.plan.device)[0]}, rate="read"
    )


class Images:
    """Whole images of the model, step by step."""

    def __init__(self, day: Any):
        self.device = day.plan.device
        model = day.plan.models[MODEL]
        with torch.device(self.device):
            self._bind = model.build(model.layers)
            self.config: Any = self._bind(1).networks[0].config

    def decode(self, text: str, batch: int, compiled: CompiledSteps, seed: int = 0) -> Any:
        with torch.device(self.device):
            bound, seeds = self._bind(batch), seed + torch.arange(batch, device=self.device)
            return decode(bound.model, decoding_from_text(text), bound.sampling, seeds, compiled=compiled)

    def timed(self, text: str, batch: int, kind: str, compiles: bool = False) -> dict:
        """Mean milliseconds per step of three images each, after one whose steps are captured."""
        compiled, found, passes = CompiledSteps(compiles=compiles), [], 0
        with form(kind):
            self.decode(text, batch, compiled)
            for seed in range(1, 4):
                begun = self._now()
                passes = self.decode(text, batch, compiled, seed).forward_passes
                found.append(1000 * (self._now() - begun) / passes)
        return {"median_ms": statistics.median(found), "low_ms": min(found), "high_ms": max(found), "passes": passes}

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def early_launches(self) -> dict:
        """Tokens of 1,152 steps with and without early launches, which are the same unless a kernel reads what is not
        written yet."""
        found = []
        for kind in FORMS[1:]:
            with form(kind):
                compiled = CompiledSteps(compiles=False)
                found.append(torch.cat([self.decode("ar", 1, compiled, seed).tokens for seed in range(2)]))
        return {"equal_tokens": int((found[0] == found[1]).sum()), "tokens": found[0].numel()}

    def profiled(self) -> dict:
        """Launches and microseconds of every kernel of an image of one-token steps, per step."""
        compiled = CompiledSteps(compiles=False)
        passes = self.decode("ar", 1, compiled).forward_passes
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.device.type == "cuda" else [])]
        with profile(activities=activities) as recorded:
            self.decode("ar", 1, compiled)
        longest = sorted(recorded.key_averages(), key=lambda event: -event.self_device_time_total)[:40]
        return {
            "kernels": [
                {"name": event.key, "launches": event.count / passes, "us": event.self_device_time_total / passes}
                for event in longest
            ]
        }


def alone(device: torch.device, config: Any) -> dict:
    """Whether a row of a product has the same bits alone and with others."""
    found = {}
    for name, shape in layer_shapes(config).items():
        x, (weight, *_) = torch.randn(64, shape[1], device=device).bfloat16(), weights(shape, device)
        whole = linear(x, weight)
        same = [torch.equal(linear(x[:rows], weight), whole[:rows]) for rows in (1, 2, 16)]
        found[name] = all(same)
    return {"same_bits": found}


def unread(device: torch.device, config: Any) -> dict:
    """Whether attention reads nothing after the last visible key: the cache holds NaN there."""
    heads = config.num_attention_heads
    width, last = config.hidden_size // heads, 200
    cache = torch.randn(2, 2, heads, 577, width, device=device).bfloat16()
    cache[:, :, :, last + 2 :] = torch.nan
    keys, values = cache
    query, seen = torch.randn(2, heads, width, device=device).bfloat16(), torch.ones(2, 1, device=device).bool()
    out = attention(query, keys, values, seen, 1, 1, torch.full((1,), last, device=device))
    return {"finite": bool(out.isfinite().all())}


def step(day: Any) -> None:
    """What decides most comes first."""
    reads(day)
    gaps(day)
    images = Images(day)
    config = images.config
    for text, kind in product(day.plan.decodings, FORMS):
        day.measure(partial(images.timed, text, 1, kind), image=text, batch=1, form=kind)
    products(day, config)
    attentions(day, config)
    day.measure(images.early_launches, check="early launches")
    day.measure(partial(alone, day.plan.device, config), check="rows alone")
    # The definition in torch reads all keys.
    if day.plan.device.type == "cuda":
        day.measure(partial(unread, day.plan.device, config), check="after the end")
    day.measure(images.profiled, check="profile")
    for batch, kind in product(day.plan.batches[1:], FORMS[:2]):
        day.measure(partial(images.timed, "ar", batch, kind), image="ar", batch=batch, form=kind)
    if "compiled" in day.plan.forms:
        day.measure(partial(images.timed, "ar", 1, "torch", True), image="ar", batch=1, form="compiled")
