"""Whether a draft is kept: as speculative sampling keeps it, or more often.

A relaxed test keeps whatever the exact one keeps and more. What is drawn for a draft that it does not keep comes from the
residual norm(max(p - q, 0)) all the same: after such a test, no other law of that draw would bring the result closer to p.
The result differs from p by the total variation sum over x of max(q[x] a[x] - p[x], 0), where a[x] is how often x is kept;
that is never more than the total variation of p and q.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..kernels.neighbours import nearest_neighbours, neighbour_mass
from .interface import TokenModel


Keeps = Callable[[torch.FloatTensor, torch.FloatTensor, torch.LongTensor, torch.FloatTensor], torch.BoolTensor]
"""`keeps(p, q, x, uniform)`: which drafts x [...] of the laws q [..., V] are kept under the laws p [..., V], by a uniform
number [...] in [0, 1) each. A code that p excludes is never kept, so top-k, top-p and greedy decoding hold as they stand."""


@dataclass(frozen=True)
class ExactAcceptance:
    """Keep x with probability min(1, p[x] / q[x]): speculative sampling (https://arxiv.org/abs/2302.01318), exact."""

    @property
    def exact(self) -> bool:
        return True

    def bind(self, model: TokenModel) -> Keeps:
        """The test, with what it needs to know of `model`."""
        return _exact


@dataclass(frozen=True)
class GroupAcceptance:
    """Keep x with probability min(1, p(G) / q(G)), where G are codes like x: grouped speculative decoding
    (https://arxiv.org/abs/2508.07747). Exact where the settings leave x alone in its group, as size 1 does.

    G are the codes next to x in the order of their probability p, `size // 2` on either side or as many as there are, that
    are also near x in the codebook. Where p[x] / q[x] is larger it counts instead; the paper would then keep x more rarely
    than the exact test does. A law is off by a total variation of at most that of p and q.

    Attributes:
        size: about how many codes a group has, >= 1.
        max_probability_gap: codes of G have a probability less than this away from p[x].
        max_distance: codes of G have a codebook vector less than this away from that of x, in the codebook's own scale.

    Raises:
        ValueError: if a setting is out of its range or, on `bind`, the model has no codebook.
    """

    size: int = 14
    max_probability_gap: float = 0.15
    max_distance: float = 0.5

    def __post_init__(self):
        _require(self, "size", isinstance(self.size, int) and self.size >= 1, "a whole number of at least 1")
        for name in ("max_probability_gap", "max_distance"):
            _require(self, name, getattr(self, name) >= 0, "a number of at least 0")

    @property
    def exact(self) -> bool:
        return self.size == 1 or self.max_probability_gap == 0 or self.max_distance == 0

    def bind(self, model: TokenModel) -> Keeps:
        """The test, with what it needs to know of `model`."""
        codebook = _codebook(model).float()
        side = min(self.size // 2, len(codebook) - 1)

        def keeps(p, q, x, uniform):
            x, uniform = x[..., None], uniform[..., None]
            p_x, q_x = p.gather(-1, x), q.gather(-1, x)
            # Codes that p excludes are in no group: their order means nothing.
            above = torch.where(p > p_x, -p, -torch.inf).topk(side, dim=-1)
            below = torch.where((p > 0) & (p <= p_x), p, -torch.inf).scatter(-1, x, -torch.inf).topk(side, dim=-1)
            codes = torch.cat([above.indices, below.indices], dim=-1)
            found = torch.cat([above.values, below.values], dim=-1).isfinite()
            p_codes, q_codes = p.gather(-1, codes), q.gather(-1, codes)
            distance = (codebook[codes] - codebook[x]).norm(dim=-1)
            group = found & ((p_codes - p_x).abs() < self.max_probability_gap) & (distance < self.max_distance)
            p_group, q_group = (law + (near * group).sum(-1, True) for law, near in ((p_x, p_codes), (q_x, q_codes)))
            return (((uniform * q_x < p_x) | (uniform * q_group < p_group)) & (p_x > 0)).squeeze(-1)

        return keeps


@dataclass(frozen=True)
class NeighbourAcceptance:
    """Keep x with probability min(1, (p[x] + p(A)) / q[x]), where A are the codes nearest to x in the codebook: LANTERN
    (https://arxiv.org/abs/2410.03355) and LANTERN++ (https://arxiv.org/abs/2502.06352). Exact at delta 0 only.

    A are as many of the nearest codes as have a probability p(A) of at most `delta`, or of `delta` p[x] where it is
    `relative` (LANTERN++, whose lambda is 1 + delta). Without `relax`, a law is off by a total variation of at most the sum
    over x of min(delta, max(q[x] - p[x], 0)), and of 1 - 1 / (1 + delta) where delta is relative. The paper takes A out of
    the residual too; here it stays, which keeps the result closer to p.

    Attributes:
        neighbours: how many of the nearest codes may count, >= 1; all, where the codebook has fewer.
        delta: >= 0.
        relative: whether delta is a share of p[x] rather than a probability.

    Raises:
        ValueError: if a setting is out of its range or, on `bind`, the model has no codebook.
    """

    neighbours: int = 1000
    delta: float = 0.1
    relative: bool = False

    def __post_init__(self):
        whole = isinstance(self.neighbours, int) and self.neighbours >= 1
        _require(self, "neighbours", whole, "a whole number of at least 1")
        _require(self, "delta", self.delta >= 0, "a number of at least 0")

    @property
    def exact(self) -> bool:
        return self.delta == 0

    def bind(self, model: TokenModel) -> Keeps:
        """The test, with what it needs to know of `model`."""
        codebook = _codebook(model)
        table = nearest_neighbours(codebook, min(self.neighbours, len(codebook) - 1))

        def keeps(p, q, x, uniform):
            p_x, q_x = (law.gather(-1, x[..., None]).squeeze(-1) for law in (p, q))
            bound = p_x * self.delta if self.relative else torch.full_like(p_x, self.delta)
            mass, _ = neighbour_mass(p, x, table, bound)
            return (uniform * q_x < p_x + mass) & (p_x > 0)

        return keeps


Acceptance = ExactAcceptance | GroupAcceptance | NeighbourAcceptance


def _exact(p, q, x, uniform):
    p_x, q_x = (law.gather(-1, x[..., None]).squeeze(-1) for law in (p, q))
    return uniform * q_x < p_x


def _codebook(model: TokenModel) -> torch.Tensor:
    if model.codebook is None:
        raise ValueError(
            "this acceptance compares codes by the image tokenizer's vectors, which the model does not have: "
            "give its `codebook` [V, D], or use ExactAcceptance() with `relax`"
        )
    return model.codebook


def _require(acceptance, name: str, holds: bool, expected: str) -> None:
    if not holds:
        raise ValueError(f"{name} is {getattr(acceptance, name)!r}: give {expected}")
