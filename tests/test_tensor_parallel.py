"""Language models that transformers divides over processes generate the tokens of one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


SCRIPT = Path(__file__).with_name("tensor_parallel.py")


@pytest.mark.slow
def test_two_processes_generate_the_tokens_of_one(tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(SCRIPT.parent), *sys.path])}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    for command, name in (([sys.executable], "one"), (torchrun, "two")):
        subprocess.run([*command, str(SCRIPT), str(tmp_path / name)], env=environment, check=True)
    one, *two = [json.loads((tmp_path / name).read_text()) for name in ("one.0", "two.0", "two.1")]
    for family, rows in (("janus", 64), ("glm_image", 64)):
        assert one.pop(f"{family} rows") == rows
        assert [rank.pop(f"{family} rows") for rank in two] == [rows // 2, rows // 2]
    assert len(one) == 4 and all(rank == one for rank in two)
