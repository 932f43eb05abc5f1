"""Measures from tokens alone how far the samples of a decoding are from the distribution of its model."""

import math
from dataclasses import dataclass

import torch

from ...decoding import Sampling, ScaleModel, TokenModel
from ...decoding.next_scale import scale_positions, scale_sampling


BINS = 20
# The least width of a token's interval.
NARROWEST = 1e-9


@dataclass(frozen=True)
class Deviation:
    """What M tokens show about the decoding that sampled them.

    Attributes:
        total_variation: total variation between the histogram of the tokens' places in their distributions and the
            uniform distribution, see `deviation`. Apart from noise of the size of `floor`, it is a lower bound of the
            mean, over tokens, of the total variation between the distribution that a token was sampled from and the
            model's distribution given the tokens before it.
        floor: the expected value for equally many samples from the model's own distribution.
        chance: p-value of a chi-square test that the tokens follow the model's distribution.
        impossible: share of tokens that have probability 0 under the model's distribution.
        codes: M.
    """

    total_variation: float
    floor: float
    chance: float
    impossible: float
    codes: int


def deviation(before: torch.FloatTensor, own: torch.FloatTensor) -> Deviation:
    """The `Deviation` of any number of tokens, from the outputs of `token_places`.

    Each token spreads a weight of 1 over the interval [before, before + own] of [0, 1]. If the tokens were sampled
    from the distributions that these intervals come from, the mean weight is uniform, whatever the distributions are
    (the non-randomised probability integral transform, https://doi.org/10.1111/j.1541-0420.2009.01191.x). If not,
    binning and averaging can only hide a part of the deviation. A token that was nearly certain adds neither evidence
    nor noise.
    """
    width = own.flatten().cpu().double().clamp(min=NARROWEST)
    left = torch.minimum(before.flatten().cpu().double(), 1 - width)
    edges = torch.linspace(0, 1, BINS + 1, dtype=torch.float64)
    # The share of each token's weight to the left of each edge.
    passed = ((edges - left[:, None]) / width[:, None]).clamp(0, 1)
    excess = passed.diff(dim=1) - 1 / BINS
    count, mean = len(excess), excess.mean(0)
    # Samples from the distributions themselves have uncorrelated excesses of mean zero.
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
def token_places(
    model: TokenModel | ScaleModel, sampling: Sampling, tokens: torch.LongTensor
) -> tuple[torch.FloatTensor, torch.FloatTensor]:
    """Where each token of images [B, N] lies in the model's distribution given the tokens or scales before it.

    Returns:
        Float32 [B, N] each: the total probability of the likelier tokens (and of equally likely ones with a lower id),
        and the token's own probability.
    """
    batch_size, num_tokens = tokens.shape
    ids = torch.arange(model.vocab_size, device=tokens.device)
    before, own = [], []

    def place(probabilities: torch.FloatTensor, positions: torch.LongTensor) -> None:
        """Place the tokens at `positions` [B, Q] in their distributions [B, Q, V]."""
        chosen = tokens.gather(1, positions)[..., None]
        probability = probabilities.gather(-1, chosen)
        likelier = (probabilities > probability) | ((probabilities == probability) & (ids < chosen))
        before.append((probabilities * likelier).sum(-1))
        own.append(probability.squeeze(-1))

    cache, logits = model.prefill(batch_size)
    if model.kind == "scales":
        latents = None
        for scale in range(len(model.scales)):
            if scale:
                logits = model.forward(scale, latents, cache)
            positions = scale_positions(model, scale, batch_size)
            if (tokens.gather(1, positions) < 0).any():
                # The decoding stopped before this scale.
                break
            place(scale_sampling(sampling, scale, model).probabilities(logits, positions), positions)
            latents = model.accumulate(scale, latents, model.vectors(scale, tokens.gather(1, positions)))
        return torch.cat(before, 1), torch.cat(own, 1)

    def place_logits(logits: torch.FloatTensor, positions: torch.LongTensor) -> None:
        positions = positions.expand(batch_size, -1)
        place(sampling.probabilities(logits, positions), positions)

    block, ranks = model.block, torch.arange(num_tokens, device=tokens.device)
    place_logits(logits.reshape(len(logits), batch_size, block, -1), ranks[:block])
    # At most a few hundred megabytes of logits at once.
    for positions in ranks[:-block].split(max(1, 2**25 // logits[0].numel()) * block):
        fed = positions.expand(batch_size, -1)
        place_logits(model.forward(tokens.gather(1, fed), fed, cache), positions + block)
    return torch.cat(before, 1), torch.cat(own, 1)
