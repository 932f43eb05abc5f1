"""A task, and what each of the processes that train it together runs."""

import sys

import torch
from torch import nn

from arimage.cli import main as cli
from arimage.training import loop
from arimage.training.loop import OptimizerSettings, fit
from arimage.training.processes import batch_generator, join_processes, processes


SETTINGS = OptimizerSettings(25, 0.1, warmup_steps=1, gradient_clip=1e9, muon=("matrices.",))


class Mean(nn.Module):
    """Learns to map its batches to one point."""

    def __init__(self, points: torch.Tensor | None = None):
        super().__init__()
        self.mean, self.points = nn.Parameter(torch.zeros(3)), points
        self.matrices = nn.ParameterList(torch.eye(3) for _ in range(3))
        self.shift = nn.Parameter(torch.zeros(()))

    def loss(self, step):
        points = torch.rand(4, 3, generator=batch_generator(7, step)) if self.points is None else self.points[step]
        for matrix in self.matrices:
            points = points @ matrix
        loss = (self.mean - points).square().mean()
        # Only the second of two processes reaches this parameter.
        if self.points is not None or processes()[0] == 1:
            loss = loss + processes()[1] * (self.shift - 1).square()
        return loss, {"loss": loss.detach()}

    def report(self, step, out):
        return {}


def main():
    """Train the task in the folder that is the last word, and then as the words before say, if there are any."""
    # It costs more than the training.
    loop.plot_log = lambda log, path: None
    join_processes()
    task, rank = Mean(), processes()[0]
    fit(task, SETTINGS, f"{sys.argv[-1]}/rank{rank}")
    torch.save(task.state_dict(), f"{sys.argv[-1]}/{rank}.pt")
    if len(sys.argv) > 2:
        cli.main()


if __name__ == "__main__":
    main()
