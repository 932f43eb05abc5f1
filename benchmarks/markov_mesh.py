"""A synthetic picture law of any grid size, to measure decodings in seconds without a network.

A code depends on the codes to the left, above, above-left and above-right of it, through random tables; `coupling` says how
strongly. It is a `TokenModel`, so that every decoding runs on it.

python benchmarks/markov_mesh.py --grid 48 --window 16 32 64
"""

import argparse

import torch

from arimage.decoding import Sampling, SpeculativeJacobiDecoding, decode


NEIGHBOURS = ((0, -1), (-1, 0), (-1, -1), (-1, 1))
WEIGHTS = (1.0, 1.0, 0.5, 0.5)


class MarkovMesh:
    def __init__(self, grid: tuple[int, int] = (48, 48), vocab_size: int = 64, coupling: float = 2.0, seed: int = 0):
        self.grid, self.vocab_size = grid, vocab_size
        self.num_tokens = grid[0] * grid[1]
        self.device = torch.device("cpu")
        generator = torch.Generator().manual_seed(seed)
        # The last row of each table stands for a neighbour outside the picture.
        self.tables = coupling * torch.randn(len(NEIGHBOURS), vocab_size + 1, vocab_size, generator=generator)
        self.tables *= torch.tensor(WEIGHTS)[:, None, None]
        self.tables[:, -1] = 0

    def prefill(self, batch_size: int, scratch: int = 0) -> tuple[torch.LongTensor, torch.FloatTensor]:
        cache = torch.zeros(batch_size, self.num_tokens + 1, dtype=torch.long)
        return cache, torch.zeros(1, batch_size, self.vocab_size)

    def forward(self, tokens, positions, cache, *, visible=None, slots=None) -> torch.FloatTensor:
        if visible is not None or slots is not None:
            raise NotImplementedError("the mesh reads its neighbours at their positions: use a decoding of chains")
        cache.scatter_(1, torch.where(positions < 0, self.num_tokens, positions), tokens)
        rows, columns = self.grid
        target = positions + 1
        row, column = target.div(columns, rounding_mode="floor"), target % columns
        logits = torch.zeros(*positions.shape, self.vocab_size)
        for (down, right), table in zip(NEIGHBOURS, self.tables, strict=True):
            inside = (row + down >= 0) & (column + right >= 0) & (column + right < columns)
            codes = cache.gather(1, (target + down * columns + right).clamp(0, self.num_tokens - 1))
            logits += table[torch.where(inside, codes, self.vocab_size)]
        return logits[None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", type=int, default=48)
    parser.add_argument("--window", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--coupling", type=float, nargs="+", default=[1.0, 2.0])
    parser.add_argument("--batch-size", type=int, default=8)
    arguments = parser.parse_args()
    print("| coupling | decoding | forward passes | fewer by |\n| --- | --- | --- | --- |")
    for coupling in arguments.coupling:
        model = MarkovMesh((arguments.grid, arguments.grid), coupling=coupling)
        for refresh in ("independent", "coupled", "gumbel"):
            for window in arguments.window:
                decoding = SpeculativeJacobiDecoding(window, refresh)
                state = decode(model, decoding, Sampling(), torch.arange(arguments.batch_size))
                passes = (torch.stack(state.accepted) > 0).sum(0).float().mean()
                ratio = model.num_tokens / passes
                print(f"| {coupling} | {refresh}, window {window} | {passes:.0f} | {ratio:.1f} |", flush=True)


if __name__ == "__main__":
    main()
