"""Training of a denoiser for a finished model."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field

from ...decoding.jacobi.speculative_jacobi import normalised
from ...models.llama_blocks import rotary_table
from ...pipelines.base import ARPipeline
from ...pipelines.llamagen.denoiser_llamagen import LlamaGenDenoiser
from ...pipelines.llamagen.pipeline_llamagen import LlamaGenPipeline
from ...settings.schema import COMPLETE, Batch, Count, Flag, Seed, Share, Width
from ..loop import OptimizerSettings
from ..recipe import PartRecipe, settings_of
from ..resuming import of_pipeline, of_settings
from .drafter import as_llamagen
from .parts import OVERLAP, PartTask, Sets, guided_condition, log_probabilities


@dataclass(frozen=True)
class DenoiserSettings:
    """How a denoiser is trained: cross-entropy of the probabilities that the transformer samples the next token from
    after clean tokens, predicted where the last tokens are noisy. With `fine_tune` the transformer is trained too, at
    clean and at noisy positions, as published (https://arxiv.org/abs/2510.08994): images then follow the distribution
    of the fine-tuned transformer.

    In each image of a batch, `segments` runs of `length` tokens are noisy, each after the clean tokens before it: all
    pure noise in a `pure_share` of them, and otherwise with levels that rise from left to right, as in a window of
    drafts. In reports all noise is pure.
    """

    optimizer: OptimizerSettings
    batch_size: Batch = 4
    segments: Annotated[int, Field(strict=True, ge=1, le=1000)] = 8
    length: Count = 16
    pure_share: Share = 0.5
    rank: Width = 64
    fine_tune: Flag = False
    seed: Seed = 0
    __pydantic_config__ = COMPLETE


class GivenKeys:
    """Takes the place of a cache in training: the keys and values of the first pass, in front of those of the
    second."""

    def __init__(self):
        self._given = {}

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if layer not in self._given:
            self._given[layer] = keys, values
            return keys, values
        given_keys, given_values = self._given[layer]
        return torch.cat([given_keys, keys], dim=2), torch.cat([given_values, values], dim=2)


class DenoiserTask(PartTask):
    decodings = ("sjd", "sjd2")

    def __init__(self, denoiser: LlamaGenDenoiser, pipe: LlamaGenPipeline, sets: Sets, settings: DenoiserSettings):
        super().__init__(pipe, sets, settings)
        self.denoiser, self.frozen.teacher = denoiser, pipe.transformer
        self.about = {**of_settings(settings), **of_pipeline(pipe, "denoiser")}
        if settings.fine_tune:
            self.transformer, self.frozen.teacher = pipe.transformer, copy.deepcopy(pipe.transformer)
            self.transformer.requires_grad_(True)

    def figures(self, captions, tokens, generator):
        """The loss on noise, if the transformer is fine-tuned also that on clean tokens, and the overlap of the
        distributions after noise with those after clean tokens."""
        settings, pipe, teacher = self.settings, self.frozen.pipe, self.frozen.teacher
        transformer, sampling = pipe.transformer, pipe.sampling()
        device, (batch, count), codes = transformer.device, tokens.shape, tokens
        pure_share = settings.pure_share if self.training else 1.0
        condition = guided_condition(pipe, captions)
        keys = GivenKeys()
        everywhere = torch.arange(count, device=device).expand(batch, -1)
        with torch.set_grad_enabled(settings.fine_tune and self.training):
            clean_logits = transformer.predict(codes.repeat(2, 1), cache=keys, **condition)
        with torch.no_grad():
            logits = clean_logits if teacher is transformer else teacher.predict(codes.repeat(2, 1), **condition)
            target = sampling.probabilities(logits.unflatten(0, (2, -1)), everywhere)

        # The first token is never a draft.
        length = min(settings.length, count - 2)
        shape = batch, settings.segments, length
        first = torch.randint(1, count - length, shape[:2], generator=generator)[..., None]
        noise = torch.rand(shape, generator=generator).sort(-1).values
        pure = torch.rand(shape[:2], generator=generator)[..., None] < pure_share
        # Where the level was 0 the token would be clean.
        noise = torch.where(pure, 1.0, noise.clamp(min=1e-3)).flatten(1).to(device)
        first = first.expand(shape).flatten(1).to(device)
        positions = first + torch.arange(length, device=device).repeat(settings.segments)
        clean = normalised(pipe.vq.code_vectors())[codes.gather(1, positions)]
        normal = torch.randn(clean.shape, generator=generator).to(device)
        vectors = torch.lerp(clean, normal, noise[..., None])

        prefix = transformer.prefix_mask(**condition)
        start = prefix.shape[1]
        before = torch.arange(count - 1, device=device) < first[..., None]
        own = (first[:, None] == first[..., None]) & (positions[:, None] <= positions[..., None])
        # Two segments may begin at the same token.
        number = torch.arange(settings.segments, device=device).repeat_interleave(length)
        own &= number[None, :] == number[:, None]
        mask = torch.cat([before, own], dim=-1).repeat(2, 1, 1)
        mask = torch.cat([prefix[:, None].expand(-1, mask.shape[1], -1), mask], dim=-1)
        rotary = rotary_table(
            transformer.head_dim, (transformer.config.grid_size,) * 2, start, transformer.config.rope_theta, device
        )
        logits = transformer(
            codes.gather(1, positions).repeat(2, 1),
            rotary=rotary[start:][positions].repeat(2, 1, 1, 1),
            mask=mask,
            cache=keys,
            denoiser=self.denoiser,
            vectors=vectors.repeat(2, 1, 1),
            noise=noise.repeat(2, 1),
        )
        logits = logits.float().unflatten(0, (2, -1))

        def cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return -(target * log_probabilities(logits, sampling)).sum(-1).mean()

        clean = cross_entropy(clean_logits.unflatten(0, (2, -1)), target) if settings.fine_tune else 0.0
        target = target.gather(1, (positions + 1)[..., None].expand(-1, -1, target.shape[-1]))
        drafted = sampling.probabilities(logits.detach(), positions + 1)
        overlap = torch.minimum(target, drafted).sum(-1).mean()
        return {"loss": cross_entropy(logits, target) + clean, OVERLAP: overlap}


def begin_denoiser(recipe: PartRecipe, pipe: ARPipeline, sets: Sets, out: Path) -> DenoiserTask:
    """A `LlamaGenDenoiser` to train, as the component `denoiser` of `pipe`; its transformer is trained too if the
    settings say so.

    Raises:
        ValueError: if `pipe` is not a LlamaGen pipeline, or a setting is wrong.
    """
    pipe, settings = as_llamagen(pipe), settings_of(DenoiserSettings, recipe)
    denoiser = LlamaGenDenoiser.for_transformer(pipe.transformer, pipe.vq.config.codebook_dim, settings.rank)
    denoiser = denoiser.to(pipe.device).type(pipe.transformer.dtype)
    task = DenoiserTask(denoiser, pipe, sets, settings)
    pipe.register_modules(denoiser=denoiser)
    return task
