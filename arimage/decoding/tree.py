"""Trees of drafts: which candidates are verified, and which tokens each of them attends to."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass
class DraftTree:
    """M drafts for each of B images. Node 0 is the last decided token, node m + 1 is draft m; parents come before
    children.

    Attributes:
        tokens: int64 [B, M]; -1 where there is no draft.
        depths: int64 [B, M]; the children of node 0 have depth 1.
        parents: int64 [B, M], nodes.
        children: int64 [B, M + 1, K], nodes in the order in which they are tried; 0 where there is none.
        groups: int64 [B, M + 1], the group of candidates that the children of a node come from.
    """

    tokens: torch.LongTensor
    depths: torch.LongTensor
    parents: torch.LongTensor
    children: torch.LongTensor
    groups: torch.LongTensor


def select(
    tokens: torch.LongTensor,
    scores: torch.FloatTensor,
    parents: torch.LongTensor,
    depths: torch.LongTensor,
    nodes: int,
) -> DraftTree:
    """The tree of the `nodes` candidates with the highest scores, or of all candidates if there are fewer.

    Args:
        tokens, scores: [B, L, K], the candidates: L groups, each with the K children of one node. A child never has a
            higher score than its parent, whose group comes first.
        parents: int64 [B, L], the parent of each group, an index into the candidates of all groups; -1 is node 0.
        depths: int64 [L], the depth of each group.
    """
    batch, groups, width = tokens.shape
    nodes = min(nodes, groups * width)
    # Stable, so that a parent comes before a child with the same score.
    best = scores.flatten(1).sort(dim=1, descending=True, stable=True).indices[:, :nodes]
    chosen = best.sort(dim=1).values
    group = chosen // width
    numbers = torch.arange(1, nodes + 1, device=tokens.device).expand(batch, -1)
    node_of = torch.zeros(batch, groups * width + 1, dtype=torch.long, device=tokens.device)
    node_of = node_of.scatter(1, chosen + 1, numbers)
    parents = node_of.gather(1, parents.gather(1, group) + 1)
    children = torch.zeros(batch, (nodes + 1) * width, dtype=torch.long, device=tokens.device)
    children = children.scatter(1, parents * width + chosen % width, numbers)
    groups_of = torch.zeros(batch, nodes + 1, dtype=torch.long, device=tokens.device).scatter(1, parents, group)
    return DraftTree(
        tokens=tokens.flatten(1).gather(1, chosen),
        depths=depths[group],
        parents=parents,
        children=children.unflatten(1, (nodes + 1, width)),
        groups=groups_of,
    )


def ancestors(tree: DraftTree, depth: int) -> torch.BoolTensor:
    """Which drafts [B, M + 1, M] of a tree with at most `depth` levels are on the path to a node, the node
    included."""
    up = F.pad(tree.parents, (1, 0))
    count = up.shape[1]
    node = torch.arange(count, device=up.device).expand_as(up)
    seen = torch.zeros(*up.shape, count, dtype=torch.bool, device=up.device)
    for _ in range(depth):
        seen |= F.one_hot(node, count).bool()
        node = up.gather(1, node)
    return seen[:, :, 1:]
