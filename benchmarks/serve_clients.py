"""Images per second and latency of `arimage serve` with many clients, each of which asks for one image after another.

python benchmarks/serve_clients.py --clients 50 --requests 2
python benchmarks/serve_clients.py --clients 200 --root-path /images --ssl-certfile cert.pem --ssl-keyfile key.pem
python benchmarks/serve_clients.py --against CHECKOUT    # in turn with the arimage of another checkout, in processes
of their own
"""

import argparse
import json
import os
import socket
import ssl
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any


def measure(
    model: str,
    dtype: str,
    clients: int,
    requests: int,
    settings: int,
    decoding: str | None,
    root_path: str,
    ssl_certfile: str | None,
    ssl_keyfile: str | None,
) -> dict:
    """Images per second, and the latency in seconds of the median and the 95th of 100 requests."""
    import httpx

    from arimage.app.engine.engine import Engine
    from arimage.app.engine.models import load_models
    from arimage.app.engine.types import Limits
    from arimage.app.server.app import build_server
    from arimage.app.server.uvicorn_server import Server
    from arimage.eval.runs.prompts import prompt_file, read_prompts

    prompts = [row["prompt"] for row in read_prompts(prompt_file("emoji"))]
    engine = Engine(load_models([model], "cpu", dtype), Limits(queue=2 * clients))
    # Another checkout may have neither.
    certificate: Any = {"certificate": (ssl_certfile, ssl_keyfile)} if ssl_certfile and ssl_keyfile else {}
    path: Any = {"root_path": root_path} if root_path else {}
    # Clients share one context, which takes long to set up.
    verify = ssl.create_default_context(cafile=ssl_certfile) if certificate else False
    app = build_server(engine, **path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = Server(app, engine, "127.0.0.1", port, log_level="error", **certificate)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    url = f"http{'s' if certificate else ''}://127.0.0.1:{port}{root_path}/v1/images/generations"
    seconds, start = [], threading.Barrier(clients + 1)

    def ask(number: int) -> None:
        with httpx.Client(timeout=None, verify=verify) as client:
            start.wait()
            for k in range(requests):
                image = number * requests + k
                body = {"prompt": prompts[image % len(prompts)], "seed": image, "decoding": decoding}
                if settings > 1:
                    body["top_k"] = 20 + image % settings
                began = time.perf_counter()
                client.post(url, json=body).raise_for_status()
                seconds.append(time.perf_counter() - began)

    # Sets up what later requests find.
    httpx.post(url, json={"prompt": "a red heart"}, timeout=None, verify=verify).raise_for_status()
    threads = [threading.Thread(target=ask, args=(number,)) for number in range(clients)]
    for each in threads:
        each.start()
    start.wait()
    began, cpu = time.perf_counter(), time.process_time()
    for each in threads:
        each.join()
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    # What stops the server when its engine fails, also in another checkout.
    assert engine.on_failure is not None
    engine.on_failure()
    thread.join()
    engine.close()
    if len(seconds) < clients * requests:
        raise RuntimeError(f"{clients * requests - len(seconds)} requests failed")
    quantiles = statistics.quantiles(seconds, n=20)
    return {
        "images/s": len(seconds) / wall,
        "images/CPU s": len(seconds) / cpu,
        "p50": statistics.median(seconds),
        "p95": quantiles[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="emoji-llamagen")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--decoding", help="by default the model's")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--requests", type=int, default=2, help="of each client")
    parser.add_argument(
        "--settings", type=int, default=1, help="how many different sampling settings the requests have"
    )
    parser.add_argument("--root-path", default="", help="as a proxy shows the server")
    parser.add_argument("--ssl-certfile", help="of a certificate for 127.0.0.1")
    parser.add_argument("--ssl-keyfile")
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--rounds", type=int, default=3, help="with --against")
    arguments = parser.parse_args()
    if arguments.against is None:
        names = ("model", "dtype", "clients", "requests", "settings", "decoding")
        names += ("root_path", "ssl_certfile", "ssl_keyfile")
        print(json.dumps(measure(**{name: getattr(arguments, name) for name in names})))
        return
    folders = [Path(__file__).resolve().parents[1], arguments.against.resolve()]
    words = sys.argv[1:]
    at = words.index("--against")
    command = [sys.executable, __file__, *words[:at], *words[at + 2 :]]
    found = {folder: [] for folder in folders}
    for k in range(arguments.rounds):
        for folder in folders[:: 1 if k % 2 else -1]:
            environment = {**os.environ, "PYTHONPATH": str(folder)}
            said = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
            found[folder].append(json.loads(said.splitlines()[-1]))
            print(folder, found[folder][-1], file=sys.stderr)
    for name in found[folders[0]][0]:
        medians = [statistics.median(each[name] for each in found[folder]) for folder in folders]
        ratio = statistics.median(
            mine[name] / theirs[name] for mine, theirs in zip(found[folders[0]], found[folders[1]], strict=True)
        )
        print(f"{name:13} {medians[0]:8.3f}   against {medians[1]:8.3f}   x {ratio:.2f}")


if __name__ == "__main__":
    main()
