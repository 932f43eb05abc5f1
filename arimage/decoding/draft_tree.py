"""Decoding with a drafter: a tree of drafts grown by a small network, verified by the model in one pass."""

from dataclasses import dataclass, field
from typing import Any, Literal, Self, get_args

import torch
import torch.nn.functional as F

from ..kernels.coupling import sample
from ..kernels.siblings import couple_siblings, sample_siblings
from .acceptance import Acceptance, Accepts, ExactAcceptance, check_acceptance
from .autoregressive import decide_first
from .contract.distribution import Sampling
from .contract.models import Drafter, DraftModel, TokenModel
from .contract.noise import Purpose, uniforms
from .contract.settings import check_settings
from .contract.state import CursorState
from .contract.supports import DecodingMethod, Need, Needs
from .tree import DraftTree, ancestors, select


Tree = Literal["dynamic", "static"]


@dataclass
class DraftTreeState(CursorState):
    """Adds to `CursorState`: `entered` [B], how many tokens the last step decided; `features` [G, B, depth + 1, D],
    from which these tokens were sampled; the drafter and its cache; and the test of drafts."""

    image_dims = {**CursorState.image_dims, "features": 1}

    model: TokenModel
    entered: torch.LongTensor
    features: torch.FloatTensor
    drafter: DraftModel
    drafter_cache: Any
    accepts: Accepts

    @property
    def caches(self) -> list[Any]:
        return [self.cache, self.drafter_cache]

    def put(self, rows: torch.LongTensor, other: Self) -> bool:
        self.drafter_cache.put(rows, other.drafter_cache)
        return super().put(rows, other)

    def select(self, rows: torch.LongTensor) -> None:
        super().select(rows)
        self.drafter_cache.expand(rows)

    @property
    def reach(self) -> tuple[torch.LongTensor, int]:
        return self.furthest, self.features.shape[2]


@dataclass(frozen=True)
class DraftTreeDecoding(DecodingMethod):
    """Speculative decoding with a tree of drafts from a drafter that reads the model's features. A step decides the
    longest accepted branch and one more token. Every image has its own cursor. `forward_passes` counts those of the
    model; the drafter takes `depth` forward passes of its own before each of them.

    A "dynamic" tree (EAGLE-2, https://arxiv.org/abs/2406.16858) has the drafter's most probable tokens as children,
    and keeps the `nodes` drafts whose branches are the most probable. With the exact acceptance, the token sampled
    from the model decides which child is followed: the images are those of `AutoregressiveDecoding` with the same
    seeds, up to the rounding of differently shaped matrix products. In a "static" tree (EAGLE,
    https://arxiv.org/abs/2401.15077) children are sampled from the drafter's distribution without replacement, and the
    shape is always the same: the best one if the first child of a node is accepted half of the time, the second half
    of the remaining time, and so on.

    Exact with the exact acceptance. With neighbours in the codebook it is LANTERN (https://arxiv.org/abs/2410.03355).

    Attributes:
        drafter: a drafter for the model; None uses the model's own.
        tree: "dynamic" or "static".
        depth: number of drafts on a branch, >= 1.
        width: number of children of a node, and of nodes per level that have children, >= 1.
        nodes: number of drafts that a step verifies, >= 1.
        acceptance: the test of a draft, as in `SpeculativeJacobiDecoding`.

    Raises:
        ValueError: if a setting is not among these.
    """

    drafter: Drafter | None = field(default=None, repr=False)
    tree: Tree = "dynamic"
    depth: int = 5
    width: int = 8
    nodes: int = 32
    acceptance: Acceptance = field(default_factory=ExactAcceptance)

    def __post_init__(self):
        check_settings(self, {"depth": 1, "width": 1, "nodes": 1}, {"tree": get_args(Tree)}, largest=1024)
        if self.drafter is not None and not callable(getattr(self.drafter, "bind", None)):
            raise ValueError(f"drafter is {self.drafter!r}: give a drafter for the model, or leave it out")
        check_acceptance(self)

    @property
    def exact(self) -> bool:
        return self.acceptance.exact

    @property
    def needs(self) -> Needs:
        own: tuple[Need, ...] = ("drafter",) if self.drafter is None else ()
        return {"tokens": ("single tokens", *own, *self.acceptance.needs)}

    def _drafter(self, model: TokenModel) -> Drafter | None:
        return model.drafter if self.drafter is None else self.drafter

    def start(self, model: TokenModel, sampling: Sampling, seeds: torch.LongTensor) -> DraftTreeState:
        cache, logits, features = model.prefill(len(seeds), self.nodes, return_features=True)  # pyright: ignore[reportCallIssue] with a drafter, see `Drafter`
        trained = self._drafter(model)
        assert trained is not None
        drafter = trained.bind(model)
        state = DraftTreeState.open(
            model,
            sampling,
            seeds,
            cache,
            cursor=torch.ones_like(seeds),
            entered=torch.ones_like(seeds),
            features=F.pad(features[:, :, None], (0, 0, 0, self.depth)),
            drafter=drafter,
            drafter_cache=drafter.open_cache(len(seeds), self.depth * self.width),
            accepts=self.acceptance.bind(model),
        )
        decide_first(state, logits)
        return state

    def step(self, state: DraftTreeState) -> None:
        size, cursor = state.model.num_tokens, state.cursor
        tree, drafted = self._grow(state)
        root = (cursor - 1)[:, None]
        drafts = torch.arange(tree.tokens.shape[1], device=cursor.device).expand_as(tree.tokens)
        positions = torch.cat([root, torch.where(tree.tokens < 0, -1, root + tree.depths)], dim=1)
        positions = torch.where(state.finished[:, None], -1, positions)
        past = (torch.arange(size, device=cursor.device) < cursor[:, None])[:, None]
        scratch = F.pad(ancestors(tree, self.depth), (0, self.nodes - tree.tokens.shape[1]))
        logits, features = state.model.forward(
            torch.cat([state.tokens.gather(1, root), tree.tokens.clamp(min=0)], dim=1),
            positions,
            state.cache,
            visible=torch.cat([past.expand(-1, scratch.shape[1], -1), scratch], dim=2),
            slots=torch.cat([root, size + drafts], dim=1),
            return_features=True,  # pyright: ignore[reportCallIssue] with a drafter, see `Drafter`
        )
        ended = (positions < 0) | (positions >= size - 1)
        probabilities = state.probabilities(logits, (positions + 1).clamp(max=size - 1), ended)
        tokens, path, reached = self._walk(state, tree, probabilities, drafted)

        offsets = torch.arange(self.depth + 1, device=cursor.device)
        ahead = cursor[:, None] + offsets
        accepted = torch.minimum(reached.sum(1), size - cursor)
        state.write_tokens(ahead, offsets < accepted[:, None], tokens)
        source = torch.where(reached, size + path - 1, size)[:, 1:]
        state.cache.move(source, torch.where(reached[:, 1:], ahead[:, :-1], -1))
        index = path[None, :, :, None].expand(len(features), -1, -1, features.shape[-1])
        torch.gather(features, 2, index, out=state.features)
        state.entered.copy_(accepted)
        state.advance(cursor + accepted)

    def _grow(self, state: DraftTreeState) -> tuple[DraftTree, torch.FloatTensor]:
        """The drafts of a step, and the probabilities [B, L, V] that the groups of children were sampled from."""
        size, cursor = state.model.num_tokens, state.cursor
        width = min(self.width, state.model.vocab_size)
        past = (torch.arange(size, device=cursor.device) < cursor[:, None])[:, None].expand(-1, width, -1)
        # The drafter is fed the tokens decided since its last turn, with the model's features.
        offsets = torch.arange(self.depth + 1, device=cursor.device)
        positions = (cursor - state.entered)[:, None] + offsets
        entered = offsets < state.entered[:, None]
        tokens = state.tokens.gather(1, positions.clamp(max=size - 1))
        logits, features = state.drafter.forward(
            tokens, state.features, torch.where(entered, positions, -1), state.drafter_cache
        )
        last = (state.entered - 1).clamp(min=0)[None, :, None, None]
        logits, features = (
            values.gather(2, last.expand(len(values), -1, -1, values.shape[-1])) for values in (logits, features)
        )
        live = ~state.finished[:, None]
        parents, scores = torch.full_like(cursor, -1)[:, None], torch.zeros_like(cursor, dtype=torch.float)[:, None]
        seen = torch.zeros(len(cursor), 1, self.depth * self.width, dtype=torch.bool, device=cursor.device)
        grown = []
        for depth in range(1, self.depth + 1):
            at = (cursor + depth - 1).clamp(max=size - 1)[:, None]
            probabilities = state.probabilities(logits, at.expand_as(live), ~live)
            probabilities = torch.where(live[..., None], probabilities, 0)
            tokens, gains = self._children(state, probabilities, at, width)
            scores = scores[..., None] + gains
            level = torch.full_like(parents[0], depth)
            grown.append((tokens, scores, parents, probabilities, level))
            if depth == self.depth:
                break
            # The nodes with the highest scores get children.
            scores, best = (
                values[:, :width] for values in scores.flatten(1).sort(dim=1, descending=True, stable=True)
            )
            tokens, origin = tokens.flatten(1).gather(1, best), best // width
            parents = width * sum(len(row[4]) for row in grown[:-1]) + best
            # The last position has no successor.
            live = (tokens >= 0) & (cursor + depth < size)[:, None]
            slots = torch.arange(width, device=cursor.device).expand_as(tokens) + (depth - 1) * width
            seen = seen.gather(1, origin[..., None].expand(-1, -1, seen.shape[2])).scatter(2, slots[..., None], True)
            logits, features = state.drafter.forward(
                tokens.clamp(min=0),
                features.gather(2, origin[None, ..., None].expand(len(features), -1, -1, features.shape[-1])),
                torch.where(live, at, -1),
                state.drafter_cache,
                visible=torch.cat([past, seen], dim=2),
                slots=size + slots,
            )
        tokens, scores, parents, drafted, depths = (
            torch.cat(values, dim=0 if values[0].ndim == 1 else 1) for values in zip(*grown, strict=True)
        )
        return select(tokens, scores, parents, depths, self.nodes), drafted

    def _children(self, state, probabilities, at, width) -> tuple[torch.LongTensor, torch.FloatTensor]:
        """Tokens [B, F, width] that may follow each of F nodes, and what they add to the node's score."""
        if self.tree == "dynamic":
            values, tokens = probabilities.topk(width, dim=-1)
            return torch.where(values > 0, tokens, -1), values.log()
        count = probabilities.shape[1] * width
        noise = uniforms(state.seeds, at, Purpose.SIBLING, state.steps, count)
        # The shape of the tree must not depend on the sampled tokens.
        gains = -torch.arange(1.0, width + 1, device=probabilities.device)
        tokens = sample_siblings(probabilities, noise.unflatten(-1, (-1, width))[:, 0])
        return tokens, gains.expand(*probabilities.shape[:2], -1)

    def _walk(
        self, state: DraftTreeState, tree: DraftTree, probabilities: torch.FloatTensor, drafted: torch.FloatTensor
    ) -> tuple[torch.LongTensor, torch.LongTensor, torch.BoolTensor]:
        """Walk down the tree, given the probabilities [B, M + 1, V] after its nodes. Returns the sampled tokens
        [B, depth + 1], the nodes after which they were sampled, and whether there was such a node."""
        cursor, width = state.cursor, tree.children.shape[2]
        at = (cursor[:, None] + torch.arange(self.depth + 1, device=cursor.device)).clamp(
            max=state.model.num_tokens - 1
        )
        chosen = self.tree == "dynamic" and isinstance(self.acceptance, ExactAcceptance)
        if chosen:
            noise = uniforms(state.seeds, at, Purpose.SAMPLE, None, 1)
        else:
            noise = uniforms(state.seeds, at, Purpose.VERIFY, state.steps, width + 1)
        drafts_of = F.pad(tree.tokens, (1, 0), value=-1)
        node, going = torch.zeros_like(cursor), ~state.finished
        tokens, path, reached = [], [], []
        for depth in range(self.depth + 1):
            p = probabilities.gather(1, node[:, None, None].expand(-1, 1, probabilities.shape[2]))[:, 0]
            children = tree.children.gather(1, node[:, None, None].expand(-1, 1, width))[:, 0]
            drafts = drafts_of.gather(1, children)
            if chosen:
                token = sample(p, noise[:, depth, 0])
                child = torch.where(drafts == token[:, None], children, 0).amax(1)
            else:
                group = tree.groups.gather(1, node[:, None])[..., None]
                q = None
                if self.tree == "static":
                    q = drafted.gather(1, group.expand(-1, 1, drafted.shape[2]))[:, 0]
                token, which = couple_siblings(p, q, drafts, noise[:, depth], state.accepts)
                child = torch.where(which < 0, 0, children.gather(1, which.clamp(min=0)[:, None])[:, 0])
            tokens.append(token)
            path.append(node)
            reached.append(going)
            node, going = child, going & (child > 0)
        return torch.stack(tokens, dim=1), torch.stack(path, dim=1), torch.stack(reached, dim=1)
