"""Several drafts for one position: sampling them from one distribution, and coupling them to one sample of another."""

from collections.abc import Callable

import torch

from .. import runs_triton
from . import reference


def sample_siblings(
    q: torch.FloatTensor, noise: torch.FloatTensor, first: torch.LongTensor | None = None
) -> torch.LongTensor:
    """Sample tokens [..., K] one after another from `q` [..., V] without replacement, by uniforms `noise` [..., K] in
    [0, 1); -1 when no token is left. With `first` [...], a token that was sampled before, returns [..., K + 1] tokens
    that start with it."""
    if runs_triton(q):
        from . import triton

        return triton.sample_siblings(q, noise, first)
    return reference.sample_siblings(q, noise, first)


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
    # Only the exact test of sampled drafts has a Triton implementation.
    if q is not None and accepts is None and runs_triton(p):
        from . import triton

        return triton.couple_siblings(p, q, x, noise)
    return reference.couple_siblings(p, q, x, noise, accepts)
