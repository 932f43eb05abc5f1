"""Two processes that train together, as `torchrun` starts them, but after one import for both.

Its words are the names of modules, whose last one has a `main`, then `--`, then what that `main` reads in `sys.argv`.
"""

import importlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import torch


def together(modules, *words):
    """Call the `main` of the last of `modules` in both processes, and return what they print.

    Raises:
        subprocess.CalledProcessError: if one of them fails.
    """
    folders = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, *modules, "--", *map(str, words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise AssertionError(done.stderr)
    return done.stdout


if __name__ == "__main__":
    # As in this suite: float32 on every CPU.
    for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"):
        setattr(torch.cpu, name, lambda: False)
    end = sys.argv.index("--")
    *_, last = map(importlib.import_module, sys.argv[1:end])
    sys.argv = ["arimage", *sys.argv[end + 1 :]]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    child = os.fork()
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = "0" if child else "1"
    status = 0
    try:
        last.main()
    except SystemExit as leaving:
        status = leaving.code or 0
    if child:
        status = status or os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    sys.exit(status)
