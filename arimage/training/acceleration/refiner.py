"""Training of a refiner: a small next-scale transformer that generates the last scales in place of the large one."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field

from ...decoding import CollaborativeDecoding
from ...pipelines.base import ARPipeline
from ...pipelines.var.pipeline_var import VARPipeline
from ...pipelines.var.transformer_var import VARTransformer
from ...settings.schema import COMPLETE, Batch, Count, Flag, Number, Seed, Share
from ..loop import OptimizerSettings
from ..losses import ScaleLosses
from ..recipe import PartRecipe, new_model, settings_of
from ..resuming import digest, of_settings
from .parts import OVERLAP, PartTask, Sets


# What both transformers have in common.
SHARED = (
    "conditioning", "num_classes", "caption_dim", "num_condition_tokens", "vocab_size", "codebook_dim", "scales",
)  # fmt: skip


@dataclass(frozen=True)
class RefinerSettings:
    """How a refiner is trained, as in CoDe (https://arxiv.org/abs/2411.17787): by the tokens of the scales after the
    first `drafter_scales`, all but two by default, and, weighted by `distribution_weight`, by the divergence from the
    distribution of the transformer. The scales are weighted by their numbers of tokens to the power `token_power`:
    with 1 every token counts the same, with 0 every scale. A share `dropout` of the images have no condition.

    With `fine_tune` the transformer is trained too, on the first `drafter_scales` scales, at
    `transformer_learning_rate_scale` times the learning rate; it may forget the others.
    """

    optimizer: OptimizerSettings
    batch_size: Batch = 16
    drafter_scales: Count | None = None
    distribution_weight: Number = 1.0
    token_power: Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0, le=10)] = 0.5
    dropout: Annotated[Share, Field(lt=1)] = 0.1
    fine_tune: Flag = False
    transformer_learning_rate_scale: Number = 0.3
    seed: Seed = 0
    __pydantic_config__ = COMPLETE


class RefinerTask(PartTask):
    def __init__(self, refiner: VARTransformer, pipe: VARPipeline, sets: Sets, settings: RefinerSettings):
        super().__init__(pipe, sets, settings)
        self.refiner, self.frozen.teacher = refiner, pipe.transformer
        self.frozen.losses = ScaleLosses(pipe)
        self.about = {**of_settings(settings), "refiner": digest(refiner), "transformer": digest(pipe.transformer)}
        if pipe.text_encoder is not None:
            self.about["text_encoder"] = digest(pipe.text_encoder)
        sizes, count = [side**2 for side in refiner.config.scales], settings.drafter_scales
        self.count = max(len(sizes) - 2, 1) if count is None else count
        if self.count >= len(sizes):
            raise ValueError(f"drafter_scales is {self.count}: give a number from 1 to {len(sizes) - 1}")
        self.first, self.sizes = sum(sizes[: self.count]), sizes
        if settings.fine_tune:
            self.transformer, self.frozen.teacher = pipe.transformer, copy.deepcopy(pipe.transformer)
            self.transformer.requires_grad_(True)
            self.learning_rate_scales = {"transformer.": settings.transformer_learning_rate_scale}

    def _mean(self, losses: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        """The mean of losses [B, N] of some scales by their weights."""
        weights = torch.tensor(sizes).float() ** self.settings.token_power
        by_scale = torch.stack([one.mean() for one in losses.split(sizes, dim=1)])
        return (by_scale * (weights / weights.sum()).to(by_scale)).sum()

    def figures(self, captions, tokens, generator):
        """The loss, the negative log-likelihood of a token of the refiner's scales under it and under the transformer,
        and what the distributions of both have in common."""
        settings, pipe, first = self.settings, self.frozen.pipe, self.first
        dropped = torch.rand(len(tokens), generator=generator) < settings.dropout * self.training
        with torch.no_grad():
            inputs = pipe.vq.inputs(pipe.token_maps(tokens))
            condition = self.frozen.losses.conditions(captions) | {"unconditional": dropped.to(tokens.device)}
            target = self.frozen.teacher.predict(inputs, **condition)[:, first:].log_softmax(-1)
        known = self.refiner.predict(inputs, **condition)[:, first:].log_softmax(-1)
        last = tokens[:, first:]
        nats, theirs = (F.nll_loss(one.transpose(1, 2), last, reduction="none") for one in (known, target))
        divergences = F.kl_div(known, target, reduction="none", log_target=True).sum(-1)
        loss = self._mean(nats + settings.distribution_weight * divergences, self.sizes[self.count :])
        if settings.fine_tune:
            with torch.set_grad_enabled(self.training):
                until = sum(self.sizes[1 : self.count])
                logits = self.transformer.predict(inputs[:, :until], **condition)
            losses = F.cross_entropy(logits.transpose(1, 2), tokens[:, :first], reduction="none")
            loss = loss + self._mean(losses, self.sizes[: self.count])
        overlap = torch.minimum(known.exp(), target.exp()).sum(-1).mean()
        return {"loss": loss, "nats": nats.mean(), "nats of the transformer": theirs.mean(), OVERLAP: overlap}


def begin_refiner(recipe: PartRecipe, pipe: ARPipeline, sets: Sets, out: Path) -> RefinerTask:
    """The refiner of `pipe`, or a new one of the shape `recipe.model` if that says one or there is none: by default
    half as wide and half as deep as the transformer.

    Raises:
        ValueError: if `pipe` is not a VAR pipeline, or a setting is wrong.
    """
    if not isinstance(pipe, VARPipeline):
        raise ValueError(f"--model is one in a {type(pipe).__name__}: give a VARPipeline")
    settings, config = settings_of(RefinerSettings, recipe), pipe.transformer.config
    refiner = pipe.refiner
    if refiner is None or recipe.model:
        half = {name: max(1, config[name] // 2) for name in ("hidden_size", "num_layers", "num_attention_heads")}
        shape = half | {name: config[name] for name in ("mlp_ratio", "qk_norm", "shared_adaln")} | recipe.model
        given = {name: config[name] for name in SHARED}
        new_model(VARTransformer, shape, "model", **given)
        refiner = VARTransformer(**given, **shape)
        refiner.init_weights()
    pipe.register_modules(refiner=refiner.to(pipe.device, torch.float32).requires_grad_(True))
    task = RefinerTask(refiner, pipe, sets, settings)
    pipe.decoding = CollaborativeDecoding(task.count)
    return task
