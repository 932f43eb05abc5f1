"""Drafts that follow the tokens next to them, which have changed since the model evaluated them."""

import torch
import torch.nn.functional as F

from ...kernels.coupling import couple
from ..contract.models import TokenModel
from .window import WindowState


def ranks_around(model: TokenModel, batch_size: int, size: int) -> torch.LongTensor:
    """The ranks [B, `size`, K] of the tokens next to each rank that are generated before it; -1 where there is none,
    and after the end of the image."""
    assert model.neighbours is not None
    ranks = torch.arange(model.num_tokens, device=model.device).repeat(batch_size, 1)
    around = torch.stack([model.layout.neighbours(ranks, offset) for offset in model.neighbours.offsets], dim=-1)
    around = torch.where(around < ranks[..., None], around, -1)
    return F.pad(around, (0, 0, 0, size - model.num_tokens), value=-1)


def tokens_around(tokens: torch.LongTensor, around: torch.LongTensor, positions: torch.LongTensor) -> torch.LongTensor:
    """The tokens [B, W, K] next to `positions` [B, W], of `tokens` [B, N + S]; -1 where there is none."""
    ranks = around.gather(1, positions[..., None].expand(-1, -1, around.shape[2]))
    found = tokens.gather(1, ranks.clamp(min=0).flatten(1)).view_as(ranks)
    return torch.where(ranks < 0, -1, found)


def correct(
    state: WindowState,
    around: torch.LongTensor,
    rounds: int,
    open_drafts: torch.BoolTensor,
    evaluated: tuple[torch.LongTensor, torch.LongTensor, torch.LongTensor],
    outputs: tuple[torch.Tensor, torch.Tensor | None],
    p: torch.FloatTensor,
    q: torch.FloatTensor,
    noise: torch.FloatTensor,
) -> torch.FloatTensor:
    """Sample the undecided drafts of a step again, from the model's distribution as it would be, about, after the
    tokens that are next to them now. Each round corrects all drafts at once, for the tokens of the round before, so
    that after n rounds n drafts in a row fit each other.

    What a draft is sampled from depends on the tokens and the noise before it only, and is recorded for the test of
    the next step, so this is exact whatever the correction.

    Args:
        around: from `ranks_around`.
        open_drafts: bool [B, W], the drafts that this step has not decided.
        evaluated: the positions, drafts [B, W] and `tokens_around` that the forward pass had.
        outputs: its logits [G, B, W, V], and the features [G, B, W, D] where the neighbours read them.
        p, q: [B, W, V], the model's distributions given these, and those that the drafts were sampled from.
        noise: [B, W, 2], the numbers that the drafts were verified by.

    Returns:
        The distributions [B, W, V] that the drafts, which are in the state's `token_buffer`, are sampled from now.
    """
    assert state.model.neighbours is not None
    (positions, drafts, before), (logits, features) = evaluated, outputs
    logits = state.sampling.guided_values(logits, positions)
    if features is not None:
        features = state.sampling.guided_values(features, positions)
    decided, corrected = state.token_buffer.gather(1, positions), p
    for _ in range(rounds):
        now = tokens_around(state.token_buffer, around, positions)
        likely = logits + state.model.neighbours.change(now, before, features)
        likely = state.distribution(likely[None], positions)
        corrected = torch.where(open_drafts[..., None], likely, p)
        tokens, _ = couple(corrected, q, drafts, noise)
        state.token_buffer.scatter_(1, positions, torch.where(open_drafts, tokens, decided))
    return corrected
