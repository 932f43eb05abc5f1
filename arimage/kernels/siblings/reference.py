"""The reference of siblings in torch."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from ..coupling.reference import sample


def sample_siblings(
    q: torch.FloatTensor, noise: torch.FloatTensor, first: torch.LongTensor | None
) -> torch.LongTensor:
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
    accepts: Callable | None = None,
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
