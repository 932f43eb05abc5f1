"""A synthetic distribution of images of any grid size, to compare decodings in seconds without a network.

A token depends on the tokens to the left, above, above-left and above-right of it, through random tables; `coupling`
is the strength. It is a `TokenModel`, so every decoding without a drafter runs on it. The table shows the forward
passes per image and the tokens evaluated per pass and image, as means over the images, and how far the tokens are from
the model's distribution (`arimage.eval.bench.deviation`).

python benchmarks/markov_mesh.py --decoding ar sjd sjd-coupled:window=64 sjd-lazy
"""

import argparse
import time
from dataclasses import dataclass

import torch

from arimage.decoding import Layout, Sampling, decode, decoding_from_text
from arimage.decoding.contract.cache import Cache
from arimage.eval.bench.deviation import deviation, token_places


NEIGHBOURS = ((0, -1), (-1, 0), (-1, -1), (-1, 1))
WEIGHTS = (1.0, 1.0, 0.5, 0.5)


@dataclass
class MeshCache(Cache):
    """Tokens and their positions by slot [B, S + 1]; the last slot takes padding."""

    tokens: torch.LongTensor
    positions: torch.LongTensor

    def move(self, source: torch.LongTensor, target: torch.LongTensor) -> None:
        for values in (self.tokens, self.positions):
            values.scatter_(1, target % values.shape[1], values.gather(1, source))


class MarkovMesh:
    """A `TokenModel` with a vocabulary of V; a neighbour that a query does not see counts as outside of the image.

    Its attribute `evaluated` counts the tokens fed to `forward`.
    """

    kind = "tokens"
    predicts_groups = denoises = False
    drafter = codebook = None
    device = torch.device("cpu")
    block = 1

    def __init__(self, grid: tuple[int, int] = (48, 48), vocab_size: int = 64, coupling: float = 1.0, seed: int = 0):
        self.layout, self.vocab_size = Layout(grid), vocab_size
        self.num_tokens = grid[0] * grid[1]
        self.evaluated = 0
        self.network = self
        generator = torch.Generator().manual_seed(seed)
        # The last row of each table is for a neighbour outside of the image.
        self.tables = coupling * torch.randn(len(NEIGHBOURS), vocab_size + 1, vocab_size, generator=generator)
        self.tables *= torch.tensor(WEIGHTS)[:, None, None]
        self.tables[:, -1] = 0
        self.codebook = torch.randn(vocab_size, 8, generator=generator)
        # Its logits are the sum of what each neighbour adds.
        self.neighbours = self
        self.offsets = NEIGHBOURS

    def prefill(self, batch_size: int, scratch: int = 0) -> tuple[MeshCache, torch.FloatTensor]:
        self.evaluated += batch_size
        slots = torch.full((batch_size, self.num_tokens + scratch + 1), -1)
        return MeshCache(slots, slots.clone()), torch.zeros(1, batch_size, self.vocab_size)

    def change(self, now: torch.LongTensor, before: torch.LongTensor) -> torch.FloatTensor:
        index = torch.arange(len(NEIGHBOURS))
        return (self.tables[index, now] - self.tables[index, before]).sum(-2)

    def forward(self, tokens, positions, cache, *, visible=None, slots=None) -> torch.FloatTensor:
        self.evaluated += int((positions >= 0).sum())
        last = cache.tokens.shape[1] - 1
        slots = torch.where(positions < 0, last, positions if slots is None else slots)
        cache.tokens.scatter_(1, slots, tokens)
        cache.positions.scatter_(1, slots, positions)
        rows, columns = self.layout.shape
        target = positions + 1
        row, column = target.div(columns, rounding_mode="floor"), target % columns
        logits = torch.zeros(*positions.shape, self.vocab_size)
        for (down, right), table in zip(NEIGHBOURS, self.tables, strict=True):
            inside = (row + down >= 0) & (column + right >= 0) & (column + right < columns)
            place = (target + down * columns + right).clamp(0, self.num_tokens - 1)
            if visible is not None:
                match = visible & (cache.positions[:, None, :last] == place[..., None])
                inside &= match.any(-1)
                place = match.byte().argmax(-1)
            seen = cache.tokens.gather(1, place)
            logits += table[torch.where(inside & (seen >= 0), seen, self.vocab_size)]
        return logits[None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decoding", nargs="+", default=["ar", "sjd:window=64", "sjd-coupled:window=64", "sjd-lazy"])
    parser.add_argument("--grid", type=int, default=48)
    parser.add_argument("--coupling", type=float, nargs="+", default=[1.0, 0.6])
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--batch-size", type=int, nargs="+", default=[8])
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    head = (
        "| coupling | batch | decoding | exact | passes per image | fewer by | tokens per pass | deviation (floor) "
        "| seconds |"
    )
    print(head + "\n" + "| --- " * 9 + "|")
    seeds = arguments.seed + torch.arange(arguments.images)
    for coupling in arguments.coupling:
        model = MarkovMesh((arguments.grid, arguments.grid), coupling=coupling)
        for batch_size in arguments.batch_size:
            for text in arguments.decoding:
                decoding = decoding_from_text(text)
                model.evaluated, began = 0, time.perf_counter()
                states = [decode(model, decoding, Sampling(), batch) for batch in seeds.split(batch_size)]
                seconds, evaluated = time.perf_counter() - began, model.evaluated
                passes = sum(int((state.accepted_per_step() > 0).sum()) for state in states)
                found = deviation(*token_places(model, Sampling(), torch.cat([state.tokens for state in states])))
                each = passes / arguments.images
                print(
                    f"| {coupling} | {batch_size} | {text} | {'yes' if decoding.exact else 'no'} | {each:.1f} "
                    f"| {model.num_tokens / each:.1f} | {evaluated / passes:.1f} "
                    f"| {found.total_variation:.4f} ({found.floor:.4f}) | {seconds:.1f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
