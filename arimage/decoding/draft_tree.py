"""Decoding with a drafter: a tree of drafts grown by a small network, verified by the model in one pass."""

from dataclasses import dataclass, field
from typing import Any, Literal, Self, get_args

import torch
import torch.nn.functional as F

from ..kernels.coupling import sample_at
from ..kernels.siblings import couple_siblings, sample_siblings
from .acceptance import Acceptance, Accepts, ExactAcceptance, check_acceptance
from .autoregressive import decide_first
from .contract.distribution import Sampling
from .contract.layout import Layout
from .contract.models import Drafter, DraftModel, FeatureModel, TokenModel
from .contract.noise import Purpose, uniforms
from .contract.settings import check_settings
from .contract.state import CursorState
from .contract.supports import DecodingMethod, Need, Needs
from .tree import DraftTree, Level, TreeShape, follow, verify_drafts


Tree = Literal["dynamic", "static"]


@dataclass
class DraftTreeState(CursorState):
    """Adds to `CursorState`, for steps that decide up to L tokens:

    Attributes:
        shape: the size of the trees.
        fed_tokens: int64 [B, L], the tokens that the last step decided, which the drafter is fed in the next step; the
            last one at the end.
        fed_at: int64 [B, 2, L], their positions, and those of the tokens before them; -1 before the first one.
        features: [G, B, L, D], from which these tokens were sampled.
        drafter, drafter_cache: the drafter and its cache.
        accepts: the test of a draft.
    """

    image_dims = {**CursorState.image_dims, "features": 1}
    caches = ("cache", "drafter_cache")
    settled = frozenset({"shape", "drafter", "accepts"})

    model: FeatureModel
    shape: TreeShape
    fed_tokens: torch.LongTensor
    fed_at: torch.LongTensor
    features: torch.FloatTensor
    drafter: DraftModel
    drafter_cache: Any
    accepts: Accepts

    def put(self, images: torch.LongTensor, other: Self) -> bool:
        self.accepts.put(other.accepts)
        return super().put(images, other)

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
    """

    drafter: Drafter | None = field(default=None, repr=False)
    tree: Tree = "dynamic"
    depth: int = 5
    width: int = 8
    nodes: int = 32
    acceptance: Acceptance = field(default_factory=ExactAcceptance)

    def __post_init__(self):
        check_settings(self, {"depth": 1, "width": 1, "nodes": 1}, {"tree": get_args(Tree)}, largest=1024)
        if self.drafter is not None and not isinstance(self.drafter, Drafter):
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

    def positions(self, layout: Layout) -> int | None:
        return self.nodes + 1 + self.depth * self.width

    def start(self, model: FeatureModel, sampling: Sampling, seeds: torch.LongTensor) -> DraftTreeState:
        width = min(self.width, model.vocab_size)
        shape = TreeShape(self.depth, width, self.nodes, model.num_tokens, model.device)
        cache, logits, features = model.prefill(len(seeds), shape.nodes, return_features=True)
        trained = self._drafter(model)
        assert trained is not None
        drafter = trained.bind(model)
        state = DraftTreeState.open(
            model,
            sampling,
            seeds,
            cache,
            cursor=torch.ones_like(seeds),
            shape=shape,
            fed_tokens=seeds.new_zeros(len(seeds), shape.length),
            fed_at=F.pad(seeds.new_tensor([[0], [-1]]), (shape.length - 1, 0), value=-1).repeat(len(seeds), 1, 1),
            features=F.pad(features[:, :, None], (0, 0, shape.length - 1, 0)),
            drafter=drafter,
            drafter_cache=drafter.open_cache(len(seeds), shape.scratch),
            accepts=self.acceptance.bind(model),
        )
        decide_first(state, logits)
        state.fed_tokens[:, -1] = state.tokens[:, 0]
        return state

    def step(self, state: DraftTreeState) -> None:
        size, shape, cursor = state.model.num_tokens, state.shape, state.cursor[:, None]
        positions = cursor + shape.levels
        # Nothing comes after the last token.
        fed = positions.masked_fill(positions >= size - 1, -1)
        seen = shape.seen < cursor[..., None]
        levels, drafted = self._grow(state, positions, fed, seen)
        tree = shape.select(state.fed_tokens[:, -1:], levels, fed)
        state.invalid |= tree.broken
        ancestors = shape.ancestors(tree.parents)
        # The last decided token has a slot of its own.
        slots = torch.cat([positions[:, :1], shape.slots[:, : shape.nodes].expand(len(cursor), -1)], dim=1)
        logits, features = state.model.forward(
            tree.tokens,
            tree.positions,
            state.cache,
            visible=torch.cat([seen[:, :1, :size].expand(-1, shape.nodes + 1, -1), ancestors[..., 1:]], dim=2),
            slots=slots,
            return_features=True,
        )
        after = tree.positions + 1
        probabilities = state.probabilities(logits, after, tree.ended)
        accepted, sampled = self._verify(state, tree, after, probabilities, drafted)
        path, counts = follow(tree, accepted, ancestors, shape.length)
        tokens = torch.gather(sampled, 1, path, out=state.fed_tokens)
        if self._tests_at_once:
            # What is sampled after a node with an accepted child does not count.
            tokens[:, :-1] = tree.tokens.gather(1, path[:, 1:])

        state.advance(state.cursor + counts[:, -1])
        torch.add(state.cursor[:, None, None], shape.columns, out=state.fed_at)
        decided, nodes = state.fed_at.masked_fill_((counts == 0)[:, None], -1).unbind(1)
        state.token_buffer.scatter_(1, decided.remainder(size + 1), tokens)
        state.cache.move(slots.gather(1, path), nodes)
        index = path[None, :, :, None].expand(len(features), -1, -1, features.shape[-1])
        # Under torch.autocast, features may have another dtype than those of the prefill.
        torch.gather(features.to(state.features.dtype), 2, index, out=state.features)

    def _grow(
        self, state: DraftTreeState, positions: torch.LongTensor, fed: torch.LongTensor, seen: torch.BoolTensor
    ) -> tuple[list[Level], list[torch.FloatTensor]]:
        """The candidates of a step, and the probabilities [B, F, V] that each level was sampled from.

        Args:
            positions, fed: int64 [B, depth + 1], the positions of the last decided token and of each level, and where
                tokens are fed, see `TreeShape.select`.
            seen: bool [B, width, N + scratch], what candidates of the first level attend to.
        """
        shape, size = state.shape, state.model.num_tokens
        width, best = shape.width, shape.all
        logits, features = state.drafter.forward(
            state.fed_tokens, state.features, state.fed_at[:, 0], state.drafter_cache
        )
        logits, features = logits[:, :, -1:], features[:, :, -1:]
        levels, drafted, weights = [], [], None
        for depth in range(1, shape.depth + 1):
            at = positions[:, depth, None]
            probabilities = state.distribution(logits, at.expand(-1, logits.shape[2]))
            tokens, shares = self._children(state, probabilities, at, width)
            scores = shares if weights is None else shares * weights[..., None]
            levels.append(Level(tokens, scores, best))
            drafted.append(probabilities)
            if depth == shape.depth:
                break
            if depth == 1:
                tokens, weights = tokens[:, 0], scores[:, 0]
                features = features.expand(-1, -1, width, -1)
            else:
                # The candidates with the highest scores get children.
                weights, best = (values[:, :width] for values in scores.flatten(1).sort(descending=True, stable=True))
                tokens, origin = tokens.flatten(1).gather(1, best), (best // width)[..., None]
                seen = seen.gather(1, origin.expand(-1, -1, seen.shape[2]))
                seen.diagonal(size + (depth - 1) * width, 1, 2).fill_(True)
                features = features.gather(2, origin[None].expand(len(features), -1, -1, features.shape[-1]))
            logits, features = state.drafter.forward(
                tokens,
                features,
                fed[:, depth, None].expand(-1, width),
                state.drafter_cache,
                visible=seen,
                slots=shape.slots[:, (depth - 1) * width : depth * width].expand(len(tokens), -1),
            )
        return levels, drafted

    def _children(self, state, probabilities, at, width) -> tuple[torch.LongTensor, torch.FloatTensor]:
        """Tokens [B, F, width] that may follow each of F nodes, and the factors on the node's score, each at most
        1."""
        if self.tree == "dynamic":
            values, tokens = probabilities.topk(width, dim=-1)
            return tokens, values
        count = probabilities.shape[1] * width
        noise = uniforms(state.seeds, at, state.steps, Purpose.SIBLING, count)
        # The shape of the tree must not depend on the sampled tokens.
        factors = 0.5 ** torch.arange(1, width + 1, device=probabilities.device)
        tokens = sample_siblings(probabilities, noise.unflatten(-1, (-1, width))[:, 0])
        return tokens, factors.expand(*probabilities.shape[:2], -1)

    @property
    def _samples_first(self) -> bool:
        """Whether the token that is sampled from the model decides which child is followed."""
        return self.tree == "dynamic" and isinstance(self.acceptance, ExactAcceptance)

    @property
    def _tests_at_once(self) -> bool:
        return self.tree == "dynamic" and not self._samples_first

    def _verify(
        self,
        state: DraftTreeState,
        tree: DraftTree,
        after: torch.LongTensor,
        probabilities: torch.FloatTensor,
        drafted: list[torch.FloatTensor],
    ) -> tuple[torch.BoolTensor, torch.LongTensor]:
        """Which drafts [B, M] are accepted if their parents are, at most one child of a node, and the tokens
        [B, M + 1] that are sampled after each node, from `probabilities` [B, M + 1, V] at the positions `after` it.
        `drafted` are the distributions that each level was sampled from."""
        if self._samples_first:
            tokens = sample_at(probabilities, state.seeds, after, None, Purpose.SAMPLE)
            return tokens.gather(1, tree.parents[:, 1:]) == tree.tokens[:, 1:], tokens
        noise = uniforms(state.seeds, after, state.steps, Purpose.VERIFY, state.shape.width + 1)
        if self._tests_at_once:
            return verify_drafts(probabilities, tree, noise, state.accepts)
        children, groups = state.shape.children(tree)
        groups = groups[..., None].expand(-1, -1, probabilities.shape[2])
        q = torch.cat(drafted, dim=1).gather(1, groups)
        tokens, which = couple_siblings(probabilities, q, children, noise, state.accepts)
        return which.gather(1, tree.parents[:, 1:]) == tree.ranks[:, 1:], tokens
