"""How far what a decoding draws is from the law of its model, measured on the codes that it drew."""

import math
from dataclasses import dataclass

import torch

from ..decoding import Sampling, ScaleModel, TokenModel
from ..decoding.next_scale import scale_probabilities


BINS = 20
# A code of less probability counts as a point.
NARROWEST = 1e-9


@dataclass(frozen=True)
class Deviation:
    """What M codes tell about the decoding that drew them.

    Attributes:
        total_variation: between the histogram of the codes' places in their laws and the uniform law, see `deviation`. Up to
            the floor it is a lower bound of the mean, over the codes, of the total variation between the law that a code
            was drawn from and the model's law after the codes before it.
        floor: what as many draws from the model's own law have on average.
        chance: how often draws from the model's own law are as far from uniform, by a chi-square test.
        impossible: share of codes that have no probability under the model's law.
        codes: M.
    """

    total_variation: float
    floor: float
    chance: float
    impossible: float
    codes: int


def deviation(before: torch.FloatTensor, own: torch.FloatTensor) -> Deviation:
    """The `Deviation` of any number of codes, from what `code_places` gave for them.

    A code takes the interval before .. before + own of 0 .. 1, and its weight of 1 is spread over that interval. If codes
    are drawn from the very laws that order them, their mean weight is uniform whatever the laws (the non-randomised
    probability integral transform, https://doi.org/10.1111/j.1541-0420.2009.01191.x). If not, binning and averaging can
    only hide how far they are off. A code that was nearly certain says nothing, and adds no noise either.
    """
    width = own.flatten().cpu().double().clamp(min=NARROWEST)
    left = torch.minimum(before.flatten().cpu().double(), 1 - width)
    edges = torch.linspace(0, 1, BINS + 1, dtype=torch.float64)
    # The share of its weight that each code has left of each edge.
    passed = ((edges - left[:, None]) / width[:, None]).clamp(0, 1)
    excess = passed.diff(dim=1) - 1 / BINS
    count, mean = len(excess), excess.mean(0)
    # Draws from the laws themselves have uncorrelated excesses of mean zero.
    values, directions = torch.linalg.eigh(excess.T @ excess / count)
    varied = values > 1e-9
    statistic = count * ((directions.T @ mean)[varied].square() / values[varied]).sum()
    freedom = varied.sum().double()
    return Deviation(
        total_variation=float(mean.abs().sum() / 2),
        floor=float((2 * excess.square().mean(0) / (math.pi * count)).sqrt().sum() / 2),
        chance=float(torch.special.gammaincc(freedom / 2, statistic / 2)) if varied.any() else 1.0,
        impossible=float((own == 0).double().mean()),
        codes=count,
    )


@torch.no_grad()
def code_places(
    model: TokenModel | ScaleModel, sampling: Sampling, tokens: torch.LongTensor
) -> tuple[torch.FloatTensor, torch.FloatTensor]:
    """Where each code of images [B, N] stands in the model's law after the codes, or the scales, before it, by teacher forcing.

    Returns:
        How much probability the likelier codes have (of equally likely ones, those of a lower id), and the code's own
        probability: float32 [B, N] each.
    """
    batch_size, num_tokens = tokens.shape
    ids = torch.arange(model.vocab_size, device=tokens.device)
    before, own = [], []

    def place(law: torch.FloatTensor, positions: torch.LongTensor) -> None:
        """Place the codes at `positions` [B, Q] in their laws [B, Q, V]."""
        codes = tokens.gather(1, positions)[..., None]
        probability = law.gather(-1, codes)
        likelier = (law > probability) | ((law == probability) & (ids < codes))
        before.append((law * likelier).sum(-1))
        own.append(probability.squeeze(-1))

    cache, logits = model.prefill(batch_size)
    if hasattr(model, "scales"):
        latents = None
        for scale in range(len(model.scales)):
            if scale:
                logits = model.forward(scale, latents, cache)
            law, positions = scale_probabilities(model, sampling, scale, logits)
            place(law, positions)
            latents = model.accumulate(scale, latents, model.codebook[tokens.gather(1, positions)])
        return torch.cat(before, 1), torch.cat(own, 1)

    def place_logits(logits: torch.FloatTensor, positions: torch.LongTensor) -> None:
        positions = positions.expand(batch_size, -1)
        place(sampling.probabilities(logits, positions), positions)

    place_logits(logits[:, :, None], torch.zeros(1, dtype=torch.long, device=tokens.device))
    # No more than some hundred megabytes of logits at once.
    for positions in torch.arange(num_tokens - 1, device=tokens.device).split(max(1, 2**25 // logits[0].numel())):
        fed = positions.expand(batch_size, -1)
        place_logits(model.forward(tokens.gather(1, fed), fed, cache), positions + 1)
    return torch.cat(before, 1), torch.cat(own, 1)
