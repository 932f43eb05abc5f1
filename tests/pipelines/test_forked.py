"""A process that is forked from one that has generated generates the same, in one thread."""

import os
import subprocess
import sys

import pytest


SCRIPT = """
import os, sys
import torch
from pipelines.llamagen import tiny as tiny_llamagen

torch.set_num_threads(2)
pipe = tiny_llamagen.text_pipeline()

def generate():
    return pipe("a red heart", generator=torch.Generator().manual_seed(0), output_type="pt").images

# Large enough for both threads.
torch.randn(2048, 2048) @ torch.randn(2048, 2048)
expected = generate()
child = os.fork()
if child == 0:
    torch.randn(2048, 2048) @ torch.randn(2048, 2048)
    same = [torch.allclose(generate(), expected, atol=1e-4) for _ in range(2)]
    os._exit(0 if all(same) and torch.get_num_threads() == 1 else 3)
assert torch.get_num_threads() == 2
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_process_generates_in_one_thread_and_says_so_once():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("one thread") == 1
