"""Several drafts for one position: drawing them from one law and turning them into one draw from another."""

import torch

from .coupling import draw


def draw_siblings(q: torch.FloatTensor, noise: torch.FloatTensor) -> torch.LongTensor:
    """Codes [..., K] drawn one after another from laws `q` [..., V] without replacement, by uniforms `noise` [..., K] in
    [0, 1); -1 once a law has no code left."""
    codes = []
    for uniform in noise.unbind(-1):
        code = draw(q, uniform)[..., None]
        codes.append(torch.where(q.gather(-1, code) > 0, code, -1))
        q = q.scatter(-1, code, 0)
    return torch.cat(codes, dim=-1)


def couple_siblings(
    p: torch.FloatTensor, q: torch.FloatTensor, x: torch.LongTensor, noise: torch.FloatTensor
) -> tuple[torch.LongTensor, torch.LongTensor]:
    """`couple` with several drafts: if x ~ q without replacement (`draw_siblings`), then y ~ p.

    The drafts are tried in turn. One is kept with probability min(1, p[x] / q[x]); if it is not, p becomes
    norm(max(p - q, 0)) and q loses the draft before the next is tried. When none is kept, y is drawn from the last p
    (recursive rejection sampling without replacement, https://arxiv.org/abs/2402.14160).

    Args:
        p, q: laws [..., V].
        x: codes [..., K]; -1 is no draft.
        noise: uniforms [..., K + 1] in [0, 1): one to keep each draft, one to draw.

    Returns:
        y [...] and which draft was kept [...], 0 .. K - 1, or -1.
    """
    y = which = torch.full_like(x[..., 0], -1)
    for k, uniform in enumerate(noise[..., :-1].unbind(-1)):
        code = x[..., k, None].clamp(min=0)
        p_x, q_x = (law.gather(-1, code).squeeze(-1) for law in (p, q))
        kept = (which < 0) & (x[..., k] >= 0) & (uniform * q_x < p_x)
        y, which = torch.where(kept, x[..., k], y), torch.where(kept, k, which)
        residual = (p - q).clamp(min=0)
        total = residual.sum(-1, keepdim=True)
        # Where drafts run out q is zero, and p is its own residual.
        p = torch.where(total > 0, residual / total, p)
        q = torch.where(x[..., k, None] < 0, q, q.scatter(-1, code, 0))
        total = q.sum(-1, keepdim=True)
        q = torch.where(total > 0, q / total, q)
    return torch.where(which < 0, draw(p, noise[..., -1]), y), which
