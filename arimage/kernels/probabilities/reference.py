"""What the definition of the sampling distribution is made of in torch."""

import torch
import torch.nn.functional as F
from torch import library


_LOWEST = torch.iinfo(torch.int32).min
# Steps of the bisection that halve the interval, before those that halve the float32 numbers in it.
_HALVINGS = 16


def force(
    probabilities: torch.FloatTensor, forced: torch.LongTensor, positions: torch.LongTensor
) -> torch.FloatTensor:
    """Probabilities [B, Q, V] of the tokens at `positions` [B, Q], one-hot where a token is `forced` [B, N]."""
    tokens = forced.gather(1, positions.clamp(max=forced.shape[1] - 1))[..., None]
    one_hot = torch.arange(probabilities.shape[-1], device=tokens.device) == tokens
    return torch.where(tokens < 0, probabilities, one_hot.to(probabilities.dtype))


# Operators, since the lengths of their searches depend on the data, which a compiled graph does not allow.
@library.custom_op("arimage::keep_largest", mutates_args=())
def keep_largest(logits: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """The `logits` [B, Q, V] that are at least as large as the k-th, and -inf for others. `top_k` is one number or one
    per row [B, 1, 1]; 0 keeps all."""
    vocab_size, mask = logits.shape[-1], torch.empty_like(logits)
    top_k = torch.where((top_k > 0) & (top_k < vocab_size), top_k, vocab_size)
    # On CPUs operators that make or take a mask of bool are slow, and so is the logarithm of 0.
    less = torch.lt(logits, _largest(logits, top_k, mask), out=mask)
    return logits + F.threshold(less.neg_(), -0.5, -torch.inf, inplace=True)


@keep_largest.register_fake
def _(logits, top_k):
    return torch.empty_like(logits)


@library.custom_op("arimage::cut", mutates_args=("probabilities",))
def cut(
    logits: torch.Tensor, probabilities: torch.Tensor, top_p: torch.Tensor | None, min_p: torch.Tensor | None
) -> None:
    """Top-p and min-p in place, in this order. Each is one number or one per row [B, 1, 1], or None if it is off in
    all rows."""
    total, mask = probabilities.sum(-1, keepdim=True), torch.empty_like(probabilities)
    if top_p is not None:
        threshold, sole = _threshold(logits, top_p * total, probabilities, mask)
        threshold = torch.where(top_p < 1, threshold, -torch.inf)
        torch.ge(logits, threshold, out=mask)
        if not sole:
            # The tokens at the threshold have equal weights: they are kept while the sum before them is small enough.
            at = torch.eq(logits, threshold, out=torch.empty_like(mask))
            one = (at * probabilities).amax(-1, keepdim=True)
            above = (probabilities * mask.sub_(at)).sum(-1, keepdim=True)
            room = ((top_p * total - above).clamp(min=0) / one).floor()
            mask += at * (at.cumsum(-1) <= room + 1)
        probabilities *= mask
    if min_p is not None:
        probabilities *= torch.ge(logits, logits.amax(-1, keepdim=True) + min_p.log(), out=mask)
    kept = probabilities.sum(-1, keepdim=True)
    # Rows without a cut stay the same bit by bit.
    probabilities /= torch.where(kept == total, 1, kept)


def _largest(values: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """A number [..., 1] such that the k largest of `values` [..., V] and their equals are at least as large, and no
    others."""
    if not values.is_cpu:
        return _threshold(values, k - 1, None, mask)[0]
    k, largest = k.flatten().expand(len(values)), values.new_empty(*values.shape[:-1], 1)
    for number in k.unique().tolist():
        rows = k == number
        # NumPy takes an eighth of the time of `torch.topk`.
        parts = values.detach()[rows].numpy()
        parts.partition(-number)
        largest[rows] = torch.from_numpy(parts[..., -number, None])
    return largest


def _threshold(
    values: torch.Tensor, target: torch.Tensor, weights: torch.Tensor | None, mask: torch.Tensor
) -> tuple[torch.Tensor, bool]:
    """The largest threshold [..., 1] such that the `values` [..., V] that are at least as large exceed `target` in
    number, or in the sum of their `weights`. Also returns whether in every row a single value lies between the bounds.

    The bisection ends when the bounds are neighbours, or, on the CPU alone, when a single value lies between them in
    every row: the returned threshold then selects the same values as the largest one. `mask` [..., V] is overwritten.
    """

    def reach(number):
        count = torch.ge(values, number, out=mask).sum(-1, keepdim=True)
        return count, count if weights is None else mask.mul_(weights).sum(-1, keepdim=True)

    # On each side of zero, floats have the order of their bits.
    count, weight = reach(0.0)
    enough, nothing, all_of_them = weight > target, torch.zeros_like(count), torch.full_like(count, values.shape[-1])
    largest = values.amax(-1, keepdim=True).abs().view(torch.int32) + 1
    low = torch.where(enough, 0, values.amin(-1, keepdim=True).view(torch.int32))
    high = torch.where(enough, largest, _LOWEST)
    low_count, high_count = torch.where(enough, count, all_of_them), torch.where(enough, nothing, count)
    for i in range(_HALVINGS + 31):
        if values.is_cpu:
            sole = low_count - high_count <= 1
            if bool((sole | ((high - low).abs() == 1)).all()):
                return low.view(torch.float32), bool(sole.all())
        if i < _HALVINGS:
            middle = torch.lerp(low.view(torch.float32), high.view(torch.float32), 0.5).view(torch.int32)
        else:
            middle = low + (high - low >> 1)
        count, weight = reach(middle.view(torch.float32))
        enough = weight > target
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
        low_count, high_count = torch.where(enough, count, low_count), torch.where(enough, high_count, count)
    return low.view(torch.float32), False
