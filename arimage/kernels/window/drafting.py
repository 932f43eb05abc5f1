"""How positions that enter a window are drafted."""

from typing import NamedTuple

import torch


class Drafting(NamedTuple):
    """How to draft for B images of N tokens.

    Attributes:
        start, start_sums: float32 [B, V], the distribution of drafts, and its cumulative sums, of which the last is 1.
        forced: int64 [B, N], given tokens, which are drafted where they are >= 0; their distribution is one-hot.
        neighbour: int64 [B, N + 1], the position whose token is copied to each position, in place of a sample from
            `start`; N for none. The distribution of a copy is one-hot.
        jumps: how often to go on to the neighbour of a neighbour that is still being drafted.
        context: int64 [B, F], the tokens that are copied where there is no neighbour, by position modulo F.
    """

    start: torch.FloatTensor
    start_sums: torch.FloatTensor
    forced: torch.LongTensor | None
    neighbour: torch.LongTensor | None = None
    jumps: int = 0
    context: torch.LongTensor | None = None
