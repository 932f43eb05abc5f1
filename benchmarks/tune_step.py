"""Searches for the fastest settings of the kernels of a step on a GPU: blocks, parts of the channels that are summed
apart (splits of K), warps and stages, for the shapes of published models at one token and at windows of 16 and 32.

The operations and their shapes are those that steps of the models call on fake CUDA tensors. Every setting is changed
alone, then all together that helped; what differs from the definition in torch is left out. Settings that a sum
depends on are chosen for all numbers of rows together, so that no row depends on how many there are.

DIR/trials.jsonl has every trial as soon as it was timed, and DIR/tuned.json the table, with what is in use. Copy that
to arimage/kernels/step/tuned.json to use it. Start the command again to go on.

python benchmarks/tune_step.py --out DIR              # for six minutes
python benchmarks/tune_step.py --out DIR --tiny       # tries it in Triton's interpreter, without a GPU
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch


# Triton asks when it is imported.
os.environ.setdefault("TRITON_INTERPRET", str(int("--tiny" in sys.argv)))

import gpu_step
import kernel_times
import step_cost
import torch
from shapes import Published
from shapes.rar import rar
from step_models import MODELS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from arimage.decoding import decoding_from_text
from arimage.kernels.operation import DEVICES
from arimage.kernels.step import programs


Settings = dict[str, int]
# By operation of the table: changes that a sum depends on, and others.
WIDTHS: tuple[Settings, ...] = (
    {"block_width": 128},
    {"block_width": 512, "stages": 2},
    {"parts": 2},
    {"parts": 8},
    {"num_warps": 8},
)


def values(name: str, *values: int) -> tuple[Settings, ...]:
    return tuple({name: value} for value in values)


SETTINGS: dict[str, tuple[tuple[Settings, ...], tuple[Settings, ...]]] = {
    "linear": (WIDTHS, (*values("block_out", 16, 32, 64), *values("stages", 2, 3, 4, 6))),
    "qkv": (WIDTHS, (*values("block_pairs", 8, 32), *values("stages", 2, 3, 4, 6))),
    "attention": (
        (*values("block_keys", 32, 64), *values("parts", 2, 8), {"parts": 8, "num_warps": 8}),
        values("stages", 2, 3, 4),
    ),
    "norm_and_add": (values("num_warps", 4, 16), ()),
    "modulated": (
        (*values("block_out", 16, 32), *values("block_width", 64, 128), {"num_warps": 8}),
        values("stages", 2, 3, 4),
    ),
}
TINY_SETTINGS: dict[str, tuple[tuple[Settings, ...], tuple[Settings, ...]]] = {
    "linear": (values("parts", 8), values("block_out", 32)),
    "qkv": (values("block_width", 128), values("block_pairs", 8)),
    "attention": (values("block_keys", 32), values("stages", 2)),
    "norm_and_add": (values("num_warps", 4), ()),
    "modulated": (values("block_out", 32), values("stages", 2)),
}
# The folders of the operations.
FOLDERS = {
    "linear": "linear",
    "qkv": "qkv",
    "unturned": "qkv",
    "queries": "qkv",
    "attention": "attention",
    "normed_attention": "attention",
    "unit_attention": "attention",
    "text_attention": "attention",
    "norm_and_add": "norm_and_add",
    "modulated": "modulated",
}
ROWS = (8, 16, 32, 64)
# Those that are slowest next to the speed of memory; then all others.
FIRST = ("janus-pro-7b", "emu3-gen", "glm-image", "cosmos-4b", "llamagen-xl-384")
STEPS = ("ar", *(f"sjd-coupled:window={window}" for window in (16, 32, 64)))
# Of processes that compile, each with arguments of its own on the GPU.
WORKERS = 8
# The least gain that is worth other settings.
GAIN = 0.98
# More copies of its arguments than this no operation needs.
COPIES = 64


class Plan(NamedTuple):
    """What is tuned: of `models` the steps of the decodings `steps`, with a number of processes that compile."""

    device: torch.device
    settings: dict
    models: dict[str, Published]
    steps: tuple[str, ...]
    workers: int


def full_plan() -> Plan:
    models = {name: MODELS[name] for name in (*FIRST, *MODELS)}
    return Plan(torch.device("cuda"), SETTINGS, models, STEPS, min(os.cpu_count() or 1, WORKERS))


def tiny_plan() -> Plan:
    """With norms of heads, with norms before sums, and modulated."""
    narrow = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
    glm = MODELS["glm-image"]
    rope = {**glm.tiny["rope_parameters"], "mrope_section": [2, 3, 3]}
    models = {
        "glm-image": Published(
            1, partial(glm.build, **{**glm.tiny, **narrow, "rope_parameters": rope, "shape": (8, 8)})
        ),
        "rar-b-256": Published(1, partial(rar, grid_size=5, vocab_size=64, **narrow)),
    }
    return Plan(torch.device("cpu"), TINY_SETTINGS, models, ("ar", "sjd-coupled:window=33"), 1)


class Like(NamedTuple):
    """A tensor of an operation's arguments."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Case(NamedTuple):
    """An operation and its arguments by name, with a `Like` for each tensor."""

    name: str
    arguments: dict[str, Any]


class Recorder(TorchDispatchMode):
    """Takes down the operations of a step, each once."""

    def __init__(self):
        super().__init__()
        self.cases: dict[str, Case] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, _, name = func._schema.name.partition("::step_")
        if namespace == "arimage" and name in FOLDERS:
            given = step_cost.named(func, args)
            like = tree_map_only(torch.Tensor, lambda each: Like(tuple(each.shape), each.dtype), given)
            self.cases.setdefault(f"{name} {like}", Case(name, like))
        return func(*args, **(kwargs or {}))


def cases(model: Published, steps: tuple[str, ...]) -> Iterator[Case]:
    """Every operation of the steps of a model."""
    for decoding in map(decoding_from_text, steps):
        with step_cost.fake_cuda():
            bound = model.build(min(model.layers, 2))(1)
            if decoding.supports(bound.model) is not None:
                continue
            state = step_cost.half_way(bound, decoding, 1)
            with Recorder() as recorder:
                decoding.step(state)
        yield from recorder.cases.values()


def filled(case: Case, device: torch.device) -> tuple:
    """Arguments of the operation half-way through an image. The interpreter takes no bfloat16."""
    given = case.arguments

    def tensor(name: str, like: Like) -> torch.Tensor:
        if like.dtype == torch.bool:
            return torch.ones(like.shape, dtype=like.dtype, device=device)
        if name == "slots":
            return torch.full(like.shape, (given["keys"].shape[2] - given["first"]) // 2, device=device)
        if not like.dtype.is_floating_point:
            last = {"index": "keys", "positions": "table"}.get(name)
            end = given[last].shape[2 if last == "keys" else 0] if last and given[last] is not None else 1
            return torch.arange(like.shape[0], device=device) % end
        dtype = torch.float32 if device.type == "cpu" else like.dtype
        numbers = torch.randn(like.shape, device=device)
        return (numbers / like.shape[1] ** 0.5 if name in ("weight", "up", "weights") else numbers).to(dtype)

    def argument(name: str, value: Any) -> Any:
        if isinstance(value, Like):
            return tensor(name, value)
        return [tensor(name, each) for each in value] if isinstance(value, list | tuple) else value

    return tuple(argument(name, value) for name, value in given.items())


def fits(case: Case, settings: Settings) -> bool:
    """Whether blocks divide what has no rest."""
    if "block_pairs" in settings:
        return case.arguments["head_dim"] // 2 % settings["block_pairs"] == 0
    if case.name == "modulated" and "block_width" in settings:
        return case.arguments["weight"].shape[1] % settings["block_width"] == 0
    return True


class LookedUpError(Exception):
    """Says what an operation looks up, before it launches anything."""


class Lookup(dict):
    def get(self, key, default=None):
        raise LookedUpError(key)


def kernel(case: Case) -> Callable:
    return kernel_times.form(f"step.{FOLDERS[case.name]}", case.name, "triton")


def key_of(case: Case, device: torch.device) -> str:
    """The key of the settings in the table."""
    try:
        with patch.object(programs, "TUNED", Lookup()):
            kernel(case)(*filled(case, device))
    except LookedUpError as found:
        return found.args[0]
    raise AssertionError(f"{case.name} looks nothing up")


def interpret(device: torch.device) -> None:
    if device.type == "cpu":
        DEVICES.add("cpu")
        torch.set_num_threads(1)


def compile_trial(case: Case, key: str, settings: Settings, device: torch.device) -> None:
    """Leave the kernel in Triton's cache."""
    with torch.no_grad(), patch.object(programs, "TUNED", {key: settings}):
        kernel(case)(*filled(case, device))


class Bench:
    """Times an operation and compares it with its definition."""

    def __init__(self, case: Case, key: str, device: torch.device):
        self.case, self.key, self.device = case, key, device
        torch.manual_seed(0)
        first = filled(case, device)
        moved = sum(each.nbytes for each in tree_leaves(list(first)) if isinstance(each, torch.Tensor))
        count = min(max(gpu_step.BYTES // moved, 2), COPIES) if device.type == "cuda" else 1
        self.inputs = [first, *(filled(case, device) for _ in range(count - 1))]
        definition = kernel_times.form(f"step.{FOLDERS[case.name]}", case.name, "reference")
        copied = tree_map_only(torch.Tensor, torch.clone, first)
        self.expected = self._found(definition(*copied), copied)

    def _found(self, result: torch.Tensor, inputs: tuple) -> list[torch.Tensor]:
        """The result, and what the operation has written."""
        named = dict(zip(self.case.arguments, inputs, strict=True))
        return [result, *(named[name].clone() for name in ("keys", "values") if name in named)]

    def microseconds(self, settings: Settings) -> float:
        """Of one call.

        Raises:
            ArithmeticError: if the result is not that of the definition.
        """
        call = kernel(self.case)
        with patch.object(programs, "TUNED", {self.key: settings}):
            found = self._found(call(*self.inputs[0]), self.inputs[0])
            for actual, expected in zip(found, self.expected, strict=True):
                bound = (1e-4 if expected.dtype == torch.float32 else 0.02) * expected.abs().max().float()
                error = (actual.float() - expected.float()).abs().max()
                if not error <= bound:
                    raise ArithmeticError(f"the result differs from the definition by {float(error):.2g}")
            return gpu_step.in_graph([partial(call, *inputs) for inputs in self.inputs], self.device)


class Trials:
    """Microseconds of settings of an operation: those in the folder, or measured now and added."""

    def __init__(self, folder: Path, plan: Plan, pool: ProcessPoolExecutor):
        self._file, self._plan, self._pool = folder / "trials.jsonl", plan, pool
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        # A run that was interrupted leaves half a line at most.
        rows = [json.loads(line) for line in lines if line.endswith("}")]
        self._times = {(row["key"], str(row["settings"])): row.get("us", math.inf) for row in rows}

    def measure(self, key: str, case: Case, many: list[Settings]) -> list[float]:
        """Infinite for settings that do not run, most of which need more shared memory than there is."""
        missing = [settings for settings in many if (key, str(settings)) not in self._times]
        if missing:
            device = self._plan.device
            wait([self._pool.submit(compile_trial, case, key, settings, device) for settings in missing])
            bench = Bench(case, key, device)
            for settings in missing:
                row: dict[str, Any] = {"key": key, "settings": settings}
                try:
                    row["us"] = bench.microseconds(settings)
                except Exception as error:
                    row["error"] = f"{type(error).__name__}: {error}"
                self._times[key, str(settings)] = row.get("us", math.inf)
                with self._file.open("a") as file:
                    file.write(json.dumps(row) + "\n")
        return [self._times[key, str(settings)] for settings in many]


def fastest(found: dict[str, Case], trials: Trials, start: Settings, changes: tuple[Settings, ...]) -> Settings:
    """Of `start` and its changes, what takes the least time of `start`, on average over the operations."""

    def shares(many: list[Settings]) -> list[float]:
        times = [trials.measure(key, case, [start, *many]) for key, case in found.items()]
        return [sum(each[i] / each[0] for each in times) / len(times) for i in range(1, len(many) + 1)]

    changes = tuple(each for each in changes if all(fits(case, each) for case in found.values()))
    tried = list(zip(shares([start | each for each in changes]), changes, strict=True))
    # The fastest last: its values stay.
    better = [change for share, change in sorted(tried, key=lambda each: -each[0]) if share < 1]
    if len(better) > 1:
        together = {name: value for change in better for name, value in change.items()}
        tried.append((shares([start | together])[0], together))
    share, change = min(tried, key=lambda each: each[0], default=(1.0, {}))
    return start | change if share < GAIN else start


def search(found: dict[str, Case], plan: Plan, trials: Trials) -> dict[str, Settings]:
    """The table's rows of an operation and shape, from its cases by key, the fewest rows first."""
    start, (sums, others) = {}, plan.settings[next(iter(found)).split()[1]]
    before = {key: trials.measure(key, case, [start])[0] for key, case in found.items()}
    if math.inf in before.values():
        print(f"{', '.join(found)}: failed, see the trials", flush=True)
        return {}
    timed = {int(key.split()[-1]): key for key in found}
    # Else nobody knows whether as many rows run.
    if ROWS[-1] in timed:
        start = fastest(found, trials, start, sums)
    table = {key: fastest({key: case}, trials, start, others) for key, case in found.items()}
    for key, settings in table.items():
        us = trials.measure(key, found[key], [settings])[0]
        print(f"{key}: {before[key]:.1f} -> {us:.1f} us, {settings or 'as it was'}", flush=True)
    # What runs with more rows fits fewer.
    shape = next(iter(found)).rpartition(" ")[0]
    for rows in ROWS:
        if larger := [timed[more] for more in ROWS if more >= rows and more in timed]:
            table[f"{shape} {rows}"] = table[larger[0]]
    return {key: settings for key, settings in table.items() if settings}


def write_table(folder: Path, table: dict[str, Settings]) -> None:
    unfinished = folder / "tuned.part"
    unfinished.write_text(json.dumps(dict(sorted(table.items())), indent=1) + "\n")
    os.replace(unfinished, folder / "tuned.json")


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--minutes", type=float, default=6, help="after which it begins no other operation")
    parser.add_argument("--model", nargs="+", help="published models, by default all")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    if not arguments.tiny and not torch.cuda.is_available():
        raise SystemExit("no CUDA GPU was found: run this benchmark on a machine that has one, or with --tiny")
    plan = tiny_plan() if arguments.tiny else full_plan()
    names = arguments.model or list(plan.models)
    if unknown := [name for name in names if name not in plan.models]:
        parser.error(f"--model {' '.join(unknown)} is not among {', '.join(plan.models)}")
    end = time.monotonic() + 60 * arguments.minutes
    arguments.out.mkdir(parents=True, exist_ok=True)
    interpret(plan.device)
    options = {"mp_context": get_context("spawn"), "initializer": interpret, "initargs": (plan.device,)}
    table, seen = dict(programs.TUNED), set()
    with ProcessPoolExecutor(plan.workers, **options) as pool:
        trials = Trials(arguments.out, plan, pool)
        for name in names:
            print(f"{name}:", flush=True)
            by_key: dict[str, Case] = {}
            for case in cases(plan.models[name], plan.steps):
                by_key.setdefault(key_of(case, plan.device), case)
            shapes = {key.rpartition(" ")[0]: None for key in by_key}
            for shape in [each for each in shapes if each not in seen]:
                if time.monotonic() >= end:
                    print("there was no time for more: start the command again", flush=True)
                    return
                seen.add(shape)
                keys = [f"{shape} {rows}" for rows in ROWS]
                table |= search({key: by_key[key] for key in keys if key in by_key}, plan, trials)
                write_table(arguments.out, table)
    print("nothing is left", flush=True)


if __name__ == "__main__":
    main()
