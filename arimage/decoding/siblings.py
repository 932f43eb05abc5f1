"""Several drafts for one position: drawing them from one law and turning them into one draw from another."""

import torch
import torch.nn.functional as F

from ..kernels.coupling import sample
from .acceptance import Keeps


def sample_siblings(q: torch.FloatTensor, noise: torch.FloatTensor) -> torch.LongTensor:
    """Codes [..., K] drawn one after another from laws `q` [..., V] without replacement, by uniforms `noise` [..., K] in
    [0, 1); -1 once a law has no code left."""
    codes = []
    for uniform in noise.unbind(-1):
        code = sample(q, uniform)[..., None]
        codes.append(torch.where(q.gather(-1, code) > 0, code, -1))
        q = q.scatter(-1, code, 0)
    return torch.cat(codes, dim=-1)


def couple_siblings(
    p: torch.FloatTensor,
    q: torch.FloatTensor | None,
    x: torch.LongTensor,
    noise: torch.FloatTensor,
    keeps: Keeps | None = None,
) -> tuple[torch.LongTensor, torch.LongTensor]:
    """`couple` with several drafts: if x ~ q without replacement (`sample_siblings`), then y ~ p.

    The drafts are tried in turn. One is kept with probability min(1, p[x] / q[x]); if it is not, p becomes
    norm(max(p - q, 0)) and q loses the draft before the next is tried. When none is kept, y is drawn from the last p
    (recursive rejection sampling without replacement, https://arxiv.org/abs/2402.14160).

    Args:
        p, q: laws [..., V]; without q the drafts were not drawn, and each has a law of its own, which is one-hot.
        x: codes [..., K]; -1 is no draft.
        noise: uniforms [..., K + 1] in [0, 1): one to keep each draft, one to draw.
        keeps: another test of a draft (see `arimage.decoding.acceptance`); y ~ p no more, unless it is exact.

    Returns:
        y [...] and which draft was kept [...], 0 .. K - 1, or -1.
    """
    y = which = torch.full_like(x[..., 0], -1)
    for k, uniform in enumerate(noise[..., :-1].unbind(-1)):
        present, code = x[..., k] >= 0, x[..., k].clamp(min=0)
        law = F.one_hot(code, p.shape[-1]).to(p.dtype) if q is None else q
        if keeps is None:
            p_x, q_x = (values.gather(-1, code[..., None]).squeeze(-1) for values in (p, law))
            kept = uniform * q_x < p_x
        else:
            kept = keeps(p, law, code, uniform)
        kept &= present & (which < 0)
        y, which = torch.where(kept, code, y), torch.where(kept, k, which)
        residual = (p - law).clamp(min=0)
        total = residual.sum(-1, keepdim=True)
        p = torch.where(present[..., None] & (total > 0), residual / total, p)
        if q is not None:
            left = q.scatter(-1, code[..., None], 0)
            total = left.sum(-1, keepdim=True)
            q = torch.where(present[..., None], left / torch.where(total > 0, total, 1), q)
    return torch.where(which < 0, sample(p, noise[..., -1]), y), which
