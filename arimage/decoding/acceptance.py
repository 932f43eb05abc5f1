"""Tests that accept or reject a draft: the exact test of speculative sampling, and relaxed ones.

A relaxed test accepts every draft that the exact test accepts, and more. The replacement of a rejected draft is still
sampled from the residual norm(max(p - q, 0)): no other distribution would bring the result closer to p after such a
test. The total variation of the result from p is the sum over x of max(q[x] a[x] - p[x], 0), where a[x] is the
probability to accept x; it is never larger than that of q from p.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Self, get_args
from weakref import WeakKeyDictionary

import torch

from ..kernels.neighbours import nearest_neighbours, neighbour_mass
from .contract.models import TokenModel
from .contract.settings import check_number, check_settings
from .contract.supports import Need


# Neighbours per codebook entry in LANTERN.
PUBLISHED_SHARE = 1000 / 16384


@dataclass
class Accepts:
    """A test of drafts: `accepts(p, q, x, uniform)` returns which drafts x [...], sampled from q [..., V], are
    accepted under p [..., V], given one uniform number [...] in [0, 1) per draft. A token with probability 0 under p
    is never accepted, so top-k, top-p, min-p and greedy decoding stay valid.

    Attributes:
        test: takes these arguments and the `table`.
        table: what the test looks up about the codebook, if anything.
    """

    test: Callable[..., torch.BoolTensor]
    table: torch.Tensor | None = None

    def __call__(
        self, p: torch.FloatTensor, q: torch.FloatTensor, x: torch.LongTensor, uniform: torch.FloatTensor
    ) -> torch.BoolTensor:
        return self.test(p, q, x, uniform, self.table)

    def put(self, other: Self) -> None:
        """Use the table of `other`, the same test for the same model, whose codebook may have changed meanwhile."""
        if self.table is not None:
            self.table.copy_(other.table)


@dataclass(frozen=True)
class ExactAcceptance:
    """Accept x with probability min(1, p[x] / q[x]): speculative sampling (https://arxiv.org/abs/2302.01318),
    exact."""

    needs: ClassVar[tuple[Need, ...]] = ()

    @property
    def exact(self) -> bool:
        return True

    def bind(self, model: TokenModel) -> Accepts:
        """The test for the tokens of `model`."""
        return Accepts(_exact)


@dataclass(frozen=True)
class GroupAcceptance:
    """Accept x with probability min(1, p(G) / q(G)), where G are tokens similar to x: grouped speculative decoding
    (https://arxiv.org/abs/2508.07747). Exact if the group contains x only, as with size 1.

    G are those tokens that are next to x when sorted by probability p (up to `size // 2` on either side) and also near
    x in the codebook. Where p[x] / q[x] is larger, it is used instead; the paper would then accept x less often than
    the exact test does. The total variation of the result from p is at most that of q from p.

    Attributes:
        size: approximate number of tokens in a group, >= 1.
        max_probability_gap: the probability of tokens in G differs from p[x] by less than this.
        max_distance: the codebook vectors of tokens in G are closer than this to that of x, in the codebook's own
            scale.
    """

    needs: ClassVar[tuple[Need, ...]] = ("codebook",)

    size: int = 14
    max_probability_gap: float = 0.15
    max_distance: float = 0.5

    def __post_init__(self):
        check_settings(self, {"size": 1})
        for name in ("max_probability_gap", "max_distance"):
            check_number(self, name, 0)

    @property
    def exact(self) -> bool:
        return self.size == 1 or self.max_probability_gap == 0 or self.max_distance == 0

    def bind(self, model: TokenModel) -> Accepts:
        """The test for the tokens of `model`."""
        codebook = _codebook(model).float()
        side = min(self.size // 2, len(codebook) - 1)

        def test(p, q, x, uniform, codebook):
            x, uniform = x[..., None], uniform[..., None]
            p_x, q_x = p.gather(-1, x), q.gather(-1, x)
            # Tokens with probability 0 are in no group, since their order is arbitrary.
            above = torch.where(p > p_x, -p, -torch.inf).topk(side, dim=-1)
            below = torch.where((p > 0) & (p <= p_x), p, -torch.inf).scatter(-1, x, -torch.inf).topk(side, dim=-1)
            tokens = torch.cat([above.indices, below.indices], dim=-1)
            found = torch.cat([above.values, below.values], dim=-1) > -torch.inf
            p_near, q_near = p.gather(-1, tokens), q.gather(-1, tokens)
            distance = (codebook[tokens] - codebook[x]).norm(dim=-1)
            group = found & ((p_near - p_x).abs() < self.max_probability_gap) & (distance < self.max_distance)
            p_group, q_group = (own + (near * group).sum(-1, True) for own, near in ((p_x, p_near), (q_x, q_near)))
            return (((uniform * q_x < p_x) | (uniform * q_group < p_group)) & (p_x > 0)).squeeze(-1)

        return Accepts(test, codebook)


@dataclass(frozen=True)
class NeighbourAcceptance:
    """Accept x with probability min(1, (p[x] + p(A)) / q[x]), where A are the tokens nearest to x in the codebook:
    LANTERN (https://arxiv.org/abs/2410.03355) and LANTERN++ (https://arxiv.org/abs/2502.06352). Exact at delta 0 only.

    A are the nearest tokens, as many as keep p(A) at or below `delta`, or below `delta` p[x] if `relative` (LANTERN++,
    whose lambda is 1 + delta). Without `relax`, the total variation of the result from p is at most the sum over x of
    min(delta, max(q[x] - p[x], 0)), and at most 1 - 1 / (1 + delta) where delta is relative. The paper also removes A
    from the residual; here it stays, which keeps the result closer to p.

    Attributes:
        neighbours: the largest number of tokens in A, >= 1, limited by the size of the codebook. None is the share of
            the codebook that the papers use, 1,000 of 16,384.
        delta: >= 0.
        relative: whether delta is a share of p[x] rather than a probability.
    """

    needs: ClassVar[tuple[Need, ...]] = ("codebook",)

    neighbours: int | None = None
    delta: float = 0.1
    relative: bool = False

    def __post_init__(self):
        check_settings(self, {"neighbours": 1}, {"relative": (True, False)})
        check_number(self, "delta", 0)

    @property
    def exact(self) -> bool:
        return self.delta == 0

    def bind(self, model: TokenModel) -> Accepts:
        """The test for the tokens of `model`."""
        size = len(_codebook(model))
        count = self.neighbours or max(round(PUBLISHED_SHARE * size), 1)
        table = _neighbour_table(model, min(count, size - 1))

        def test(p, q, x, uniform, table):
            p_x, q_x = (values.gather(-1, x[..., None]).squeeze(-1) for values in (p, q))
            bound = p_x * self.delta if self.relative else torch.full_like(p_x, self.delta)
            mass = neighbour_mass(p, x, table, bound)
            return (uniform * q_x < p_x + mass) & (p_x > 0)

        return Accepts(test, table)


Acceptance = ExactAcceptance | GroupAcceptance | NeighbourAcceptance


def check_acceptance(decoding) -> None:
    """Check the setting `acceptance` of a decoding.

    Raises:
        ValueError: if it is not an acceptance.
    """
    if not isinstance(decoding.acceptance, Acceptance):
        choices = ", ".join(f"{choice.__name__}()" for choice in get_args(Acceptance))
        raise ValueError(f"acceptance is {decoding.acceptance!r}: choose among {choices}")


def _exact(p, q, x, uniform, table):
    p_x, q_x = (values.gather(-1, x[..., None]).squeeze(-1) for values in (p, q))
    return uniform * q_x < p_x


def _codebook(model: TokenModel) -> torch.Tensor:
    assert model.codebook is not None
    return model.codebook


# Tables by network, each with the codebook that it was made from, since the codebook of a network may be replaced.
_tables: WeakKeyDictionary[object, dict[int, tuple[torch.Tensor, torch.IntTensor]]] = WeakKeyDictionary()


def _neighbour_table(model: TokenModel, count: int) -> torch.IntTensor:
    """`nearest_neighbours` of the model's codebook, computed once."""
    tables = _tables.setdefault(model.network, {})
    codebook = _codebook(model).detach()
    cached = tables.get(count)
    if cached is None or cached[0].device != codebook.device or not torch.equal(cached[0], codebook):
        tables[count] = codebook.clone(), nearest_neighbours(codebook, count)
    return tables[count][1]
