"""Seconds until `arimage generate`, `serve` and `app` have an image: alone, and next to processes that keep all cores
busy; with threads that sleep while they wait, as the command line sets it, and with threads that spin, as in PyTorch.

python benchmarks/busy_machine.py
"""

import argparse
import contextlib
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path


# How often a thread of GNU's OpenMP looks for work before it sleeps, if nobody sets OMP_WAIT_POLICY.
WAITS = {"sleep": {}, "spin": {"GOMP_SPINCOUNT": "300000"}}
BUSY = "import torch\na = torch.rand(512, 512)\nwhile True: a @ a"
PROMPT = "a red heart"


def environment(wait: str) -> dict[str, str]:
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    return kept | {"HF_HUB_OFFLINE": "1"} | WAITS[wait]


def arimage(*words: str) -> list[str]:
    return [sys.executable, "-m", "arimage", *words]


@contextlib.contextmanager
def running(command: list[str], env: dict[str, str]) -> Iterator[None]:
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def wait_for(port: int) -> None:
    for _ in range(600):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.2)
    raise RuntimeError("it did not start within two minutes")


def times(call: Callable[[], object], runs: int) -> list[float]:
    """Seconds of calls, after one that sets up what later ones find."""
    call()
    seconds = []
    for _ in range(runs):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return seconds


def generate(wait: str, runs: int) -> list[float]:
    """The seconds that the command prints, without its start."""
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        command = arimage("generate", PROMPT, "--out", str(Path(folder, "image.png")))
        for _ in range(runs):
            said = subprocess.run(command, env=environment(wait), check=True, capture_output=True, text=True).stderr
            seconds.append(sum(map(float, re.findall(r"([\d.]+) s (?:decoding|pixels)", said))))
    return seconds


def serve(wait: str, runs: int) -> list[float]:
    """Seconds of a request."""
    import httpx

    port = free_port()
    with running(arimage("serve", "--port", str(port)), environment(wait)), httpx.Client(timeout=None) as client:
        wait_for(port)
        url = f"http://127.0.0.1:{port}/v1/images/generations"
        return times(lambda: client.post(url, json={"prompt": PROMPT}).raise_for_status(), runs)


def app(wait: str, runs: int) -> list[float]:
    """Seconds of the demo's endpoint, whose previews take a part."""
    from gradio_client import Client

    port = free_port()
    with running(arimage("app", "--port", str(port)), environment(wait)):
        wait_for(port)
        client = Client(f"http://127.0.0.1:{port}/", verbose=False)
        return times(lambda: client.predict(PROMPT, api_name="/generate"), runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--busy", type=int, default=os.cpu_count(), help="other processes, each of which multiplies")
    arguments = parser.parse_args()
    print("command   threads  alone                next to other work")
    for command in (generate, serve, app):
        for wait in WAITS:
            alone = command(wait, arguments.runs)
            with contextlib.ExitStack() as others:
                for _ in range(arguments.busy):
                    others.enter_context(running([sys.executable, "-c", BUSY], {**os.environ, "OMP_NUM_THREADS": "1"}))
                busy = command(wait, arguments.runs)
            cells = [f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})" for each in (alone, busy)]
            print(f"{command.__name__:9} {wait:8} {cells[0]:20} {cells[1]}", flush=True)


if __name__ == "__main__":
    main()
