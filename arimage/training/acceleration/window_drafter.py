"""Training of a drafter of windows on what a finished model computes while it generates."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ...decoding import Sampling, SpeculativeJacobiDecoding, decode
from ...decoding.jacobi.corrections import ranks_around, tokens_around
from ...models.neighbours import NeighbourModel
from ...models.window_drafter import WindowDrafter
from ...pipelines.base import ARPipeline
from ...pipelines.llamagen.pipeline_llamagen import LlamaGenPipeline
from ...settings.schema import COMPLETE, Batch, Count, Number, Seed, Share
from ..loop import OptimizerSettings
from ..losses import condition_of
from ..processes import batch_generator, mixed_seed
from ..recipe import PartRecipe, new_model, settings_of
from ..resuming import of_pipeline, of_settings
from ..tokens.batches import TokenBatches
from ..tokens.cache import TokenCache
from ..tokens.heldout import Part
from .drafter import as_llamagen
from .parts import GENERATED, OVERLAP, PartTask, Sets, log_probabilities


@dataclass(frozen=True)
class WindowDrafterSettings:
    """How a `WindowDrafter` is trained. The model first generates `images` for captions of the cache, half of them
    without guidance. Of every forward pass over a window, with drafts that turn out to be wrong, the features are
    kept; what is learned from them is the distribution that the model has where the drafts are right. Only drafts
    count next to which a token was wrong; one that is further from the decided tokens is kept less often, by
    `nearness` per token.

    The loss is the Kullback-Leibler divergence plus `overlap_weight` times the share of drafts that are rejected.

    Attributes:
        images: how many are generated, in batches of `at_once`.
        batch_size: drafts per step.
        window, corrections: those of the decoding that generates; the latter if the pipeline has neighbours already.
    """

    optimizer: OptimizerSettings
    images: Count = 2048
    at_once: Batch = 32
    batch_size: Batch = 2048
    nearness: Share = 0.9
    overlap_weight: Number = 2.0
    window: Count = 32
    corrections: Count = 4
    seed: Seed = 0
    __pydantic_config__ = COMPLETE


class Drafts(NamedTuple):
    """E drafts: what a forward pass computed for them, and the tokens that the images have in the end.

    Attributes:
        sampling: how the images were generated.
        features: float16 [E, D], guided, computed when the tokens `before` [E, K] were next to them.
        now: the tokens [E, K] that are next to them in the end.
        target: float16 [E, D], the features then.
        places: [E], their ranks.
    """

    sampling: Sampling
    features: torch.Tensor
    before: torch.LongTensor
    now: torch.LongTensor
    target: torch.Tensor
    places: torch.LongTensor


@torch.no_grad()
def record(
    pipe: LlamaGenPipeline,
    drafter: WindowDrafter,
    captions: list[str],
    guidance_scale: float,
    decoding: SpeculativeJacobiDecoding,
    nearness: float,
    seed: int,
) -> Drafts:
    """Generate images for `captions`, and keep what the windows compute, see `WindowDrafterSettings`."""
    sampling = pipe.sampling(guidance_scale=guidance_scale)
    model: Any = pipe.prepare(**condition_of(pipe, captions), guidance_scale=guidance_scale).model
    passes: list[tuple[torch.Tensor, ...]] = []
    forward = model.forward

    def recorded(tokens, positions, cache, **options):
        options["return_features"], asked = True, options.get("return_features", False)
        logits, features = forward(tokens, positions, cache, **options)
        guided = sampling.guided_values(features, positions + 1)
        passes.append((tokens.clone(), positions.clone(), guided.half()))
        return (logits, features) if asked else logits

    model.forward = recorded
    seeds = mixed_seed(seed) % 2**62 + torch.arange(len(captions), device=pipe.device)
    final = decode(model, decoding, sampling, seeds).token_buffer[:, : model.num_tokens].clone()
    _, target = pipe.transformer.predict(
        final.repeat(model.branches, 1), return_features=True, **model.conditions.values
    )
    everywhere = torch.arange(model.num_tokens, device=pipe.device).expand(len(captions), -1)
    target = sampling.guided_values(target.unflatten(0, (model.branches, -1)), everywhere).half()
    model.neighbours = drafter
    around, generator = ranks_around(model, len(captions), model.num_tokens), torch.Generator().manual_seed(seed)
    found = []
    for (tokens, positions, features), (_, later, _) in zip(passes, passes[1:], strict=False):
        # A position of -1 is past the end. The places of drafts are those after what is fed.
        start = later.masked_fill(later < 0, model.num_tokens).amin(1, keepdim=True)
        chance = torch.rand(positions.shape, generator=generator).to(pipe.device)
        kept = (positions >= start) & (chance < nearness ** (positions - start).clamp(min=0))
        buffer = F.pad(final, (0, 1))
        buffer = buffer.scatter(1, torch.where(positions < 0, model.num_tokens, positions), tokens)[:, :-1]
        places = (positions + 1).clamp(min=0, max=model.num_tokens - 1)
        images = torch.arange(len(captions), device=pipe.device)[:, None].expand_as(places)
        before, now = (tokens_around(values, around, places)[kept] for values in (buffer, final))
        # Others are not corrected.
        changed = (now != before).any(-1)
        images, places = images[kept][changed], places[kept][changed]
        found.append((features[kept][changed], before[changed], now[changed], target[images, places], places))
    return Drafts(sampling, *map(torch.cat, zip(*found, strict=True)))


class WindowDrafterTask(PartTask):
    def __init__(self, drafter: WindowDrafter, pipe: LlamaGenPipeline, sets: Sets, settings: WindowDrafterSettings):
        super().__init__(pipe, sets, settings)
        self.drafter = drafter
        self.about = {**of_settings(settings), **of_pipeline(pipe, "neighbours")}
        preset = f"sjd-coupled:window={settings.window},init=above,corrections="
        self.decodings = f"{preset}0", f"{preset}{settings.corrections}"
        # Without corrections where nothing is there to make them.
        corrections = settings.corrections if pipe.neighbours is not None else 0
        self.frozen.decoding = SpeculativeJacobiDecoding(settings.window, init="above", corrections=corrections)
        self.frozen.drafts = self._record(sets.trained, -(-settings.images // settings.at_once))
        self.frozen.heldout = self._record(sets.heldout, 2, most=GENERATED)

    def _record(self, cache: TokenCache | Part, count: int, most: int | None = None) -> list[Drafts]:
        settings, pipe = self.settings, self.frozen.pipe
        batches, found = TokenBatches(cache, min(settings.at_once, most or len(cache)), 0.0, settings.seed), []
        for batch in range(count):
            captions, scale = batches[batch].captions, 1.0 if batch % 2 else pipe.sampling().guidance_scale
            options = self.frozen.decoding, settings.nearness, settings.seed + batch
            found.append(record(pipe, self.drafter, captions, scale, *options))
        return found

    def of_drafts(self, drafts: Drafts, chosen: torch.LongTensor) -> dict[str, torch.Tensor]:
        """The `loss` of the `chosen` ones, and the share that would be accepted."""
        head, sampling = self.frozen.pipe.transformer.head, drafts.sampling
        features, final = (values[chosen, None].float() for values in (drafts.features, drafts.target))
        places = drafts.places[chosen, None]
        now, before = drafts.now[chosen, None], drafts.before[chosen, None]
        with torch.no_grad():
            logits = head(torch.stack([features, final]).to(head.weight.dtype)).float()
            target = sampling.probabilities(logits[1:], places)
        logits = logits[:1] + self.drafter.change(now, before, features)
        known = log_probabilities(logits, sampling)
        divergence = F.kl_div(known, target, reduction="none").sum(-1).mean()
        rejected = (known.exp() - target).abs().sum(-1).mean() / 2
        drafted = sampling.probabilities(logits.detach(), places)
        overlap = torch.minimum(drafted, target).sum(-1).mean()
        return {
            "loss": divergence + self.settings.overlap_weight * rejected,
            "divergence": divergence,
            OVERLAP: overlap,
        }

    def loss(self, step: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Of drafts of one batch of images."""
        generator = batch_generator(self.settings.seed, step)
        drafts = self.frozen.drafts[int(torch.randint(len(self.frozen.drafts), (1,), generator=generator))]
        chosen = torch.randint(len(drafts.places), (self.settings.batch_size,), generator=generator)
        figures = self.of_drafts(drafts, chosen.to(drafts.places.device))
        return figures["loss"], {name: value.detach() for name, value in figures.items()}

    @torch.no_grad()
    def report(self, step: int, out: Path) -> dict[str, float]:
        """The figures of the drafts of held-out images."""
        found = [
            (len(chosen), self.of_drafts(drafts, chosen))
            for drafts in self.frozen.heldout
            for chosen in torch.arange(len(drafts.places), device=drafts.places.device).split(self.settings.batch_size)
        ]
        total = sum(count for count, _ in found)
        return {f"held-out {key}": sum(n * float(of[key]) for n, of in found) / total for key in found[0][1]}


def begin_window_drafter(recipe: PartRecipe, pipe: ARPipeline, sets: Sets, out: Path) -> WindowDrafterTask:
    """The `WindowDrafter` of `pipe`, or a new one of the shape `recipe.model` if that says one or there is none, as
    the component `neighbours`.

    Raises:
        ValueError: if `pipe` is not a LlamaGen pipeline, or a setting is wrong.
    """
    pipe, settings = as_llamagen(pipe), settings_of(WindowDrafterSettings, recipe)
    drafter = pipe.neighbours
    if not isinstance(drafter, WindowDrafter) or recipe.model:
        config = pipe.transformer.config
        new_model(WindowDrafter, recipe.model, "model", vocab_size=config.vocab_size, feature_size=config.hidden_size)
        table = drafter if isinstance(drafter, NeighbourModel) else None
        drafter = WindowDrafter.for_transformer(pipe.transformer, table, **recipe.model)
    drafter = drafter.to(pipe.device).type(pipe.transformer.dtype).requires_grad_(True)
    task = WindowDrafterTask(drafter, pipe, sets, settings)
    pipe.register_modules(neighbours=drafter)
    return task
