"""Everything that is to be measured on a GPU, in seven parts of at most ten minutes each:

- tests: `pytest -m gpu`
- step: where the time of a captured step goes, see gpu_step.py
- kernels: every kernel, next to the time that its bytes take to copy
- steps: models of published sizes with random weights, eager (`pipe.run_eagerly()`), captured (the default) and
  compiled (`pipe.compile()`), next to the longer of two times: that weights, keys and values take to copy, and that
  the operations of its matrix products take
- images: the packaged models with every decoding
- pixels: image tokenizers, from tokens to pixels
- memory: whether it stays flat over many calls, and whether a call goes on without graphs after a failed capture

Every measurement is written to DIR/gpu_day.json at once, with its units in the names. Start the command again after an
interruption, or if a part ran out of time: it measures what is missing. Nothing is downloaded.

python benchmarks/gpu_day.py --out DIR                # all parts, or --only steps
python benchmarks/gpu_day.py --out DIR --report       # no measurement: writes the tables into benchmarks/notes/gpu.md
python benchmarks/gpu_day.py --out DIR --tiny         # tries every part with tiny models on a CPU
"""

import argparse
import copy
import gc
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import diffusers
import gpu_day_tables
import gpu_step
import image_decoding
import kernel_times
import step_cost
import torch
import transformers
from measured_calls import measure
from shapes import Bound, Published
from side_by_side import in_turn
from step_models import MODELS, TINY, tiny_llamagen, tiny_var

from arimage import AutoPipeline
from arimage.auto import packaged_models
from arimage.decoding import decoding_from_text
from arimage.decoding.run.batch import Batch, Images
from arimage.decoding.run.captured_steps import CapturedState, CapturedSteps
from arimage.eval.bench.measure import machine, take
from arimage.eval.bench.memory import peak_memory, reset_peak_memory
from arimage.pipelines.base import ARPipeline


ROOT = Path(__file__).parents[1]
WINDOWS = ("sjd-coupled:window=16", "sjd-coupled:window=32")
PACKAGED = {name: partial(AutoPipeline.from_pretrained, name, dtype=torch.bfloat16) for name in packaged_models()}
# Whose steps are timed.
TIMED = ("llamagen-xl-384", "var-d30", *gpu_step.LANGUAGE)
TINY_TIMED = {name: TINY[name] for name in TIMED}
# The options of `CapturedSteps`; None for eager steps.
FORMS = {"eager": None, "captured": {"compiles": False}, "compiled": {}}
# Seconds that must be left for the first measurement of a form; later ones need as much as the longest so far.
FIRST = {"compiled": 150}


class Plan(NamedTuple):
    """What is measured: of kernels batch, window, vocabulary and side of an image; `decodings` of large models, and
    `chosen` ones of the packaged models (all if None). Only steps are measured with the third batch size."""

    device: torch.device
    tests: str = "tests"
    kernels: tuple[int, int, int, int] = (4, 64, 16384, 256)
    models: dict[str, Published] = {name: MODELS[name] for name in TIMED}
    decodings: tuple[str, ...] = ("ar", *WINDOWS)
    batches: tuple[int, ...] = (1, 8, 64)
    forms: tuple[str, ...] = tuple(FORMS)
    repeats: int = 20
    pipelines: dict[str, Callable[[], ARPipeline]] = PACKAGED
    condition: dict[str, list] = {"prompt": ["a red heart", "a blue book", "pizza", "a cat", "a dog"]}
    chosen: tuple[str, ...] | None = None
    tokenizers: dict[str, tuple[int, Callable[[], torch.nn.Module]]] = image_decoding.TOKENIZERS
    sizes: tuple[int, ...] = (256, 512, 768, 1024)
    calls: int = 40


TINY_PLAN = Plan(
    device=torch.device("cpu"),
    tests="tests/kernels/test_neighbours.py",
    kernels=(1, 4, 64, 8),
    models=TINY_TIMED,
    decodings=WINDOWS[:1],
    batches=(1,),
    forms=("eager", "captured"),
    repeats=1,
    pipelines={"emoji-llamagen": tiny_llamagen, "emoji-var": tiny_var},
    condition={"class_labels": [1, 2, 3]},
    chosen=(WINDOWS[0], "next-scale"),
    tokenizers={"llamagen": (2, lambda: tiny_llamagen().vq)},
    sizes=(32,),
    calls=2,
)


class Day:
    """The measurements in a folder. `measure` skips those that are there."""

    def __init__(self, folder: Path, plan: Plan, seconds: float, commit: str):
        self.folder, self.plan = folder, plan
        self._file, self._seconds, self._commit = folder / "gpu_day.json", seconds, commit
        libraries = {"transformers": transformers.__version__, "diffusers": diffusers.__version__}
        header = {**machine(plan.device), **libraries, "tiny": plan.models is TINY_TIMED}
        begun = self._file.exists()
        self.data: dict[str, Any] = json.loads(self._file.read_text()) if begun else {**header, "results": {}}
        for name in ("device", "torch", "tiny"):
            if self.data[name] != header[name]:
                raise SystemExit(f"{self._file} has {name} {self.data[name]}, not {header[name]}: give another --out")

    def begin(self, part: str) -> None:
        self._part, self._end = part, time.monotonic() + self._seconds
        self.results = self.data["results"].setdefault(part, {})
        self._pipes: dict[tuple[str, str], ARPipeline] = {}
        self.left_out: list[str] = []
        clear(self.plan.device)

    def left(self) -> float:
        """Seconds until the end of the part."""
        return self._end - time.monotonic()

    def measure(self, call: Callable[[], dict], **fields) -> None:
        """Keep what `call` returns with the `fields`, which name it."""
        name, form = " ".join(map(str, fields.values())), fields.get("form")
        done = {key: entry for key, entry in self.results.items() if "error" not in entry}
        if name in done:
            return
        alike = [entry["seconds"] for entry in done.values() if entry.get("form") == form]
        if self.left() <= max(alike, default=FIRST.get(form, 0)):
            self.left_out.append(name)
            return
        begun = time.monotonic()
        try:
            found = call()
        except Exception as error:
            traceback.print_exc()
            message = f"{type(error).__name__}: {error}"
            found = {"out_of_memory": True} if "out of memory" in message else {"error": message}
        print(f"{self._part}: {name}: {gpu_day_tables.described(found)}", flush=True)
        about = {"seconds": time.monotonic() - begun, "date": str(datetime.now(UTC)), "commit": self._commit}
        self.results[name] = {**fields, **found, **about}
        self.write()

    def write(self) -> None:
        unfinished = self._file.with_suffix(".part")
        unfinished.write_text(json.dumps(self.data, indent=1, allow_nan=False))
        os.replace(unfinished, self._file)

    def bandwidth(self) -> float:
        """Bytes per second of a copy: as the part `kernels` found them, or measured now."""
        copied = self.data["results"].get("kernels", {}).get("copy", {})
        return copied.get("bytes_per_s") or kernel_times.bandwidth(self.plan.device)

    def product_rate(self) -> float:
        """Operations per second of a large matrix product, likewise."""
        found = self.data["results"].get("kernels", {}).get("product", {})
        return found.get("operations_per_s") or kernel_times.product_rate(self.plan.device)

    def pipe(self, model: str, form: str) -> ARPipeline:
        """A packaged model."""
        if (model, form) not in self._pipes:
            torch.manual_seed(0)
            pipe = self._pipes[model, form] = self.plan.pipelines[model]().to(self.plan.device)
            pipe.set_progress_bar_config(disable=True)
            {"eager": pipe.run_eagerly, "captured": pipe.capture, "compiled": pipe.compile}[form]()
        return self._pipes[model, form]


def clear(device: torch.device) -> None:
    """Free the memory of what is no longer used, compiled functions included."""
    torch._dynamo.reset()
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


@contextmanager
def replays() -> Iterator[list]:
    """A list with one item for each replay of a CUDA graph."""
    found, replay = [], torch.cuda.CUDAGraph.replay

    def counted(graph):
        found.append(None)
        replay(graph)

    with patch.object(torch.cuda.CUDAGraph, "replay", counted):
        yield found


def spread(values: list[float], unit: str) -> dict[str, float]:
    of = {"median": statistics.median, "low": min, "high": max}
    return {f"{name}_{unit}": function(values) for name, function in of.items()}


def tests(day: Day) -> None:
    log = day.folder / "gpu_tests.xml"
    # Files that need a package which is missing here must not stop the others.
    options = ["-q", "-p", "no:cacheprovider", "--continue-on-collection-errors", f"--junitxml={log.resolve()}"]

    def run() -> dict:
        log.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", "-m", "gpu", *options, day.plan.tests]
        subprocess.run(command, cwd=ROOT, timeout=day.left())
        cases = list(ElementTree.parse(log).iter("testcase"))
        failed = [case for case in cases if {"failure", "error"} & {child.tag for child in case}]
        skipped = sum(case.find("skipped") is not None for case in cases)
        names = [f"{case.get('classname')}::{case.get('name')}" for case in failed]
        return {"passed": len(cases) - len(failed) - skipped, "skipped": skipped, "failed": names}

    day.measure(run, command="pytest -m gpu")


def kernels(day: Day) -> None:
    device = day.plan.device

    def times(operation: str, function: str, form: str, inputs: tuple, floor: float) -> dict:
        kernel = kernel_times.form(operation, function, form)
        median, low, high = kernel_times.measured(lambda: kernel(*inputs), device)
        return {"median_us": median, "low_us": low, "high_us": high, "floor_us": floor}

    day.measure(lambda: {"bytes_per_s": kernel_times.bandwidth(device)}, kernel="copy")
    day.measure(lambda: {"operations_per_s": kernel_times.product_rate(device)}, kernel="product")
    rate = day.bandwidth()
    *sizes, side = day.plan.kernels
    for operation, function, inputs, moved in kernel_times.cases(*sizes, device, side):
        for form in ("reference",) if device.type == "cpu" else ("reference", "triton"):
            run = partial(times, operation, function, form, inputs, 1e6 * moved / rate)
            day.measure(run, kernel=function, arguments=kernel_times.described(inputs), form=form)


def steps(day: Day) -> None:
    device, models = day.plan.device, day.plan.models
    loaded: dict[str, Callable[[int], Bound]] = {}

    def bind(model: str, batch: int) -> Bound:
        if model not in loaded:
            loaded.clear()
            clear(device)
            loaded[model] = models[model].build(models[model].layers)
        return loaded[model](batch)

    def image(bound: Bound, decoding, size: int, compiled: CapturedSteps | None) -> None:
        """All scales, whose graphs are kept for the next call."""
        rows, batch = list(range(size)), Batch(decoding, size, compiled)
        batch.begin(
            Images(rows, bound.model, bound.sampling, torch.zeros(size, dtype=torch.long, device=bound.model.device))
        )
        while not batch.state.over:
            batch.step()
        batch.release(rows)

    @cache
    def floors(model: str, batch: int, text: str) -> dict:
        """How long reading weights, keys and values takes, and how long the operations; of a next-scale model for a
        whole image."""
        with step_cost.fake_cuda():
            bound, decoding = models[model].build(models[model].layers)(batch), decoding_from_text(text)
            if hasattr(bound.model, "scales"):
                cost = step_cost.scale_costs(bound, decoding, batch)["all scales"]
            else:
                cost = step_cost.token_cost(bound, decoding, batch)
        return {"bytes_ms": 1000 * cost.floor / rate, "operations_ms": 1000 * cost.flop / product_rate}

    def run(model: str, batch: int, text: str, form: str) -> dict:
        clear(device)
        decoding, options = decoding_from_text(text), FORMS[form]
        compiled = None if options is None else CapturedSteps(**options)
        with torch.device(device):
            bound = bind(model, batch)
            reset_peak_memory(device)
            if hasattr(bound.model, "scales"):
                call = partial(image, bound, decoding, batch, compiled)
            else:
                state = step_cost.half_way(bound, decoding, batch)
                step = partial(decoding.step, state)
                call = step if compiled is None else CapturedState(compiled, decoding, state, keeps=False).step
        with replays() as replayed:
            found = spread(gpu_step.milliseconds(call, day.plan.repeats, device), "ms")
        found |= {"peak_mib": max(peak_memory(device), default=0), "replays": len(replayed)}
        found |= floors(model, batch, text)
        floor_ms = max(found["bytes_ms"], found["operations_ms"])
        return found | {"tokens": bound.model.num_tokens, "floor_ms": floor_ms, "ratio": found["median_ms"] / floor_ms}

    rate, product_rate = day.bandwidth(), day.product_rate()
    # Those that take minutes to compile come last, at one batch size.
    for forms, batches in ((day.plan.forms[:2], day.plan.batches), (day.plan.forms[2:], day.plan.batches[:1])):
        for batch, model in product(batches, models):
            for text, form in product(("next-scale",) if model == "var-d30" else day.plan.decodings, forms):
                run_it = partial(run, model, batch, text, form)
                day.measure(run_it, model=model, batch=batch, decoding=text, form=form)


def images(day: Day) -> None:
    plan = day.plan

    def run(model: str, batch: int, text: str, form: str) -> dict:
        decodings, pipe = {text: decoding_from_text(text)}, day.pipe(model, form)
        with replays() as replayed:
            # Other prompts in every run.
            rows = [
                measure(pipe, take(plan.condition, run, batch), decodings, batch_size=batch, runs=1, seed=run)[0]
                for run in range(min(plan.repeats, 3))
            ]
        seconds, passes, of_batch, peaks = (
            [value for row in rows for value in row[name]]
            for name in ("seconds", "passes", "batch_passes", "peak_memory")
        )
        tokens = passes[0] * rows[0]["tokens_per_pass"][0]
        found = spread([value / batch for value in seconds], "s_per_image")
        found |= {"passes": statistics.mean(passes), "passes_per_token": statistics.mean(of_batch) / tokens}
        return found | {"peak_mib": max(peaks, default=0), "replays": len(replayed)}

    texts = {}
    for model in plan.pipelines:
        names = day.pipe(model, "eager").decoding_names
        names = [*names, *(WINDOWS if "sjd-coupled" in names else ())]
        texts[model] = [name for name in names if plan.chosen is None or name in plan.chosen]
    for batch, form, model in product(plan.batches[:2], plan.forms[:2], plan.pipelines):
        for text in texts[model]:
            run_it = partial(run, model, batch, text, form)
            day.measure(run_it, model=model, batch=batch, decoding=text, form=form)


def pixels(day: Day) -> None:
    device = day.plan.device

    def run(vq: torch.nn.Module, side: int, batch: int) -> dict:
        codes = torch.randint(64, (batch, side, side), device=device)
        decoded = in_turn({"": partial(image_decoding.decode, vq, codes)}, 3, device)[""]
        found = spread([1000 * one.wall for one in decoded], "ms_per_image")
        return found | {"peak_mib": max((peak for one in decoded for peak in one.memory), default=0)}

    for name, (factor, build) in day.plan.tokenizers.items():
        vq = torch.nn.Module.to(build().eval(), device, torch.bfloat16)
        for size, batch in product(day.plan.sizes, day.plan.batches[:2]):
            day.measure(partial(run, vq, size // factor, batch), tokenizer=name, pixels=size, batch=batch)


def memory(day: Day) -> None:
    plan, on_gpu = day.plan, day.plan.device.type == "cuda"

    def generate(pipe: Any, text: str, seed: int) -> torch.Tensor:
        settings = {"generator": torch.Generator().manual_seed(seed), "output_type": "latent"}
        return pipe(**take(plan.condition, 0, 2), decoding=text, **settings).tokens

    def flat(model: str, text: str, form: str) -> dict:
        held = []
        for seed in range(plan.calls):
            generate(day.pipe(model, form), text, seed)
            held.append(torch.cuda.memory_reserved() / 2**20 if on_gpu else max(peak_memory(plan.device), default=0))
        # The first calls may still allocate.
        return {"calls": plan.calls, "held_mib": held[-1], "grown_mib": held[-1] - held[plan.calls // 4]}

    def failing(model: str, text: str) -> dict:
        expected, pipe = generate(day.pipe(model, "eager"), text, 0), copy.copy(day.pipe(model, "eager"))
        pipe.capture()
        capture = torch.cuda.graph

        @contextmanager
        def fails(*args, **options):
            with capture(*args, **options):
                yield
                # CUDA does not permit to wait in a capture.
                torch.cuda.current_stream().synchronize()

        with patch("torch.cuda.graph", fails), replays() as replayed:
            tokens = generate(pipe, text, 0)
        found = {"replays": len(replayed), "share_of_equal_tokens": float((tokens == expected).float().mean())}
        if on_gpu:
            found["on_default_stream"] = torch.cuda.current_stream() == torch.cuda.default_stream()
        return found

    for model, text in (("emoji-llamagen", WINDOWS[0]), ("emoji-var", "next-scale")):
        for form in plan.forms[:2]:
            day.measure(partial(flat, model, text, form), what="flat", model=model, decoding=text, form=form)
    fields = {"model": "emoji-llamagen", "decoding": WINDOWS[0]}
    day.measure(partial(failing, *fields.values()), what="failing capture", **fields)


PARTS = {part.__name__: part for part in (tests, gpu_step.step, kernels, steps, images, pixels, memory)}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to measure")
    parser.add_argument("--seconds", type=float, default=540, help="of a part, after which it begins no measurement")
    parser.add_argument("--commit", help="of this code; by default what git says")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--report", action="store_true")
    arguments = parser.parse_args()
    if arguments.report:
        gpu_day_tables.report(arguments.out, ROOT / "benchmarks/notes/gpu.md")
        return
    if not arguments.tiny and not torch.cuda.is_available():
        raise SystemExit("no CUDA GPU was found: run this benchmark on a machine that has one, or with --tiny")
    arguments.out.mkdir(parents=True, exist_ok=True)
    plan = TINY_PLAN if arguments.tiny else Plan(torch.device("cuda"))
    commit = arguments.commit or subprocess.getoutput(f"git -C '{ROOT}' describe --always --dirty")
    day = Day(arguments.out, plan, arguments.seconds, commit)
    for part in arguments.only:
        print(f"{part}: begins", flush=True)
        day.begin(part)
        PARTS[part](day)
        day.data.setdefault("left_out", {})[part] = day.left_out
        day.write()
        print(f"{part}: left out for want of time: {', '.join(day.left_out) or 'nothing'}", flush=True)
    gpu_day_tables.report(arguments.out)


if __name__ == "__main__":
    main()
