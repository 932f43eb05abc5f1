"""Training of a model of neighbours for a finished pipeline, on the tokens of images."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from ...decoding import Layout
from ...models.neighbours import NeighbourModel
from ...pipelines.base import ARPipeline
from ...pipelines.llamagen.pipeline_llamagen import LlamaGenPipeline
from ..data.captioned import to_unit_range
from ..pixels import PixelSource, open_pixels
from ..saving import save_float16


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


@torch.no_grad()
def _encode(pipe: LlamaGenPipeline, source: PixelSource) -> torch.LongTensor:
    """Tokens [M, h, w] of at most `IMAGES` images, evenly spaced in the data set."""
    images, batches = range(0, len(source), -(-len(source) // IMAGES)), []
    for start in range(0, len(images), 64):
        pixels, _ = source.read(images[start : start + 64])
        batches.append(pipe.encode_image(to_unit_range(pixels).to(pipe.device)))
    return torch.cat(batches)


def run_neighbours(pipe: ARPipeline, data: str, out: Path, **options: Any) -> LlamaGenPipeline:
    """Fit a model of neighbours to the tokens of images. The pipeline with it is saved in `out`/model, in float16.
    `options` are those of `open_pixels`.

    Raises:
        ValueError: if `pipe` is not a LlamaGen pipeline, or the data set has no images.
    """
    if not isinstance(pipe, LlamaGenPipeline):
        raise ValueError(f"--model is one in a {type(pipe).__name__}: give a LlamaGenPipeline")
    tokens = _encode(pipe, open_pixels(data, pipe.decoded_size[0], workers=0, **options))
    pipe.register_modules(neighbours=fit_neighbours(tokens, pipe.transformer.config.vocab_size))
    save_float16(pipe, out / "model")
    return pipe
