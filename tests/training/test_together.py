"""Processes that train together."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from training.train_together import SETTINGS, Mean

from arimage.training.loop import fit
from arimage.training.processes import batch_generator


@pytest.mark.slow
def test_torchrun_trains_as_one(tmp_path):
    script = Path(__file__).with_name("train_together.py")
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script, tmp_path]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    subprocess.run(run, env=environment, check=True, capture_output=True)
    check_batches(tmp_path)


def check_batches(folder):
    """Two processes took the batches of both. `tokens/test_task.py` starts them without torchrun, in less time."""
    # Step 0 of two processes takes the batches 0 and 1, step 1 the batches 2 and 3, and so on.
    points = [
        torch.cat([torch.rand(4, 3, generator=batch_generator(7, 2 * step + rank)) for rank in (0, 1)])
        for step in range(25)
    ]
    alone = Mean(torch.stack(points))
    fit(alone, SETTINGS, folder / "alone")
    for rank in (0, 1):
        # Those of torchrun round to bfloat16 where that is fast, this one does not.
        state = torch.load(folder / f"{rank}.pt", weights_only=True)
        torch.testing.assert_close(state, alone.state_dict(), atol=1e-2, rtol=0)
    assert (folder / "rank0" / "checkpoint.pt").exists() and not (folder / "rank1" / "checkpoint.pt").exists()


def test_what_trains_in_one_process_is_refused_under_torchrun(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="in one process: start it without torchrun"):
        fit(Mean(), SETTINGS, tmp_path)
