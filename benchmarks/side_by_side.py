"""What the comparisons with other implementations share: options, runs in turn, and tables of medians and ranges."""

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from diffusers.utils import logging

from arimage.decoding import Decoding, Sampling, TokenModel, decode, decoding_from_text
from arimage.eval.bench.measure import machine
from arimage.eval.bench.memory import peak_memory, reset_peak_memory


class Run(NamedTuple):
    """One call: seconds of the wall and of the CPU (all threads) per unit, how many units it had, and its peak of
    memory in MiB, weights included; empty where the system does not report it."""

    wall: float
    cpu: float
    units: int
    memory: list[float]


def make_parser(description: str | None, repeats: int = 3) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16"), default=["float32"])
    parser.add_argument("--batch-size", nargs="+", type=int, default=[1], help="images at a time")
    parser.add_argument(
        "--repeats", type=int, default=repeats, help="timed calls of each, after one that is not timed"
    )
    parser.add_argument("--threads", type=int, help="of torch; by default as many as it takes")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser


def add_sampling(parser: argparse.ArgumentParser, guidance_scale: float, top_k: int, top_p: float = 1.0) -> None:
    parser.add_argument("--guidance-scale", type=float, default=guidance_scale)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=top_k, help="0 keeps all tokens")
    parser.add_argument("--top-p", type=float, default=top_p)


def add_decodings(parser: argparse.ArgumentParser) -> None:
    default = ["ar", "sjd-coupled:window=8", "sjd-coupled:window=32"]
    parser.add_argument("--decoding", nargs="+", default=default, help="of ours, as name:setting=value,...")


def decodings_of(arguments: argparse.Namespace) -> dict[str, Decoding]:
    return {text: decoding_from_text(text) for text in arguments.decoding}


def sampling_of(arguments: argparse.Namespace) -> Sampling:
    names = ("guidance_scale", "temperature", "top_k", "top_p")
    return Sampling(**{name: getattr(arguments, name) for name in names})


def begin(arguments: argparse.Namespace) -> torch.device:
    """Set the threads, print the machine, and return the device."""
    logging.set_verbosity_error()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    found = machine(device)
    print(
        f"{found['device']}, {found['threads']} threads, torch {found['torch']}. Medians of {arguments.repeats} with "
        "ranges."
    )
    return device


def cases(arguments: argparse.Namespace) -> list[tuple[torch.dtype, int]]:
    """The dtypes and batch sizes to compare."""
    return [(getattr(torch, name), batch) for name in arguments.dtype for batch in arguments.batch_size]


def add_reference(checkout: str, file: str) -> None:
    """Let the modules of a checkout, which has `file`, be imported. What they use that is deprecated is not our
    concern."""
    if not (Path(checkout) / file).is_file():
        raise SystemExit(f"--reference is {checkout}, which has no {file}: give a clone of the original's repository")
    sys.path.insert(0, checkout)
    warnings.simplefilter("ignore", FutureWarning)


def in_turn(calls: dict[str, Callable[[], int]], repeats: int, device: torch.device) -> dict[str, list[Run]]:
    """The timed runs of every call, which take turns. A call returns how many units it had, such as forward passes,
    the same each time."""
    runs = {name: [] for name in calls}
    for repeat in range(-1, repeats):
        for name, call in calls.items():
            reset_peak_memory(device)
            _wait(device)
            cpu, wall = time.process_time(), time.perf_counter()
            units = call()
            _wait(device)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            if repeat >= 0:
                runs[name].append(Run(wall / units, cpu / units, units, peak_memory(device)))
    return runs


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def spread(values: list[float], digits: int = 1) -> str:
    """The median of some values, and their range."""
    median, low, high = (f"{of(values):.{digits}f}" for of in (statistics.median, min, max))
    return f"{median} ({low} to {high})"


def print_runs(runs: dict[str, list[Run]], unit: str, baselines: list[str]) -> None:
    """A table of milliseconds per unit, and of the wall and CPU time over that of each baseline in the same turn."""
    columns = ["", f"{unit}s", f"ms per {unit}, wall", "CPU", "peak MiB"]
    columns += [f"{kind} / {name}" for name in baselines for kind in ("wall", "CPU")]
    print(f"\n| {' | '.join(columns)} |\n|---|{'---:|' * (len(columns) - 1)}")
    for name, own in runs.items():
        memory = [peak for run in own for peak in run.memory]
        cells = [name, str(own[0].units)]
        cells += [spread([1000 * run.wall for run in own]), spread([1000 * run.cpu for run in own])]
        cells.append(f"{statistics.median(memory):.0f}" if memory else "")
        for baseline in baselines:
            turns = list(zip(own, runs[baseline], strict=True))
            cells += [spread([mine.wall / other.wall for mine, other in turns], 2)]
            cells += [spread([mine.cpu / other.cpu for mine, other in turns], 2)]
        print(f"| {' | '.join(cells)} |", flush=True)


def guided(logits: torch.Tensor, scale: float) -> torch.Tensor:
    """Logits [B, Q, V] under guidance from those of the branches [G, B, Q, V]."""
    return logits[0] if len(logits) == 1 else logits[1] + scale * (logits[0] - logits[1])


def greedy_gap(logits: torch.Tensor, tokens: torch.LongTensor) -> float:
    """By how many standard deviations the logits [B, Q, V] of greedy tokens [B, Q] are at most below the largest; 0
    where all tokens are greedy here, too."""
    return float((logits.amax(-1) - logits.gather(-1, tokens[..., None])[..., 0]).max() / logits.std())


@torch.no_grad()
def token_gap(model: TokenModel, tokens: torch.LongTensor, scale: float) -> float:
    """`greedy_gap` of the first greedy tokens [B, Q] of another implementation."""
    cache, first = model.prefill(len(tokens))
    positions = torch.arange(tokens.shape[1] - 1, device=tokens.device).expand(len(tokens), -1)
    later = model.forward(tokens[:, :-1], positions, cache)
    return greedy_gap(guided(torch.cat([first[:, :, None], later], dim=2), scale), tokens)


def check_gap(gap: float, count: int, dtype: torch.dtype) -> None:
    """Print the gap of `count` greedy tokens, and refuse one that rounding does not explain."""
    print(f"{count} greedy tokens of the other: at most {gap:.4f} standard deviations below the largest logit here.")
    if not gap <= (1e-3 if dtype == torch.float32 else 0.2):
        raise SystemExit("the two do not compute the same: there is nothing to compare")


@torch.no_grad()
def run_steps(bind: Callable[[], TokenModel], decoding: Decoding, sampling: Sampling, batch: int, steps: int) -> int:
    """Bind a model and decode with it for `steps` forward passes, or until all images are finished. Returns the
    passes."""
    model = bind()
    seeds = torch.arange(batch, device=model.device)
    state = decode(model, decoding, sampling, seeds, lambda _, passes: passes >= steps)
    return state.forward_passes
