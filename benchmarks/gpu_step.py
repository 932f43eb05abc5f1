"""The part `step` of gpu_day.py: where the time of a captured step of LlamaGen-XL goes, and what the kernels of a
step save there and in language models.

- rates: reads, and the time between two kernels of a graph
- image: mean milliseconds per step of whole images, with the kernels of PyTorch ("torch") and with ours ("kernels")
- language: milliseconds per captured step of `LANGUAGE`, half-way through an image, by both, next to
  the time that weights, keys and values take to copy
- product, attention: every kernel of a layer next to PyTorch's, in a graph whose weights no cache holds
- checks: rows alone against rows in a batch, and NaN after the ends of the rows
- profile: the kernels of one step by name
- compiled: the same images with `torch.compile`
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import pairwise, product
from typing import Any
from unittest.mock import patch

import kernel_times
import step_cost
import torch
import torch.nn.functional as F
from shapes import Bound
from torch.profiler import ProfilerActivity, profile

from arimage.decoding import decoding_from_text
from arimage.decoding.run.batch import Batch, Images
from arimage.decoding.run.captured_steps import CapturedState, CapturedSteps
from arimage.kernels.step.attention import attention
from arimage.kernels.step.linear import linear
from arimage.kernels.step.qkv import qkv
from arimage.models import step as step_layers


MODEL = "llamagen-xl-384"
LANGUAGE = ("janus-pro-7b", "emu3-gen", "glm-image", "cosmos-4b")
DECODINGS = ("ar", "sjd-coupled:window=16", "sjd-coupled:window=32")
# Weights of a chain of products: more than the L2 cache of an H100 holds.
BYTES = 400 << 20
ROWS = (2, 16, 32, 64)
FORMS = ("torch", "kernels")
GATED = "gate and up"


@contextmanager
def form(name: str) -> Iterator[None]:
    """Run steps in one of the `FORMS`."""
    with patch.object(step_layers, "ENABLED", name == "kernels"):
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


def milliseconds(call: Callable[[], object], repeats: int, device: torch.device) -> list[float]:
    """Of every call, after four more, in which a step is compiled and captured. The host does not wait in between."""
    for _ in range(4):
        call()
    if device.type == "cpu":
        return [kernel_times.measured(call, device)[0] / 1000 for _ in range(repeats)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize(device)
    return [begin.elapsed_time(end) for begin, end in pairwise(marks)]


def weights(shape: tuple[int, ...], device: torch.device) -> list[torch.Tensor]:
    """So many weights that no cache holds them; a few on a CPU."""
    one = 2 * shape[0] * shape[1]
    count = max(BYTES // one, 2) if device.type == "cuda" else 2
    return [torch.randn(shape, device=device).bfloat16() / shape[1] ** 0.5 for _ in range(count)]


def layer_shapes(config: Any) -> dict[str, tuple[int, int]]:
    """Rows and columns of the weights of a layer, and of the head."""
    width, hidden = config.hidden_size, config.intermediate_size
    return {
        "qkv": (3 * width, width),
        "out": (width, width),
        GATED: (hidden, width),
        "down": (width, hidden),
        "head": (config.vocab_size, width),
    }


def products(day: Any, config: Any) -> None:
    """With the norms before them and the sums after them; queries, keys and values without the rotation in torch."""
    device = day.plan.device

    def run(name: str, shape: tuple[int, int], rows: int, kind: str) -> dict:
        x, residual = (torch.randn(rows, size, device=device).bfloat16() for size in reversed(shape))
        gain, pairs, gated = torch.ones(shape[1], device=device).bfloat16(), weights(shape, device), name == GATED
        norm = {} if name in ("out", "down") else {"gain": gain, "eps": 1e-5}
        rotation = _rotation(rows, shape[1], config.hidden_size // config.num_attention_heads, device)
        calls: list[Callable[[], object]] = []
        for i, weight in enumerate(pairs):
            both = [weight, pairs[i - 1]] if gated else [weight]
            if kind == "torch":
                calls.append(partial(_product, x, both, norm.get("gain"), None if norm else residual))
            elif name == "qkv":
                calls.append(partial(qkv, x, gain, 1e-5, [weight], **rotation, scales=[], biases=[]))
            else:
                up = {"up": both[1]} if gated else {}
                calls.append(partial(linear, x, weight, **norm, **up, residual=None if norm else residual))
        microseconds = in_graph(calls, device)
        return {"us": microseconds, "bytes_per_s": 1e6 * len(both) * pairs[0].nbytes / microseconds}

    sizes = ROWS if device.type == "cuda" else ROWS[:1]
    for (name, shape), rows, kind in product(layer_shapes(config).items(), sizes, FORMS):
        day.measure(partial(run, name, shape, rows, kind), product=name, rows=rows, form=kind)


def _product(
    x: torch.Tensor, weights: list[torch.Tensor], gain: torch.Tensor | None, residual: torch.Tensor | None
) -> torch.Tensor:
    x = x if gain is None else F.rms_norm(x, gain.shape, gain, 1e-5)
    out, *ups = (F.linear(x, weight) for weight in weights)
    out = F.silu(out) * ups[0] if ups else out
    return out if residual is None else out + residual


def _rotation(rows: int, width: int, head_dim: int, device: torch.device) -> dict[str, Any]:
    """Arguments of `qkv` for a token of each row of a cache with two rows of so many places."""
    places = torch.arange(rows // 2, device=device)
    keys, values = torch.zeros(2, 2, width // head_dim, len(places), head_dim, device=device).bfloat16()
    table = torch.ones(len(places), head_dim // 2, 2, device=device)
    return {"table": table, "positions": places, "index": places, "keys": keys, "values": values, "head_dim": head_dim}


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


class WholeImages:
    """Whole images of the model, step by step."""

    def __init__(self, day: Any):
        self.device = day.plan.device
        model = day.plan.models[MODEL]
        with torch.device(self.device):
            self._bind = model.build(model.layers)
            self.config: Any = self._bind(1).networks[0].config

    def decode(self, text: str, batch: int, compiled: CapturedSteps, seed: int = 0) -> int:
        """How many forward passes a batch takes, which leaves its state and graphs to the next, as in a pipeline."""
        rows, running = list(range(batch)), Batch(decoding_from_text(text), batch, compiled)
        with torch.device(self.device):
            bound, seeds = self._bind(batch), seed + torch.arange(batch, device=self.device)
            running.begin(Images(rows, bound.model, bound.sampling, seeds))
            while len(running.finished()) < batch:
                running.step()
        running.release(rows)
        return running.forward_passes

    def timed(self, text: str, batch: int, kind: str, compiles: bool = False) -> dict:
        """Mean milliseconds per step of three images each, after one whose steps are captured."""
        compiled, found, passes = CapturedSteps(compiles=compiles), [], 0
        with form(kind):
            self.decode(text, batch, compiled)
            for seed in range(1, 4):
                begun = self._now()
                passes = self.decode(text, batch, compiled, seed)
                found.append(1000 * (self._now() - begun) / passes)
        return {"median_ms": statistics.median(found), "low_ms": min(found), "high_ms": max(found), "passes": passes}

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def profiled(self) -> dict:
        """Launches and microseconds of every kernel of an image of one-token steps, per step."""
        compiled = CapturedSteps(compiles=False)
        passes = self.decode("ar", 1, compiled)
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


def language(day: Any, name: str) -> None:
    device, model = day.plan.device, day.plan.models[name]
    bound: list[Bound] = []

    def run(text: str, kind: str) -> dict:
        decoding = decoding_from_text(text)
        with torch.device(device), form(kind):
            bound[:] = bound or [model.build(model.layers)(1)]
            state = step_cost.half_way(bound[0], decoding, 1)
            call = CapturedState(CapturedSteps(compiles=False), decoding, state, keeps=False).step
            found = milliseconds(call, day.plan.repeats, device)
        median, floor_ms = statistics.median(found), 1000 * floor(text) / day.bandwidth()
        times = {"median_ms": median, "low_ms": min(found), "high_ms": max(found)}
        return times | {"floor_ms": floor_ms, "ratio": median / floor_ms}

    @cache
    def floor(text: str) -> float:
        with step_cost.fake_cuda():
            return step_cost.token_cost(model.build(model.layers)(1), decoding_from_text(text), 1).floor

    for text, kind in product(day.plan.decodings, FORMS):
        day.measure(partial(run, text, kind), language=name, decoding=text, form=kind)


def alone(device: torch.device, config: Any) -> dict:
    """Whether a row of a product has the same bits alone and with others."""
    found = {}
    for name, shape in layer_shapes(config).items():
        x, (weight, up, *_) = torch.randn(64, shape[1], device=device).bfloat16(), weights(shape, device)
        options = {} if name in ("out", "down") else {"gain": x[0].abs(), "eps": 1e-5}
        options |= {"up": up} if name == GATED else {}
        whole = linear(x, weight, **options)
        same = [torch.equal(linear(x[:rows], weight, **options), whole[:rows]) for rows in (1, 2, 16, 32)]
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
    images = WholeImages(day)
    config = images.config
    for text, kind in product(day.plan.decodings, FORMS):
        day.measure(partial(images.timed, text, 1, kind), image=text, batch=1, form=kind)
    for name in LANGUAGE:
        language(day, name)
    products(day, config)
    attentions(day, config)
    day.measure(partial(alone, day.plan.device, config), check="rows alone")
    # The definition in torch reads all keys.
    if day.plan.device.type == "cuda":
        day.measure(partial(unread, day.plan.device, config), check="after the end")
    day.measure(images.profiled, check="profile")
    for batch, kind in product(day.plan.batches[1:], FORMS):
        day.measure(partial(images.timed, "ar", batch, kind), image="ar", batch=batch, form=kind)
    if "compiled" in day.plan.forms:
        day.measure(partial(images.timed, "ar", 1, "torch", True), image="ar", batch=1, form="compiled")
