"""Training of a model of neighbours on token grids: those of images, or generated ones."""

import torch
import torch.nn.functional as F

from ...decoding import Layout
from ...models.neighbours import NeighbourModel


def around(tokens: torch.LongTensor) -> torch.LongTensor:
    """The tokens [M, N, K] next to each place of the grids [M, *shape]; -1 where there is none."""
    layout, flat = Layout(tuple(tokens.shape[1:])), tokens.flatten(1)
    places = torch.arange(layout.num_tokens, device=tokens.device)[None]
    ranks = torch.stack([layout.neighbours(places, offset) for offset in NeighbourModel.offsets], dim=-1)[0]
    return torch.where(ranks < 0, -1, flat[:, ranks.clamp(min=0)])


def fit_neighbours(
    tokens: torch.LongTensor,
    vocab_size: int,
    rank: int = 32,
    steps: int = 1500,
    batch_size: int = 4096,
    learning_rate: float = 2e-2,
    seed: int = 0,
) -> NeighbourModel:
    """A `NeighbourModel` fitted to token grids [M, *shape] by cross-entropy: half a minute on a CPU core for 512
    tokens.

    Args:
        batch_size: tokens per step.
        learning_rate: of the first step; it falls to 0.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = NeighbourModel(vocab_size, rank).to(tokens.device)
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = around(tokens).flatten(0, 1), tokens.flatten()
    optimizer = torch.optim.Adam(model.parameters(), learning_rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    for _ in range(steps):
        index = torch.randint(len(targets), (batch_size,), generator=generator).to(tokens.device)
        loss = F.cross_entropy(model(inputs[index]), targets[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.requires_grad_(False).eval()
