"""Decoding with a drafter: a tree of drafts grown by a small network, verified by the model in one pass."""

from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
import torch.nn.functional as F

from ..kernels.coupling import sample
from .acceptance import Acceptance, ExactAcceptance, Keeps
from .autoregressive import AutoregressiveDecoding
from .distribution import Sampling
from .interface import Drafter, DraftModel, TokenModel
from .noise import Purpose, uniforms
from .siblings import couple_siblings, sample_siblings
from .state import DecodingState
from .tree import DraftTree, ancestors, select
from .window import write_tokens


Tree = Literal["dynamic", "static"]


@dataclass
class DraftTreeState(DecodingState):
    """Adds to `DecodingState`: `cursor` [B], the first position not decided; `entered` [B], how many codes the last pass
    decided, and `features` [G, B, depth + 1, D], what they were drawn from; the drafter and its cache; the test of drafts."""

    cursor: torch.LongTensor = None
    entered: torch.LongTensor = None
    features: torch.FloatTensor = None
    drafter: DraftModel = None
    drafter_cache: object = None
    keeps: Keeps = None


@dataclass(frozen=True)
class DraftTreeDecoding:
    """Speculative decoding with a drafter that continues the model's features, and a tree of its drafts. A pass decides the
    longest branch that is accepted and one code more. Every image has a cursor of its own. `forward_passes` counts those of
    the model; the drafter takes `depth` more, of its own, before each.

    A "dynamic" tree (EAGLE-2, https://arxiv.org/abs/2406.16858) has the drafter's most probable codes as children, and of
    all that were grown the `nodes` that are the most probable as a branch. With the exact acceptance the code that the model
    draws decides which child is followed: the images are those of `AutoregressiveDecoding` with the same seeds, up to the
    rounding of differently shaped matrix products. In a "static" tree (EAGLE, https://arxiv.org/abs/2401.15077) children are
    drawn from the drafter's law, without replacement, and the shape is always the same: as if the first draft of a node was
    accepted half of the time, the second half of the rest, and so on.

    Exact with the exact acceptance. With neighbours in the codebook it is LANTERN (https://arxiv.org/abs/2410.03355).

    Attributes:
        drafter: a drafter for the model; None is the model's own.
        tree: "dynamic" or "static".
        depth: drafts on a branch, >= 1.
        width: children of a node, and nodes of a level that have children, >= 1.
        nodes: drafts that a pass verifies, >= 1.
        acceptance: the test of a draft, as in `SpeculativeJacobiDecoding`.

    Raises:
        ValueError: if a setting is not among these or, at the start, the model has no drafter.
    """

    drafter: Drafter | None = field(default=None, repr=False)
    tree: Tree = "dynamic"
    depth: int = 5
    width: int = 8
    nodes: int = 32
    acceptance: Acceptance = field(default_factory=ExactAcceptance)

    def __post_init__(self):
        if self.tree not in get_args(Tree):
            raise ValueError(f"tree is {self.tree!r}: choose among {', '.join(get_args(Tree))}")
        for name in ("depth", "width", "nodes"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}: give a whole number of at least 1")
        if not isinstance(self.acceptance, Acceptance):
            choices = ", ".join(f"{choice.__name__}()" for choice in get_args(Acceptance))
            raise ValueError(f"acceptance is {self.acceptance!r}: choose among {choices}")

    @property
    def exact(self) -> bool:
        return self.acceptance.exact

    def start(self, model: TokenModel, sampling: Sampling, seeds: torch.LongTensor) -> DraftTreeState:
        drafter = getattr(model, "drafter", None) if self.drafter is None else self.drafter
        if drafter is None:
            raise ValueError("this model has no drafter: train one with `arimage train drafter`, or give `drafter`")
        cache, logits, features = model.prefill(len(seeds), self.nodes, return_features=True)
        state = DraftTreeState(**vars(AutoregressiveDecoding().begin(model, sampling, seeds, cache, logits)))
        state.cursor = state.entered = torch.ones_like(seeds)
        state.features = F.pad(features[:, :, None], (0, 0, 0, self.depth))
        state.drafter = drafter.bind(model)
        state.drafter_cache = state.drafter.open_cache(len(seeds), self.depth * self.width)
        state.keeps = self.acceptance.bind(model)
        return state

    def step(self, state: DraftTreeState) -> DraftTreeState:
        size, cursor = state.model.num_tokens, state.cursor
        tree, draft_probabilities = self._grow(state)
        root = (cursor - 1)[:, None]
        drafts = torch.arange(tree.tokens.shape[1], device=cursor.device).expand_as(tree.tokens)
        positions = torch.cat([root, torch.where(tree.tokens < 0, -1, root + tree.depths)], dim=1)
        positions = torch.where(state.finished[:, None], -1, positions)
        decided = (torch.arange(size, device=cursor.device) < cursor[:, None])[:, None]
        scratch = F.pad(ancestors(tree, self.depth), (0, self.nodes - tree.tokens.shape[1]))
        logits, features = state.model.forward(
            torch.cat([state.tokens.gather(1, root), tree.tokens.clamp(min=0)], dim=1),
            positions,
            state.cache,
            visible=torch.cat([decided.expand(-1, scratch.shape[1], -1), scratch], dim=2),
            slots=torch.cat([root, size + drafts], dim=1),
            return_features=True,
        )
        law = state.sampling.probabilities(logits, (positions + 1).clamp(max=size - 1))
        codes, path, reached = self._walk(state, tree, law, draft_probabilities)

        offsets = torch.arange(self.depth + 1, device=cursor.device)
        ahead = cursor[:, None] + offsets
        accepted = torch.minimum(reached.sum(1), size - cursor)
        write_tokens(state, ahead, offsets < accepted[:, None], codes)
        source = torch.where(reached, size + path - 1, size)[:, 1:]
        state.cache.move(source, torch.where(reached[:, 1:], ahead[:, :-1], -1))
        index = path[None, :, :, None].expand(len(features), -1, -1, features.shape[-1])
        state.features, state.entered = features.gather(2, index), accepted
        state.cursor = cursor + accepted
        state.finished = state.cursor >= size
        state.decided = torch.arange(size, device=cursor.device) < state.cursor[:, None]
        state.record(accepted)
        return state

    def _grow(self, state: DraftTreeState) -> tuple[DraftTree, torch.FloatTensor]:
        """The drafts of a pass, and the laws [B, L, V] that the groups of children were drawn from."""
        size, cursor = state.model.num_tokens, state.cursor
        width = min(self.width, state.model.vocab_size)
        decided = (torch.arange(size, device=cursor.device) < cursor[:, None])[:, None].expand(-1, width, -1)
        # The drafter takes in the codes decided since, with the model's features.
        offsets = torch.arange(self.depth + 1, device=cursor.device)
        positions = (cursor - state.entered)[:, None] + offsets
        live = offsets < state.entered[:, None]
        tokens = state.tokens.gather(1, positions.clamp(max=size - 1))
        logits, features = state.drafter.forward(
            tokens, state.features, torch.where(live, positions, -1), state.drafter_cache
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
            law = state.sampling.probabilities(logits, at.expand_as(live))
            law = torch.where(live[..., None], law, 0)
            tokens, gains = self._children(state, law, at, width)
            scores = scores[..., None] + gains
            level = torch.full_like(parents[0], depth)
            grown.append((tokens, scores, parents, law, level))
            if depth == self.depth:
                break
            # Those with the highest scores have children of their own.
            scores, best = (
                values[:, :width] for values in scores.flatten(1).sort(dim=1, descending=True, stable=True)
            )
            tokens, origin = tokens.flatten(1).gather(1, best), best // width
            parents = width * sum(len(row[4]) for row in grown[:-1]) + best
            # The last position has none after it.
            live = (tokens >= 0) & (cursor + depth < size)[:, None]
            slots = torch.arange(width, device=cursor.device).expand_as(tokens) + (depth - 1) * width
            seen = seen.gather(1, origin[..., None].expand(-1, -1, seen.shape[2])).scatter(2, slots[..., None], True)
            logits, features = state.drafter.forward(
                tokens.clamp(min=0),
                features.gather(2, origin[None, ..., None].expand(len(features), -1, -1, features.shape[-1])),
                torch.where(live, at, -1),
                state.drafter_cache,
                visible=torch.cat([decided, seen], dim=2),
                slots=size + slots,
            )
        tokens, scores, parents, laws, depths = (
            torch.cat(values, dim=0 if values[0].ndim == 1 else 1) for values in zip(*grown, strict=True)
        )
        return select(tokens, scores, parents, depths, self.nodes), laws

    def _children(self, state, law, at, width) -> tuple[torch.LongTensor, torch.FloatTensor]:
        """Codes [B, F, width] that may follow each of F nodes, and what they add to its score."""
        if self.tree == "dynamic":
            values, codes = law.topk(width, dim=-1)
            return torch.where(values > 0, codes, -1), values.log()
        count = law.shape[1] * width
        noise = uniforms(state.seeds, at, Purpose.SIBLING, state.forward_passes, count)
        # The shape must not depend on what was drawn.
        gains = -torch.arange(1.0, width + 1, device=law.device)
        return sample_siblings(law, noise.unflatten(-1, (-1, width))[:, 0]), gains.expand(*law.shape[:2], -1)

    def _walk(
        self, state: DraftTreeState, tree: DraftTree, law: torch.FloatTensor, draft_probabilities: torch.FloatTensor
    ) -> tuple[torch.LongTensor, torch.LongTensor, torch.BoolTensor]:
        """Down the tree by the laws [B, M + 1, V] after its nodes: the codes [B, depth + 1] drawn, after which nodes they
        were drawn, and whether there was such a node."""
        cursor, width = state.cursor, tree.children.shape[2]
        at = (cursor[:, None] + torch.arange(self.depth + 1, device=cursor.device)).clamp(
            max=state.model.num_tokens - 1
        )
        chosen = self.tree == "dynamic" and isinstance(self.acceptance, ExactAcceptance)
        if chosen:
            noise = uniforms(state.seeds, at, Purpose.SAMPLE, 0, 1)
        else:
            noise = uniforms(state.seeds, at, Purpose.VERIFY, state.forward_passes, width + 1)
        tokens = F.pad(tree.tokens, (1, 0), value=-1)
        node, going = torch.zeros_like(cursor), ~state.finished
        codes, path, reached = [], [], []
        for depth in range(self.depth + 1):
            p = law.gather(1, node[:, None, None].expand(-1, 1, law.shape[2]))[:, 0]
            children = tree.children.gather(1, node[:, None, None].expand(-1, 1, width))[:, 0]
            drafts = tokens.gather(1, children)
            if chosen:
                code = sample(p, noise[:, depth, 0])
                child = torch.where(drafts == code[:, None], children, 0).amax(1)
            else:
                group = tree.groups.gather(1, node[:, None])[..., None]
                q = None
                if self.tree == "static":
                    q = draft_probabilities.gather(1, group.expand(-1, 1, draft_probabilities.shape[2]))[:, 0]
                code, which = couple_siblings(p, q, drafts, noise[:, depth], state.keeps)
                child = torch.where(which < 0, 0, children.gather(1, which.clamp(min=0)[:, None])[:, 0])
            codes.append(code)
            path.append(node)
            reached.append(going)
            node, going = child, going & (child > 0)
        return torch.stack(codes, dim=1), torch.stack(path, dim=1), torch.stack(reached, dim=1)
