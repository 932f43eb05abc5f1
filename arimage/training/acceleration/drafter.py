"""Training of a drafter on the features of a finished pipeline: on its training images and on images it generates."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import nn

from ...pipelines.base import ARPipeline
from ...pipelines.llamagen.drafter_llamagen import LlamaGenDrafter
from ...pipelines.llamagen.pipeline_llamagen import LlamaGenPipeline
from ...settings.schema import COMPLETE, Batch, Number, Seed
from ..data.captioned import ImageCaptions, to_unit_range
from ..loop import OptimizerSettings, fit
from ..processes import batch_generator
from ..resuming import of_data, of_pipeline, of_settings
from ..saving import save_float16
from ..tables import load_both, read_tables, settings_of


@dataclass(frozen=True)
class DrafterSettings:
    """How a drafter is trained, as in EAGLE (https://arxiv.org/abs/2401.15077) and LANTERN
    (https://arxiv.org/abs/2410.03355): smooth L1 loss on the predicted features and, weighted by `law_weight`, cross-
    entropy of the probabilities they lead to against the transformer's: with the condition, without it, and as
    sampled.

    The images are those of the data set and, `samples_per_image` times as many, images that the pipeline generates
    from their captions, since those are what the drafter will continue. The first of the `drafts_ahead` steps reads
    the transformer's features, every later one those that the step before predicted
    (https://arxiv.org/abs/2408.15766), all with uniform noise of at most `feature_noise`.
    """

    optimizer: OptimizerSettings
    batch_size: Batch = 16
    law_weight: Number = 0.1
    feature_noise: Number = 0.2
    drafts_ahead: Annotated[int, Field(strict=True, ge=1, le=100)] = 2
    samples_per_image: Annotated[int, Field(strict=True, ge=0, le=1000)] = 1
    seed: Seed = 0
    __pydantic_config__ = COMPLETE


def check_reads_texts(pipe: ARPipeline) -> None:
    """Refuse a model that is not a text-conditional LlamaGen."""
    if not isinstance(pipe, LlamaGenPipeline) or pipe.num_classes is not None:
        what = "of classes" if isinstance(pipe, LlamaGenPipeline) else f"in a {type(pipe).__name__}"
        raise ValueError(f"--model is one {what}: give a LlamaGenPipeline that reads texts")


@torch.no_grad()
def encode(pipe: LlamaGenPipeline, data: ImageCaptions) -> torch.LongTensor:
    """Tokens [M, N] of the images of `data`."""
    batches = data.images.split(64)
    return torch.cat([pipe.vq.encode(to_unit_range(batch).to(pipe.device)).flatten(1).cpu() for batch in batches])


def generate(pipe: LlamaGenPipeline, captions: list[str], seed: int, number: int) -> torch.LongTensor:
    """Tokens [M, N] of one image per caption, with the pipeline's default sampling; another one for every `number`."""
    generator, codes = torch.Generator().manual_seed(seed * 1_000_003 + number), []
    for start in range(0, len(captions), 64):
        prompts = captions[start : start + 64]
        output = pipe(prompts, generator=generator, output_type="latent", decoding="ar")
        codes.append(output.tokens.flatten(1).cpu())
    return torch.cat(codes)


def examples(
    pipe: LlamaGenPipeline, data: ImageCaptions, heldout: ImageCaptions, seed: int, samples_per_image: int
) -> tuple[tuple[list[str], torch.LongTensor], dict[str, tuple[list[str], torch.LongTensor]]]:
    """Captions [M] and tokens [M, N] to train on, of the images of `data` and of `samples_per_image` generated ones
    for each caption; and those to report on, by name."""
    captions = [variants[0] for variants in data.captions]
    sampled = [generate(pipe, captions, seed, number) for number in range(samples_per_image)]
    train = captions * (1 + len(sampled)), torch.cat([encode(pipe, data), *sampled])
    probe = captions[:32]
    report = {
        "held-out": ([variants[0] for variants in heldout.captions], encode(pipe, heldout)),
        "sampled": (probe, generate(pipe, probe, seed, samples_per_image)),
    }
    return train, report


class DrafterTask(nn.Module):
    def __init__(
        self,
        drafter: LlamaGenDrafter,
        pipe: LlamaGenPipeline,
        data: ImageCaptions,
        heldout: ImageCaptions,
        settings: DrafterSettings,
    ):
        super().__init__()
        self.drafter, self.settings = drafter, settings
        # Not a module: the pipeline is neither trained nor part of a checkpoint.
        self.frozen = SimpleNamespace(pipe=pipe)
        train, report = examples(pipe, data, heldout, settings.seed, settings.samples_per_image)
        self.train_set = self.continued(*train)
        self.report_sets = {name: self.continued(*one) for name, one in report.items()}

    @torch.no_grad()
    def continued(self, captions: list[str], codes: torch.LongTensor) -> tuple[torch.LongTensor, torch.Tensor]:
        """The tokens [M, N], and the features [M, 2, N, D] that the transformer predicts them from, with the caption
        and without; in float16 to save memory."""
        pipe, features = self.frozen.pipe, []
        for start in range(0, len(codes), 32):
            # Guided, for the rows without the condition.
            model = pipe.prepare(captions[start : start + 32], guidance_scale=2.0).model
            batch = codes[start : start + 32].to(model.device).repeat(2, 1)
            _, found = pipe.transformer.predict(batch, return_features=True, **model.condition)
            features.append(found.unflatten(0, (2, -1)).transpose(0, 1).half().cpu())
        return codes, torch.cat(features)

    def losses(self, codes: torch.LongTensor, features: torch.Tensor, feature_noise: float) -> dict[str, torch.Tensor]:
        """The losses of features and probabilities over all steps, and the overlap of the sampled distributions in the
        first."""
        settings, transformer, sampling = self.settings, self.frozen.pipe.transformer, self.frozen.pipe.sampling()
        device = transformer.device
        codes = codes.to(device).repeat(2, 1)
        features = features.to(device, transformer.dtype).transpose(0, 1).flatten(0, 1)
        seen, features = features[:, :-1], features[:, 1:]
        positions = torch.arange(1, codes.shape[1], device=device)[None]
        with torch.no_grad():
            logits = transformer.head(features).float()
            target, sampled_target = (
                logits.softmax(-1),
                sampling.probabilities(logits.unflatten(0, (2, -1)), positions),
            )
        figures = {"feature loss": 0.0, "distribution loss": 0.0}
        for drafts_ahead in range(settings.drafts_ahead):
            noise = (torch.rand_like(seen) * 2 - 1) * feature_noise
            logits, drafted = self.drafter.predict(transformer, codes[:, :-1], seen + noise)
            figures["feature loss"] += F.smooth_l1_loss(drafted, features) / settings.drafts_ahead
            conditional, unconditional = logits.chunk(2)
            guided = unconditional + (conditional - unconditional) * sampling.guidance_scale
            pairs = ((target, logits), (sampled_target, guided / sampling.temperature))
            loss = sum(-(goal * values.log_softmax(-1)).sum(-1).mean() for goal, values in pairs)
            figures["distribution loss"] += loss / settings.drafts_ahead
            if drafts_ahead == 0:
                draft = sampling.probabilities(logits.detach().unflatten(0, (2, -1)), positions)
                figures["overlap"] = torch.minimum(sampled_target, draft).sum(-1).mean()
            seen = torch.cat([seen[:, :1], drafted[:, :-1].detach()], dim=1)
        return figures

    def loss(self, step: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        settings = self.settings
        codes, features = self.train_set
        generator = batch_generator(settings.seed, step)
        index = torch.randint(len(codes), (settings.batch_size,), generator=generator)
        figures = self.losses(codes[index], features[index], settings.feature_noise)
        loss = figures["feature loss"] + settings.law_weight * figures["distribution loss"]
        return loss, {name: value.detach() for name, value in figures.items()}

    def report(self, step: int, out: Path) -> dict[str, float]:
        """Losses and overlap on held-out images, and on images that the pipeline generates from other seeds."""
        report = {}
        for name, (codes, features) in self.report_sets.items():
            for figure, value in self.losses(codes, features, 0.0).items():
                report[f"{name} {figure}"] = float(value)
        return report


def train_drafter(
    pipe: LlamaGenPipeline,
    data: ImageCaptions,
    heldout: ImageCaptions,
    settings: DrafterSettings,
    out: str | Path,
    on_report: Callable[[LlamaGenPipeline], None] | None = None,
) -> LlamaGenPipeline:
    """Train a `LlamaGenDrafter` for the text-conditional `pipe`, in float32; returns `pipe` with the averaged weights
    as its component `drafter`.

    `out` keeps checkpoint, log and curve; a second call with the same settings and data resumes the run.
    """
    torch.manual_seed(settings.seed)
    pipe.transformer.requires_grad_(False)
    about = {
        **of_settings(settings),
        **of_pipeline(pipe, "drafter"),
        "data": of_data(data),
        "heldout": of_data(heldout),
    }
    drafter = LlamaGenDrafter.for_transformer(pipe.transformer).to(pipe.device)
    task = DrafterTask(drafter, pipe, data, heldout, settings)
    pipe.register_modules(drafter=drafter)
    hook = None if on_report is None else lambda: on_report(pipe)
    fit(task, settings.optimizer, out, on_report=hook, about=about, seed=settings.seed)
    return pipe


def run_drafter(
    recipe: dict, pipe: LlamaGenPipeline, train: str | Path, heldout: str | Path, out: str | Path
) -> LlamaGenPipeline:
    """Train a drafter for `pipe` by a recipe. The pipeline with it is saved in `out`/model, in float16.

    Raises:
        ValueError: if `pipe` is not a LlamaGen pipeline that reads texts.
    """
    check_reads_texts(pipe)
    tables, out = read_tables(recipe), Path(out)
    settings = settings_of(DrafterSettings, tables.table("drafter"), "drafter")
    data, heldout_data = load_both(tables, "transformer", train, heldout)
    pipe = train_drafter(pipe, data, heldout_data, settings, out / "drafter")
    save_float16(pipe, out / "model")
    return pipe
