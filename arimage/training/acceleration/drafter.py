"""Training of a drafter on the features of a finished model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field

from ...pipelines.base import ARPipeline
from ...pipelines.llamagen.drafter_llamagen import LlamaGenDrafter
from ...pipelines.llamagen.pipeline_llamagen import LlamaGenPipeline
from ...settings.schema import COMPLETE, Batch, Number, Seed
from ..loop import OptimizerSettings
from ..recipe import PartRecipe, settings_of
from ..resuming import of_pipeline, of_settings
from .parts import OVERLAP, PartTask, Sets, guided_condition, log_probabilities


@dataclass(frozen=True)
class DrafterSettings:
    """How a drafter is trained, as in EAGLE (https://arxiv.org/abs/2401.15077) and LANTERN
    (https://arxiv.org/abs/2410.03355): smooth L1 loss on the predicted features and, weighted by
    `distribution_weight`, cross-entropy of the probabilities they lead to against the transformer's: with the
    condition, without it, and as sampled.

    The first of the `drafts_ahead` steps reads the transformer's features, every later one those that the step before
    predicted (https://arxiv.org/abs/2408.15766), all with uniform noise of at most `feature_noise`.
    """

    optimizer: OptimizerSettings
    batch_size: Batch = 16
    distribution_weight: Number = 0.1
    feature_noise: Number = 0.2
    drafts_ahead: Annotated[int, Field(strict=True, ge=1, le=100)] = 2
    seed: Seed = 0
    __pydantic_config__ = COMPLETE


def as_llamagen(pipe: ARPipeline) -> LlamaGenPipeline:
    """Refuse a model of another family."""
    if not isinstance(pipe, LlamaGenPipeline):
        raise ValueError(f"--model is one in a {type(pipe).__name__}: give a LlamaGenPipeline")
    return pipe


class DrafterTask(PartTask):
    decodings = ("sjd", "eagle")

    def __init__(self, drafter: LlamaGenDrafter, pipe: LlamaGenPipeline, sets: Sets, settings: DrafterSettings):
        super().__init__(pipe, sets, settings)
        self.drafter = drafter
        self.about = {**of_settings(settings), **of_pipeline(pipe, "drafter")}

    def figures(self, captions, tokens, generator):
        """The losses of features and probabilities over all steps, and the overlap of the sampled distributions in the
        first."""
        settings, pipe = self.settings, self.frozen.pipe
        transformer, sampling, tokens = pipe.transformer, pipe.sampling(), tokens.repeat(2, 1)
        with torch.no_grad():
            _, features = transformer.predict(tokens, return_features=True, **guided_condition(pipe, captions))
        seen, features = features[:, :-1], features[:, 1:]
        positions = torch.arange(1, tokens.shape[1], device=tokens.device)[None]
        with torch.no_grad():
            logits = transformer.head(features).float()
            target = logits.softmax(-1)
            sampled_target = sampling.probabilities(logits.unflatten(0, (2, -1)), positions)
        figures = {"feature loss": 0.0, "distribution loss": 0.0}
        for drafts_ahead in range(settings.drafts_ahead):
            noise = (torch.rand_like(seen) * 2 - 1) * settings.feature_noise * self.training
            logits, drafted = self.drafter.predict(transformer, tokens[:, :-1], seen + noise)
            figures["feature loss"] += F.smooth_l1_loss(drafted, features) / settings.drafts_ahead
            sampled = log_probabilities(logits.unflatten(0, (2, -1)), sampling)
            pairs = ((target, logits.log_softmax(-1)), (sampled_target, sampled))
            loss = sum(-(goal * values).sum(-1).mean() for goal, values in pairs)
            figures["distribution loss"] += loss / settings.drafts_ahead
            if drafts_ahead == 0:
                draft = sampling.probabilities(logits.detach().unflatten(0, (2, -1)), positions)
                figures[OVERLAP] = torch.minimum(sampled_target, draft).sum(-1).mean()
            seen = torch.cat([seen[:, :1], drafted[:, :-1].detach()], dim=1)
        loss = figures["feature loss"] + settings.distribution_weight * figures["distribution loss"]
        return {"loss": loss, **figures}


def begin_drafter(recipe: PartRecipe, pipe: ARPipeline, sets: Sets, out: Path) -> DrafterTask:
    """A `LlamaGenDrafter` to train, in float32, as the component `drafter` of `pipe`.

    Raises:
        ValueError: if `pipe` is not a LlamaGen pipeline, or a setting is wrong.
    """
    pipe, settings = as_llamagen(pipe), settings_of(DrafterSettings, recipe)
    drafter = LlamaGenDrafter.for_transformer(pipe.transformer).to(pipe.device)
    task = DrafterTask(drafter, pipe, sets, settings)
    pipe.register_modules(drafter=drafter)
    return task
