"""Trees of drafts: which candidates are verified, and which tokens each of them attends to."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..kernels.coupling import sample


class Level(NamedTuple):
    """Candidates of one depth: F groups, each with the K children of one node.

    Attributes:
        tokens: int64 [B, F, K]; -1 where there is no draft.
        scores: float32 [B, F, K], at most that of the parent; 0 where there is no draft.
        parents: int64 [B, F] or [1, F], the indices of the parents among the candidates of the level before.
    """

    tokens: torch.LongTensor
    scores: torch.FloatTensor
    parents: torch.LongTensor


@dataclass
class DraftTree:
    """M drafts for each of B images. Node 0 is the last decided token, node m is draft m; parents come before
    children, and earlier siblings before later ones.

    Attributes:
        tokens: int64 [B, M + 1]; -1 where there is no draft.
        positions: int64 [B, M + 1]; -1 for a token that is not fed, since nothing comes after it.
        ended: bool [B, M + 1], where no token is decided after a node, since it has no draft, or is not fed.
        parents: int64 [B, M + 1], nodes; node 0 is its own parent.
        ranks: int64 [B, M + 1], the place of a draft among the candidates of its group.
        groups: int64 [B, M + 1], the group that a draft comes from, counted over all levels from 0 on; 0 for node 0.
        depths: int64 [B, M + 1], 1 for node 0.
        broken: bool [B], whether any scores are not finite.
    """

    tokens: torch.LongTensor
    positions: torch.LongTensor
    ended: torch.BoolTensor
    parents: torch.LongTensor
    ranks: torch.LongTensor
    groups: torch.LongTensor
    depths: torch.LongTensor
    broken: torch.BoolTensor


class TreeShape:
    """The size of trees, and constants from which they are made without a launch.

    Args:
        depth, width: how many levels of candidates there are, and how many children a node has. As many nodes of each
            level have children.
        nodes: how many candidates are verified; all of them if there are fewer.
        size: N tokens per image.

    Attributes:
        nodes: M.
        length: the largest number of tokens that a step decides.
        scratch: the number of nodes with children, the root aside.
        levels: [depth + 1], the position of the root and of each level, from the cursor on.
        all: [1, width], the candidates of the first level, all of which have children.
        slots: [1, max(nodes, scratch)], the scratch slots of a cache.
        seen: [width, size + scratch], below the cursor at the slots that children of the root see in the drafter's
            cache.
        columns: [2, length], the positions of the last `length` tokens before the cursor, and those before them.
    """

    def __init__(self, depth: int, width: int, nodes: int, size: int, device: torch.device):
        self.depth, self.width, self.scratch = depth, width, (depth - 1) * width
        self.nodes = min(nodes, width + self.scratch * width)
        self.length = min(self.nodes, depth) + 1
        group = torch.arange(2 + self.scratch, device=device).repeat_interleave(width)
        rank = torch.arange(width, device=device).repeat(2 + self.scratch)
        # The levels of the groups: the root, its children, then `width` groups each.
        level = torch.where(group < 2, group, 2 + (group - 2) // width)
        # The first candidate of the level before.
        before = torch.where(level < 3, level - 1, 2 + (level - 3) * width).clamp(min=0) * width
        # Trees of finished images consist of the root and the rest of its group, which count as its children.
        self._table = torch.stack([before, rank, group.clamp(min=1) - 1, level + 1])
        # The root comes first, since NaN is sorted before all numbers. The rest of its group come last: they are no
        # candidates.
        others = torch.full((1, 1, width), -1.0, device=device, dtype=torch.float32)
        self._root = others.index_fill_(2, rank[:1], torch.nan)
        self._none = torch.zeros(1, 1, width, dtype=torch.long, device=device)
        self._eye = torch.eye(self.nodes + 1, device=device, dtype=torch.float32)
        self.all = rank[None, :width]
        self.levels = torch.arange(-1, depth, device=device)
        # They see decided tokens and themselves.
        own = torch.arange(self.scratch, device=device) != rank[:width, None]
        self.seen = torch.cat([torch.arange(size, device=device).expand(width, -1), size * own], dim=1)
        self.slots = size + torch.arange(max(self.nodes, self.scratch), device=device)[None]
        self.columns = torch.arange(-self.length, 0, device=device) - torch.arange(2, device=device)[:, None]

    def select(self, root: torch.LongTensor, levels: Sequence[Level], positions: torch.LongTensor) -> DraftTree:
        """The tree of the candidates with the highest scores.

        Args:
            root: int64 [B, 1], the last decided token.
            levels: all levels. The parents of the first one are ignored, and those of the second are all of the first.
            positions: int64 [B, depth + 1], of the root and of each level; -1 where tokens are not fed.
        """
        batch, width = len(root), self.width
        sizes = [1, *(level.tokens.shape[1] for level in levels)]
        tokens = [root[..., None].expand(-1, -1, width), *(level.tokens for level in levels)]
        parents = [self._none.expand(batch, 2, -1)]
        parents += [level.parents[..., None].expand(batch, -1, width) for level in levels[1:]]
        at = [positions[:, depth, None, None].expand(-1, count, width) for depth, count in enumerate(sizes)]
        values = torch.cat([*tokens, *parents, *at], dim=1).view(batch, 3, -1)
        scores = torch.cat([self._root.expand(batch, -1, -1), *(level.scores for level in levels)], dim=1).flatten(1)
        # Stable, so that a parent comes before a child with the same score.
        scores, order = scores.masked_fill_(values[:, 2] < 0, 0).sort(dim=1, descending=True, stable=True)
        chosen = order[:, : self.nodes + 1]
        tokens, parents, positions = values.gather(2, chosen[:, None].expand(-1, 3, -1)).unbind(1)
        before, ranks, groups, depths = self._table[:, chosen]
        return DraftTree(
            tokens=tokens,
            positions=positions,
            ended=scores[:, : self.nodes + 1] <= 0,
            parents=order.argsort(1).gather(1, parents + before),
            ranks=ranks,
            groups=groups,
            depths=depths,
            broken=scores[:, 1].isnan(),
        )

    def ancestors(self, parents: torch.LongTensor) -> torch.BoolTensor:
        """Which nodes are on the path to a node, itself included, bool [B, M + 1, M + 1]; node 0 may be left out."""
        seen = self._eye.expand(len(parents), -1, -1).scatter(2, parents[..., None], 1)
        # Every product doubles the length of the paths. It counts paths, more than there are numbers in deep trees.
        for _ in range(max(self.depth - 2, 0).bit_length()):
            seen = seen @ seen
            if self.depth > 64:
                seen.clamp_(max=1)
        return seen > 0

    def children(self, tree: DraftTree) -> tuple[torch.LongTensor, torch.LongTensor]:
        """The tokens [B, M + 1, K] of the children of each node, in the order in which they are tried, -1 where there
        is none; and the group [B, M + 1] that they come from, from 0 on."""
        tokens, parents = tree.tokens.masked_fill(tree.ended, -1)[:, 1:], tree.parents[:, 1:]
        batch, width = len(tokens), self.width
        at = torch.add(tree.ranks[:, 1:], parents, alpha=width)
        children = tokens.new_full((batch, (self.nodes + 1) * width), -1).scatter_(1, at, tokens)
        groups = torch.zeros_like(tree.parents).scatter_(1, parents, tree.groups[:, 1:])
        return children.unflatten(1, (-1, width)), groups


def follow(
    tree: DraftTree, accepted: torch.BoolTensor, ancestors: torch.BoolTensor, length: int
) -> tuple[torch.LongTensor, torch.LongTensor]:
    """The path of accepted drafts: its nodes [B, `length`] in order, the last one at the end, and for each of them
    how many tokens are decided up to there; 0 where there is no node, before the root.

    Args:
        accepted: bool [B, M], which drafts are accepted if their parents are; at most one child of a node.
        ancestors: see `TreeShape.ancestors`.
    """
    reached = (accepted[:, None] >= ancestors[:, :, 1:]).all(-1)
    counts, path = ((reached > tree.ended) * tree.depths).sort(1)
    return path[:, -length:], counts[:, -length:]


def verify_drafts(
    p: torch.FloatTensor, tree: DraftTree, noise: torch.FloatTensor, accepts: Callable[..., torch.BoolTensor]
) -> tuple[torch.BoolTensor, torch.LongTensor]:
    """Which drafts are accepted [B, M] if their parents are, and the tokens [B, M + 1] that are sampled after each
    node if none of its children is accepted.

    Equals `arimage.kernels.siblings.couple_siblings` of the children of each node, each of which has a one-hot
    distribution of its own: rejecting a draft takes its token out of the distribution, so all drafts can be tested at
    once.

    Args:
        p: the probabilities [B, M + 1, V] after each node.
        noise: uniforms [B, M + 1, K + 1], one to test each child of a node, one to sample the token after it.
        accepts: the test of a draft, see `arimage.decoding.acceptance.Accepts`.
    """
    parents, tokens, ended = tree.parents[:, 1:], tree.tokens[:, 1:], tree.ended[:, 1:]
    size, drafts = p.shape[2], parents.shape[1]
    before = p.gather(1, parents[..., None].expand(-1, -1, size))
    # What a draft takes out of the distribution of its parent.
    mass = before.gather(2, tokens[..., None])[..., 0].neg_().masked_fill_(ended, 0)
    earlier = (parents[:, :, None] == parents[:, None]).tril_(-1)
    before.scatter_add_(2, tokens[:, None].expand(-1, drafts, -1), earlier * mass[:, None])
    before /= before.sum(-1, keepdim=True)
    drafted = torch.zeros_like(before).scatter_(2, tokens[..., None], 1)
    uniform = noise.flatten(1).gather(1, torch.add(tree.ranks[:, 1:], parents, alpha=noise.shape[2]))
    accepted = accepts(before, drafted, tokens, uniform) > ended
    accepted = accepted > (earlier & accepted[:, None]).any(-1)
    rest = p.flatten(1).scatter_add(1, torch.add(tokens, parents, alpha=size), mass).view_as(p)
    return accepted, sample(rest, noise[..., -1])
