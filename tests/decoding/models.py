"""Token models small enough to enumerate."""

import itertools

import torch


class TableModel:
    """Every conditional law of V codes on N positions is a row of a table, one table for each group of logits.

    The code that a position sees is what lies in its cache slot, and a slot that was never written makes the logits NaN.
    """

    def __init__(self, grid=(2, 2), vocab_size=3, groups=1, seed=0):
        self.grid, self.vocab_size = grid, vocab_size
        self.num_tokens = grid[0] * grid[1]
        self.device = torch.device("cpu")
        generator = torch.Generator().manual_seed(seed)
        self.tables = [
            -0.7 * torch.empty(groups, vocab_size**n, vocab_size).exponential_(generator=generator).log()
            for n in range(self.num_tokens)
        ]
        self.groups = groups

    def prefill(self, batch_size, scratch=0):
        cache = torch.full((batch_size, self.num_tokens + scratch), float("nan"), dtype=torch.float64)
        return cache, self.tables[0].expand(-1, batch_size, -1)

    def forward(self, tokens, positions, cache, *, visible=None, slots=None):
        slots = positions if slots is None else slots
        for b, j in itertools.product(*map(range, positions.shape)):
            if positions[b, j] >= 0:
                cache[b, slots[b, j]] = tokens[b, j]
        logits = torch.full((self.groups, *positions.shape, self.vocab_size), float("nan"))
        for b, j in itertools.product(*map(range, positions.shape)):
            position = int(positions[b, j])
            if not 0 <= position < self.num_tokens - 1:
                continue
            seen = cache[b, : position + 1] if visible is None else cache[b, visible[b, j]]
            powers = self.vocab_size ** torch.arange(len(seen) - 1, -1, -1, dtype=torch.float64)
            index = (seen * powers).sum()
            if not index.isnan():
                logits[:, b, j] = self.tables[position + 1][:, int(index)]
        return logits

    def joint(self, sampling):
        """Probabilities [V ** N] of all images, the first code varying slowest."""
        law = torch.ones(1, dtype=torch.float64)
        for position, table in enumerate(self.tables):
            positions = torch.full((1, table.shape[1]), position)
            rows = sampling.law(table[:, None], positions)[0].double()
            law = (law[:, None] * rows / rows.sum(-1, keepdim=True)).flatten()
        return law


class VectorTableModel(TableModel):
    """The same, vectorised over the batch for chains, without the NaN bookkeeping."""

    def forward(self, tokens, positions, cache, *, visible=None, slots=None):
        live = (positions >= 0) & (positions < self.num_tokens)
        rows = torch.arange(len(tokens))[:, None].expand_as(positions)
        cache[rows[live], positions[live]] = tokens[live].double()
        logits = torch.zeros(self.groups, *positions.shape, self.vocab_size)
        codes = cache.nan_to_num(0).long()
        for position in range(self.num_tokens - 1):
            index = torch.zeros(len(tokens), dtype=torch.long)
            for code in codes[:, : position + 1].unbind(1):
                index = index * self.vocab_size + code
            here = positions == position
            logits[:, here] = self.tables[position + 1][:, index[rows[here]]]
        return logits
