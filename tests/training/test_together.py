"""Processes that train together."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from training.train_together import SETTINGS, Mean

from arimage.training.loop import fit
from arimage.training.muon import Muon, orthogonalised
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
    with pytest.raises(ValueError, match="trains in one process: start it without torchrun"):
        fit(Mean(), SETTINGS, tmp_path)


@pytest.mark.parametrize("shape", [(8, 20), (20, 8), (12, 12)])
def test_an_orthogonalised_matrix_keeps_its_singular_vectors(shape):
    matrices = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    near = left.mT @ orthogonalised(matrices) @ right.mT
    values = near.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(near, values.diag_embed(), atol=1e-4, rtol=0)
    assert 0.3 < values.min() and values.max() < 1.3


def test_muon_agrees_with_that_of_torch():
    ours, theirs = (nn.Parameter(torch.randn(6, 9, generator=torch.Generator().manual_seed(1))) for _ in range(2))
    settings = {"lr": 0.01, "weight_decay": 0.05}
    optimizers = [Muon([ours], **settings), torch.optim.Muon([theirs], adjust_lr_fn="match_rms_adamw", **settings)]
    for step in range(4):
        gradient = torch.randn(6, 9, generator=torch.Generator().manual_seed(10 + step))
        for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
            parameter.grad = gradient.clone()
            optimizer.step()
    # torch computes in bfloat16.
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-2)
