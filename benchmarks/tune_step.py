"""Searches for the fastest settings of the kernels of a step on a GPU: blocks, parts of the channels that are summed
apart (splits of K), warps and stages, for the shapes of published models at one token and at windows of 16 and 32.

The operations and their shapes are those that steps of the models call on fake CUDA tensors. Every setting is changed
alone, then all together that helped; results that differ from the definition in torch are no candidates. Settings that
a sum depends on are searched at the first number of rows and kept for the others, so that no row depends on how many
there are.

DIR/trials.jsonl has every trial as soon as it was timed, and DIR/tuned.json the table, which also has what is in use.
Copy that to arimage/kernels/step/tuned.json to use it. Start the command again to go on.

python benchmarks/tune_step.py --out DIR              # for six minutes
python benchmarks/tune_step.py --out DIR --tiny       # tries it in Triton's interpreter, without a GPU
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from functools import partial
from itertools import product
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


# By operation of the table: what a sum depends on, and the others.
WIDTHS = {"block_width": (128, 512), "parts": (2, 8), "num_warps": (8,)}
SETTINGS: dict[str, tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]] = {
    "linear": (WIDTHS, {"block_out": (16, 32, 64), "stages": (2, 3, 4, 6)}),
    "qkv": (WIDTHS, {"block_pairs": (8, 16, 32), "stages": (2, 3, 4, 6)}),
    "attention": ({"block_keys": (32, 64), "parts": (2, 8), "num_warps": (8,)}, {"stages": (2, 3, 4)}),
    "norm_and_add": ({"num_warps": (4, 16)}, {}),
    "modulated": ({"block_out": (16, 32), "block_width": (64, 128), "num_warps": (8,)}, {"stages": (2, 3, 4)}),
}
TINY_SETTINGS = {
    "linear": ({"parts": (8,)}, {"block_out": (32,)}),
    "qkv": ({"block_width": (128,)}, {"block_pairs": (8,)}),
    "attention": ({"block_keys": (32,)}, {"stages": (2,)}),
    "norm_and_add": ({"num_warps": (4,)}, {}),
    "modulated": ({"block_out": (32,)}, {"stages": (2,)}),
}
# The folders of the operations.
FOLDERS = {
    "linear": "linear",
    "qkv": "qkv",
    "unturned": "qkv",
    "queries": "qkv",
    "attention": "attention",
    "normed_attention": "attention",
    "norm_and_add": "norm_and_add",
    "modulated": "modulated",
}
ROWS = (8, 16, 32, 64)
# Those that are slowest next to the speed of memory; then all others.
FIRST = ("janus-pro-7b", "emu3-gen", "glm-image", "cosmos-4b", "llamagen-xl-384")
STEPS = (("ar", 1), ("sjd-coupled:window=16", 1), ("sjd-coupled:window=32", 1), ("ar", 8))
# Of processes that compile, each with arguments of its own on the GPU.
WORKERS = 8
# The least gain that is worth other settings.
GAIN = 0.98
# More copies of its arguments than this no operation needs.
COPIES = 64


class Plan(NamedTuple):
    """What is tuned: of `models` the steps of `steps`, each a decoding and a batch size."""

    device: torch.device
    settings: dict
    models: dict[str, Published]
    steps: tuple[tuple[str, int], ...]
    workers: int


def full_plan() -> Plan:
    models = {name: MODELS[name] for name in (*FIRST, *MODELS)}
    return Plan(torch.device("cuda"), SETTINGS, models, STEPS, min(os.cpu_count() or 1, WORKERS))


def tiny_plan() -> Plan:
    """With norms of heads, with norms before sums, and modulated."""
    narrow = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
    glm = MODELS["glm-image"]
    rope = {**glm.tiny["rope_parameters"], "mrope_section": [2, 3, 3]}
    models = {
        "glm-image": Published(1, partial(glm.build, **{**glm.tiny, **narrow, "rope_parameters": rope})),
        "rar-b-256": Published(1, partial(rar, grid_size=4, vocab_size=64, **narrow)),
    }
    return Plan(torch.device("cpu"), TINY_SETTINGS, models, (("ar", 1), ("sjd-coupled:window=9", 1)), 1)


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


def cases(plan: Plan, names: list[str]) -> Iterator[tuple[str, Case]]:
    """Every operation of the steps of the models, with the model's name."""
    for name, (text, batch) in product(names, plan.steps):
        decoding = decoding_from_text(text)
        with step_cost.fake_cuda():
            bound = plan.models[name].build(min(plan.models[name].layers, 2))(batch)
            if decoding.supports(bound.model) is not None:
                continue
            state = step_cost.half_way(bound, decoding, batch)
            with Recorder() as recorder:
                decoding.step(state)
        for case in recorder.cases.values():
            yield name, case


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

    is_like = lambda value: isinstance(value, Like)  # noqa: E731

    def argument(name: str, value: Any) -> Any:
        if isinstance(value, list | tuple) and not is_like(value):
            return [tensor(name, each) for each in value]
        return tensor(name, value) if is_like(value) else value

    return tuple(argument(name, value) for name, value in given.items())


def fits(operation: str, case: Case, name: str, value: int) -> bool:
    """Whether blocks divide what has no rest."""
    if name == "block_pairs":
        return case.arguments["head_dim"] // 2 % value == 0
    if operation == "modulated" and name == "block_width":
        return case.arguments["weight"].shape[1] % value == 0
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


def compile_trial(case: Case, key: str, settings: dict[str, int], device: torch.device) -> None:
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

    def microseconds(self, settings: dict[str, int]) -> float:
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


class Log:
    """The trials in a folder."""

    def __init__(self, folder: Path):
        self.folder, self._file = folder, folder / "trials.jsonl"
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        # A run that was interrupted leaves half a line at most.
        rows = [json.loads(line) for line in lines if line.endswith("}")]
        self.chosen: dict[str, dict] = {row["key"]: row for row in rows if row.get("chosen")}

    def add(self, row: dict) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(row) + "\n")
        if row.get("chosen"):
            self.chosen[row["key"]] = row
            self.write_table()

    def fixed(self, key: str) -> dict[str, int] | None:
        """The settings that sums depend on, as another number of rows has chosen them; None if there is none."""
        shape = key.rpartition(" ")[0]
        others = [row["fixed"] for other, row in self.chosen.items() if other.rpartition(" ")[0] == shape]
        return others[0] if others else None

    def write_table(self) -> None:
        """With the settings that sums depend on for every number of rows."""
        table = dict(programs.TUNED)
        for key, row in self.chosen.items():
            shape = key.rpartition(" ")[0]
            for rows in ROWS:
                if f"{shape} {rows}" not in self.chosen:
                    table[f"{shape} {rows}"] = row["fixed"]
            table[key] = row["settings"]
        table = {key: settings for key, settings in sorted(table.items()) if settings}
        unfinished = self.folder / "tuned.part"
        unfinished.write_text(json.dumps(table, indent=1) + "\n")
        os.replace(unfinished, self.folder / "tuned.json")


def search(case: Case, key: str, model: str, plan: Plan, log: Log, pool: ProcessPoolExecutor) -> None:
    """Try settings of an operation, and log the fastest."""
    operation = key.split()[1]
    sums, others = plan.settings[operation]
    fixed = log.fixed(key)
    start, searched = fixed or {}, others if fixed is not None else sums | others
    changes = [(name, value) for name, values in searched.items() for value in values]
    trials = [start, *(start | {n: v} for n, v in changes if fits(operation, case, n, v))]
    wait([pool.submit(compile_trial, case, key, settings, plan.device) for settings in trials])
    bench, times = Bench(case, key, plan.device), []

    def time_it(settings: dict[str, int]) -> None:
        row = {"key": key, "model": model, "settings": settings}
        try:
            microseconds = bench.microseconds(settings)
        except Exception as error:
            # Most need more shared memory than there is.
            log.add(row | {"error": f"{type(error).__name__}: {error}"})
        else:
            times.append((microseconds, settings))
            log.add(row | {"us": microseconds})

    for settings in trials:
        time_it(settings)
    if not times or times[0][1] != start:
        print(f"{key}: does not run", flush=True)
        return
    before = times[0][0]
    # The slowest first: the best value of a setting stays.
    better = [settings for us, settings in sorted(times[1:], key=lambda each: -each[0]) if us < before]
    together = {name: value for settings in [start, *better] for name, value in settings.items() if name not in start}
    if len(together) > 1:
        time_it(start | together)
    best, settings = min(times, key=lambda each: each[0])
    if best > GAIN * before:
        best, settings = before, start
    kept = {name: value for name, value in settings.items() if name in sums}
    log.add(
        {"key": key, "model": model, "chosen": True, "settings": settings, "fixed": kept, "us": best, "was": before}
    )
    print(f"{key}: {before:.1f} -> {best:.1f} us, {settings or 'as it was'}", flush=True)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--minutes", type=float, default=6, help="after which it begins no other operation")
    parser.add_argument("--model", nargs="+", help="published models, by default all")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    if not arguments.tiny and not torch.cuda.is_available():
        raise SystemExit("there is no CUDA GPU here: run this benchmark on a machine that has one, or with --tiny")
    plan = tiny_plan() if arguments.tiny else full_plan()
    names = arguments.model or list(plan.models)
    if unknown := [name for name in names if name not in plan.models]:
        parser.error(f"--model {' '.join(unknown)} is not among {', '.join(plan.models)}")
    end = time.monotonic() + 60 * arguments.minutes
    arguments.out.mkdir(parents=True, exist_ok=True)
    log = Log(arguments.out)
    interpret(plan.device)
    options = {"mp_context": get_context("spawn"), "initializer": interpret, "initargs": (plan.device,)}
    with ProcessPoolExecutor(plan.workers, **options) as pool:
        for model, case in cases(plan, names):
            if time.monotonic() >= end:
                print("there was no time for more: start the command again", flush=True)
                return
            key = key_of(case, plan.device)
            if key not in log.chosen:
                search(case, key, model, plan, log, pool)
    print("nothing is left", flush=True)


if __name__ == "__main__":
    main()
