"""Ratios of times on a CPU, in turn, with medians and ranges; the processor is named first. About 10 minutes on two
quiet cores for all parts:

- command: `arimage generate "a red heart"` to the file, next to an older build
- windows: packaged models next to an older build, and the default decoding next to `ar`, from 1 to 16 images
- llamagen, var: next to the code of their authors, also in int8 (`compare_llamagen.py`, `compare_var.py`)
- transformers: Janus-Pro-1B and GLM-Image, four layers, next to transformers (`compare_transformers.py`)
- fid: a FID with its standard error next to one distance and to torch-fidelity (`compare_fidelity.py`)

An older build is a checkout, such as one made by `git worktree add BEFORE COMMIT`. Parts whose checkout is not given
are left out.

python benchmarks/cpu_day.py --before BEFORE --llamagen LLAMAGEN_CHECKOUT --var VAR_CHECKOUT
python benchmarks/cpu_day.py --only command --before BEFORE
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from side_by_side import Run, print_runs, spread


ROOT = Path(__file__).parents[1]
PROMPTS = ["a red heart", "an owl", "pizza", "a fox", "a blue book", "clown face", "green apple", "cat face"]
FREE = {"temperature": 1.0, "top_k": 0, "guidance_scale": 1.0}
# Generates with the build on the path: for each line, the arguments as JSON, prints seconds and passes.
WORKER = """
import json, sys, time, torch
from arimage import AutoPipeline
pipe = AutoPipeline.from_pretrained(sys.argv[1])
pipe.set_progress_bar_config(disable=True)
for line in sys.stdin:
    call = json.loads(line)
    seed = torch.Generator().manual_seed(0)
    cpu, wall = time.process_time(), time.perf_counter()
    out = pipe(**call, generator=seed)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(wall, cpu, out.stats.forward_passes, flush=True)
"""


def environment(build: Path) -> dict[str, str]:
    """That of the build in a checkout, with its recipes, one thread and no network."""
    path = os.pathsep.join(map(str, [build, build / "recipes" / "emoji", build / "recipes" / "icons"]))
    return os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


class Worker:
    """A process that generates with the model `name` of a build."""

    def __init__(self, build: Path, name: str):
        command = [sys.executable, "-c", WORKER, name]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, env=environment(build), cwd=build, text=True, **pipes)

    def run(self, call: dict) -> Run:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{json.dumps(call)}\n")
        self._process.stdin.flush()
        wall, cpu, passes = self._process.stdout.readline().split()
        return Run(float(wall), float(cpu), 1, [float(passes)])

    def close(self) -> None:
        self._process.communicate()


def compare(title: str, calls: dict[str, tuple[Worker, dict]], baseline: str, repeats: int) -> None:
    """Print seconds per call, forward passes, and the time next to that of `baseline` in the same turn."""
    runs: dict[str, list[Run]] = {name: [] for name in calls}
    for repeat in range(-1, repeats):
        for name, (worker, call) in calls.items():
            run = worker.run(call)
            if repeat >= 0:
                runs[name].append(run)
    columns = ["", "s, wall", "s, CPU", "forward passes", f"times as fast as {baseline}, CPU"]
    print(f"\n{title}\n\n| {' | '.join(columns)} |\n|---|{'---:|' * (len(columns) - 1)}")
    for name, own in runs.items():
        ratios = [other.cpu / mine.cpu for mine, other in zip(own, runs[baseline], strict=True)]
        cells = [name, spread([run.wall for run in own], 2), spread([run.cpu for run in own], 2)]
        cells += [f"{statistics.median(run.memory[0] for run in own):.0f}", spread(ratios, 2)]
        print(f"| {' | '.join(cells)} |", flush=True)


def command(before: Path, repeats: int) -> None:
    runs: dict[str, list[Run]] = {"before": [], "now": []}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(-1, repeats):
            for name, build in (("before", before), ("now", ROOT)):
                words = [sys.executable, "-m", "arimage", "generate", PROMPTS[0], "--out", f"{folder}/heart.png"]
                start, began = time.perf_counter(), os.times()
                subprocess.run(words, env=environment(build), cwd=build, check=True, capture_output=True)
                ended = os.times()
                cpu = ended.children_user + ended.children_system - began.children_user - began.children_system
                if repeat >= 0:
                    runs[name].append(Run(time.perf_counter() - start, cpu, 1, []))
    print('\n`arimage generate "a red heart"`, from the start of the command to its end')
    print_runs(runs, "command", ["before"])


def windows(before: Path, repeats: int) -> None:
    workers = {name: Worker(build, "emoji-arpg") for name, build in (("before", before), ("now", ROOT))}
    calls = {name: (worker, {"prompt": PROMPTS}) for name, worker in workers.items()}
    compare("emoji-arpg, 8 images, its defaults", calls, "before", repeats)
    for worker in workers.values():
        worker.close()
    worker = Worker(ROOT, "emoji-llamagen")
    for batch in (1, 4, 8, 16):
        call = {"prompt": (2 * PROMPTS)[:batch], **FREE}
        calls = {"ar": (worker, call | {"decoding": "ar"}), "the default": (worker, call)}
        compare(f"emoji-llamagen, {batch} images, temperature 1, top_k 0, guidance 1", calls, "ar", repeats)
    worker.close()


def script(name: str, *options: str) -> None:
    """Run one of the other scripts of this folder."""
    print(f"\n{name} {' '.join(options)}", flush=True)
    subprocess.run([sys.executable, str(Path(__file__).with_name(name)), *options], check=True)


def processor() -> str:
    """The name of the processor, and which of the instructions it has that decide about speed."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    values = {line.partition(":")[0].strip(): line.partition(":")[2].strip() for line in lines}
    fast = [
        name for name in ("avx2", "avx512_vnni", "avx512_bf16", "amx_tile") if name in values.get("flags", "").split()
    ]
    return f"{values.get('model name', 'unknown')}: {', '.join(fast)}, load {os.getloadavg()[0]:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("command", "windows", "llamagen", "var", "transformers", "fid")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--before", type=Path, help="a checkout of an older build")
    parser.add_argument("--llamagen", help="a clone of https://github.com/FoundationVision/LlamaGen")
    parser.add_argument("--var", help="a clone of https://github.com/FoundationVision/VAR")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    print(processor(), flush=True)
    repeats = str(arguments.repeats)
    one = ("--threads", "1", "--device", "cpu", "--repeats", repeats)
    if arguments.before is not None:
        before = arguments.before.resolve()
        if "command" in arguments.only:
            command(before, arguments.repeats)
        if "windows" in arguments.only:
            windows(before, arguments.repeats)
    if "llamagen" in arguments.only and arguments.llamagen:
        options = ("--decoding", "ar", "--dtype", "float32", "bfloat16", "--batch-size", "1", "4", "--int8")
        script("compare_llamagen.py", "--reference", arguments.llamagen, *options, "--steps", "32", *one)
    if "var" in arguments.only and arguments.var:
        script("compare_var.py", "--reference", arguments.var, *one)
    if "transformers" in arguments.only:
        options = ("--model", "janus-pro-1b", "glm-image", "--layers", "4", "--dtype", "bfloat16", "--int8")
        script("compare_transformers.py", *options, "--decoding", "ar", "--steps", "24", *one)
    if "fid" in arguments.only:
        script("compare_fidelity.py", "--repeats", repeats)


if __name__ == "__main__":
    main()
