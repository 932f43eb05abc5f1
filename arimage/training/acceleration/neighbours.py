"""Training of a model of neighbours for a finished pipeline, on the tokens of a cache."""

import math
from pathlib import Path

import torch
import torch.nn.functional as F

from ...decoding import Layout
from ...models.neighbours import NeighbourModel
from ...pipelines.base import ARPipeline
from ..losses import condition_of
from ..saving import save_float16
from ..tokens.beginning import check_fits
from ..tokens.cache import TokenCache
from ..tokens.heldout import reported


# More than are needed to fit what neighbours say about each other.
IMAGES = 20_000


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


def run_neighbours(pipe: ARPipeline, tokens: Path, out: Path) -> ARPipeline:
    """Fit a model of neighbours to the tokens of a cache, see `TokenCache`. The pipeline with it is saved in
    `out`/model, in float16.

    Raises:
        ValueError: if `pipe` takes none, or the tokens are not of its image tokenizer.
    """
    if "neighbours" not in pipe._optional_components:
        raise ValueError(f"--model is one in a {type(pipe).__name__}, which has no neighbours: give another one")
    cache = TokenCache(tokens)
    check_fits(pipe, cache, "--model has another one")
    numbers = reported(cache, IMAGES).tolist()
    found, captions = cache.read(numbers, [0] * len(numbers))
    height, width = cache.index.about["image_size"]
    # Tokens are as far apart across as down.
    rows = math.isqrt(found.shape[1] * height // width)
    vocab_size = pipe.prepare(**condition_of(pipe, captions[:1])).model.vocab_size
    pipe.register_modules(neighbours=fit_neighbours(found.unflatten(1, (rows, -1)).to(pipe.device), vocab_size))
    save_float16(pipe, out / "model")
    return pipe
