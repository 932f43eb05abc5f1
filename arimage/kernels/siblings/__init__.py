"""Several drafts for one position: sampling them from one distribution, and coupling them to one sample of another."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from ..coupling import sample
from ..operation import operation


@operation(whole=("q", "first"))
def sample_siblings(
    q: torch.FloatTensor, noise: torch.FloatTensor, first: torch.LongTensor | None = None
) -> torch.LongTensor:
    """Sample tokens [..., K] one after another from `q` [..., V] without replacement, by uniforms `noise` [..., K] in
    [0, 1); -1 when no token is left. With `first` [...], a token that was sampled before, returns [..., K + 1] tokens
    that start with it."""
    tokens = []
    if first is not None:
        tokens.append(first[..., None])
        q = q.scatter(-1, tokens[0], 0)
    for uniform in noise.unbind(-1):
        token = sample(q, uniform)[..., None]
        tokens.append(torch.where(q.gather(-1, token) > 0, token, -1))
        q = q.scatter(-1, token, 0)
    return torch.cat(tokens, dim=-1)


def couple_siblings(
    p: torch.FloatTensor,
    q: torch.FloatTensor | None,
    x: torch.LongTensor,
    noise: torch.FloatTensor,
    accepts: Callable[..., torch.BoolTensor] | None = None,
) -> tuple[torch.LongTensor, torch.LongTensor]:
    """`arimage.kernels.coupling.couple` with several drafts: if x ~ q without replacement (`sample_siblings`), then y
    ~ p.

    The drafts are tried in turn. Each is accepted with probability min(1, p[x] / q[x]). After a rejection, p becomes
    norm(max(p - q, 0)) and q loses the draft. If none is accepted, y is sampled from the last p (recursive rejection
    sampling without replacement, https://arxiv.org/abs/2402.14160).

    Args:
        p, q: probabilities [..., V]. q is None for drafts that were not sampled: each has a one-hot distribution of
            its own.
        x: tokens [..., K]; -1 is no draft.
        noise: uniforms [..., K + 1] in [0, 1): one to test each draft, one to sample y.
        accepts: another test of a draft, `accepts(p, q, x, uniform)`. y then follows p only if the test is exact.

    Returns:
        y [...], and the number of the accepted draft [...], 0 .. K - 1, or -1.
    """
    # Only the exact test of sampled drafts has kernels.
    if q is not None and accepts is None:
        return _couple_siblings(p, q, x, noise)
    return _try_drafts(p, q, x, noise, accepts)


@operation(whole=("p", "q", "x"))
def _couple_siblings(
    p: torch.FloatTensor, q: torch.FloatTensor, x: torch.LongTensor, noise: torch.FloatTensor
) -> tuple[torch.LongTensor, torch.LongTensor]:
    return _try_drafts(p, q, x, noise, None)


def _try_drafts(
    p: torch.FloatTensor,
    q: torch.FloatTensor | None,
    x: torch.LongTensor,
    noise: torch.FloatTensor,
    accepts: Callable | None,
) -> tuple[torch.LongTensor, torch.LongTensor]:
    y = which = torch.full_like(x[..., 0], -1)
    is_draft, tokens = (x >= 0).unbind(-1), x.clamp(min=0).unbind(-1)
    for k, (present, token, uniform) in enumerate(zip(is_draft, tokens, noise.unbind(-1), strict=False)):
        drafted = F.one_hot(token, p.shape[-1]).to(p.dtype) if q is None else q
        if accepts is None:
            p_x, q_x = (values.gather(-1, token[..., None]).squeeze(-1) for values in (p, drafted))
            kept = uniform * q_x < p_x
        else:
            kept = accepts(p, drafted, token, uniform)
        kept = kept & present & (which < 0)
        y, which = torch.where(kept, token, y), torch.where(kept, k, which)
        residual = (p - drafted).clamp_(min=0)
        total = residual.sum(-1, keepdim=True)
        p = torch.where(present[..., None] & (total > 0), residual / total, p)
        if q is not None and k + 1 < len(tokens):
            left = q.scatter(-1, token[..., None], 0)
            total = left.sum(-1, keepdim=True)
            q = torch.where(present[..., None], left / torch.where(total > 0, total, 1), q)
    return torch.where(which < 0, sample(p, noise[..., -1]), y), which
