"""How far what a decoding draws is from the law of its model, measured on the codes that it drew."""

import math
from dataclasses import dataclass

import torch

from ..decoding import Sampling, TokenModel
from ..decoding.noise import Purpose, uniforms


BINS = 20


@dataclass(frozen=True)
class Deviation:
    """What the ranks of M codes (see `code_ranks`) tell about the decoding that drew them.

    Attributes:
        total_variation: between the histogram of the ranks in 20 bins and the uniform law. Up to the floor it is a lower
            bound of the mean, over the codes, of the total variation between the law that a code was drawn from and the
            model's law after the codes before it: binning and averaging can only hide differences.
        floor: what M draws from the model's own law have on average, sqrt(19 / (2 pi M)).
        chance: how often draws from the model's own law are as far from uniform, by the chi-square test.
        impossible: share of codes that have no probability under the model's law.
        codes: M.
    """

    total_variation: float
    floor: float
    chance: float
    impossible: float
    codes: int


def deviation(ranks: torch.FloatTensor, probabilities: torch.FloatTensor) -> Deviation:
    """The `Deviation` of the codes of any number of images, from what `code_ranks` gave for them."""
    count = ranks.numel()
    bins = (ranks.flatten() * BINS).long().clamp(max=BINS - 1)
    shares = torch.bincount(bins.cpu(), minlength=BINS).double() / count
    freedom = torch.tensor(BINS - 1.0, dtype=torch.float64)
    statistic = count * BINS * (shares - 1 / BINS).square().sum()
    return Deviation(
        total_variation=float((shares - 1 / BINS).abs().sum() / 2),
        floor=math.sqrt((BINS - 1) / (2 * math.pi * count)),
        chance=float(torch.special.gammaincc(freedom / 2, statistic / 2)),
        impossible=float((probabilities == 0).double().mean()),
        codes=count,
    )


@torch.no_grad()
def code_ranks(
    model: TokenModel, sampling: Sampling, tokens: torch.LongTensor, seeds: torch.LongTensor
) -> tuple[torch.FloatTensor, torch.FloatTensor]:
    """Where each code of images [B, N] stands in the model's law after the codes before it, by teacher forcing.

    The rank is the randomised probability integral transform: the probability of the codes likelier than the one drawn (of
    equally likely ones, those of a lower id) plus a uniform share of its own. Whatever the laws, the ranks of codes drawn
    from them are independent uniform numbers. A code that cannot be ranks last, at 1.

    Args:
        seeds: int64 [B], for the uniform shares; the seeds of the images will do.

    Returns:
        The ranks and the probabilities of the codes, float32 [B, N] each.
    """
    batch_size, num_tokens = tokens.shape
    ids = torch.arange(model.vocab_size, device=tokens.device)
    ranks, probabilities = [], []

    def judge(logits: torch.FloatTensor, positions: torch.LongTensor) -> None:
        """Rank the codes at `positions` [Q] under logits [G, B, Q, V]."""
        positions = positions.expand(batch_size, -1)
        codes = tokens.gather(1, positions)[..., None]
        law = sampling.law(logits, positions)
        own = law.gather(-1, codes)
        ahead = (law > own) | ((law == own) & (ids < codes))
        share = uniforms(seeds, positions, Purpose.DEVIATION, 0, 1)
        ranks.append(((law * ahead).sum(-1, keepdim=True) + share * own).squeeze(-1).clamp(max=1))
        probabilities.append(own.squeeze(-1))

    cache, logits = model.prefill(batch_size)
    judge(logits[:, :, None], torch.zeros(1, dtype=torch.long, device=tokens.device))
    # No more than some hundred megabytes of logits at once.
    for positions in torch.arange(num_tokens - 1, device=tokens.device).split(max(1, 2**25 // logits[0].numel())):
        fed = positions.expand(batch_size, -1)
        judge(model.forward(tokens.gather(1, fed), fed, cache), positions + 1)
    return torch.cat(ranks, 1), torch.cat(probabilities, 1)
