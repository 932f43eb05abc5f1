"""What each of two processes runs: in one of them a loss is not finite, and later a process that prepares batches is
lost."""

import sys
from pathlib import Path

import torch
from torch import nn

from arimage.training import loop
from arimage.training.loop import OptimizerSettings, fit
from arimage.training.processes import join_processes, processes


class Uneven(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.zeros(()))
        self.random = []

    def loss(self, step):
        second = processes()[0] == 1
        self.random.append(float(torch.rand(())))
        if second and step == 6:
            raise ChildProcessError("a process that prepares batches was ended")
        self.seen += 1
        loss = self.weight.square().mean() * (torch.nan if second and step == 3 else 1)
        # Not every process has every figure.
        return loss, {"loss": loss.detach()} | ({"of the second": loss.detach()} if second else {})

    def report(self, step, out):
        return {}


def main():
    loop.plot_log = lambda log, path: None
    join_processes()
    task, out = Uneven(), Path(sys.argv[-1])
    try:
        fit(task, OptimizerSettings(20, 0.1, warmup_steps=1), out / "run", log_every=1)
    except ChildProcessError as error:
        state = {"weight": task.weight.detach(), "seen": task.seen, "random": task.random, "error": str(error)}
        torch.save(state, out / f"{processes()[0]}.pt")
