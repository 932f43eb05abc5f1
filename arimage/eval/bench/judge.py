"""Measures how far a decoding's tokens are from the model's distribution, and how many tokens it feeds the model."""

import dataclasses
from typing import cast

import torch

from ...decoding import Decoding, MaskedTokenModel, Sampling, TokenModel, decode
from ...pipelines.base import ARImagePipeline
from .deviation import Deviation, deviation, token_places
from .measure import take


class CountedModel:
    """A `TokenModel` that counts in `fed` how many tokens it is fed."""

    def __init__(self, model: TokenModel):
        self._model, self.fed = model, 0

    def __getattr__(self, name):
        return getattr(self._model, name)

    def forward(self, tokens, positions, *arguments, **options):
        self.fed = self.fed + (positions >= 0).sum()
        return self._model.forward(tokens, positions, *arguments, **options)


class ComparedModel:
    """A `MaskedTokenModel` that compares the logits of each forward pass over some of its rows with those of one over
    all rows: `difference` is the total variation, added up over the places that were asked for, and `count` is their
    number, those of full passes included."""

    def __init__(self, model: MaskedTokenModel, sampling: Sampling):
        self._model, self._sampling = model, sampling
        self.difference, self.count = torch.zeros((), dtype=torch.float64, device=model.device), 0

    def __getattr__(self, name):
        return getattr(self._model, name)

    def forward(self, tokens, places, *, rows=None, context=None):
        logits = self._model.forward(tokens, places, rows=rows, context=context)
        there = places < self._model.num_tokens
        self.count = self.count + there.sum()
        if rows is not None:
            whole = self._model.forward(tokens, places)
            found, expected = (self._sampling.probabilities(each, places) for each in (logits, whole))
            self.difference += (((found - expected).abs().sum(-1) / 2).masked_fill(~there, 0)).sum()
        return logits


def cannot_judge(pipe: ARImagePipeline) -> str | None:
    """Why the images of a pipeline cannot be compared with the distribution of its model; None where they can."""
    return {
        "vectors": "a distilled model turns noise into an image and has no probabilities",
        "masked_latents": "continuous tokens have no probabilities",
        "causal_latents": "continuous tokens have no probabilities",
    }.get(pipe.abilities.kind)


@torch.no_grad()
def judge(
    pipe: ARImagePipeline,
    condition: dict[str, list],
    decoding: Decoding,
    *,
    images: int,
    seed: int,
    sampling: dict | None = None,
) -> dict:
    """Generate `images` images and compare their tokens with the model's distribution.

    For a `MaskedTokenModel` the total variation is known: between the distributions of the tokens that a step samples
    and those of a forward pass over all rows, given the same tokens. The mean over these tokens takes the sampling
    settings of the call, without what the decoding adds to them.

    Args:
        condition: the pipeline's argument "prompt" or "class_labels" with its values, which are cycled.
        sampling: arguments of `pipe.prepare` that override the checkpoint's.

    Returns:
        `deviation`, the fields of a `Deviation`, and for a `TokenModel` also `tokens_fed`, the number of tokens fed
        per image and forward pass after the prefill.
    """
    reason = cannot_judge(pipe)
    if reason is not None:
        raise ValueError(f"{type(pipe).__name__} cannot be compared with its distribution: {reason}")
    sampling = sampling or {}
    places, fed, passes, difference, sampled = [], 0, 0, 0.0, 0
    for start in range(0, images, 16):
        count = min(16, images - start)
        batch = take(condition, start, count)
        # The orders of images follow from their seeds.
        generators = [torch.Generator().manual_seed(seed + image) for image in range(start, start + count)]
        call = pipe.prepare(**batch, **sampling, generator=generators)
        model = call.model
        counter = CountedModel(model) if model.kind == "tokens" else None
        seeds = torch.arange(start, start + count, device=model.device) + (seed << 32)
        if model.kind == "masked_tokens":
            compared = ComparedModel(model, call.sampling)
            decode(cast(MaskedTokenModel, compared), decoding, call.sampling, seeds)
            difference, sampled = difference + float(compared.difference), sampled + int(compared.count)
            continue
        # The counter has all that its model has.
        counted = model if counter is None else cast(TokenModel, counter)
        state = decode(counted, decoding, call.sampling, seeds)
        if counter is not None:
            fed += int(counter.fed)
            passes += int((state.accepted_per_step()[1:] > 0).sum())
        places.append(token_places(model, call.sampling, state.tokens))
    if sampled:
        # Equal distributions differ by rounding.
        known = Deviation(difference / sampled, 0.0, float(difference < 1e-4 * sampled), 0.0, sampled)
        return {"deviation": dataclasses.asdict(known)}
    found = deviation(*(torch.cat(parts) for parts in zip(*places, strict=True)))
    return {"deviation": dataclasses.asdict(found), **({"tokens_fed": fed / passes} if passes else {})}
