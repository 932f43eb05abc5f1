"""Several drafts for one position: sampling them from one distribution and turning them into one sample of another."""

import torch
import torch.nn.functional as F

from ..kernels.coupling import sample
from .acceptance import Accepts


def sample_siblings(q: torch.FloatTensor, noise: torch.FloatTensor) -> torch.LongTensor:
    """Tokens [..., K] sampled one after another from `q` [..., V] without replacement, by uniforms `noise` [..., K] in [0, 1);
    -1 once no token is left."""
    tokens = []
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
    accepts: Accepts | None = None,
) -> tuple[torch.LongTensor, torch.LongTensor]:
    """`couple` with several drafts: if x ~ q without replacement (`sample_siblings`), then y ~ p.

    The drafts are tried in turn. One is accepted with probability min(1, p[x] / q[x]); if it is not, p becomes
    norm(max(p - q, 0)) and q loses the draft before the next is tried. When none is accepted, y is sampled from the last p
    (recursive rejection sampling without replacement, https://arxiv.org/abs/2402.14160).

    Args:
        p, q: probabilities [..., V]; without q the drafts were not sampled, and each has a one-hot distribution of its own.
        x: tokens [..., K]; -1 is no draft.
        noise: uniforms [..., K + 1] in [0, 1): one to test each draft, one to sample.
        accepts: another test of a draft (see `arimage.decoding.acceptance`); y no longer follows p, unless it is exact.

    Returns:
        y [...] and which draft was accepted [...], 0 .. K - 1, or -1.
    """
    y = which = torch.full_like(x[..., 0], -1)
    for k, uniform in enumerate(noise[..., :-1].unbind(-1)):
        present, token = x[..., k] >= 0, x[..., k].clamp(min=0)
        drafted = F.one_hot(token, p.shape[-1]).to(p.dtype) if q is None else q
        if accepts is None:
            p_x, q_x = (values.gather(-1, token[..., None]).squeeze(-1) for values in (p, drafted))
            kept = uniform * q_x < p_x
        else:
            kept = accepts(p, drafted, token, uniform)
        kept &= present & (which < 0)
        y, which = torch.where(kept, token, y), torch.where(kept, k, which)
        residual = (p - drafted).clamp(min=0)
        total = residual.sum(-1, keepdim=True)
        p = torch.where(present[..., None] & (total > 0), residual / total, p)
        if q is not None:
            left = q.scatter(-1, token[..., None], 0)
            total = left.sum(-1, keepdim=True)
            q = torch.where(present[..., None], left / torch.where(total > 0, total, 1), q)
    return torch.where(which < 0, sample(p, noise[..., -1]), y), which
