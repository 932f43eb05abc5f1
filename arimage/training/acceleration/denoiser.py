"""Training of a denoiser for a finished pipeline: on its training images and on images it generates."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import torch
from pydantic import Field
from torch import nn

from ...decoding.jacobi.speculative_jacobi import normalised
from ...models.llama_blocks import rotary_table
from ...pipelines.llamagen.denoiser_llamagen import LlamaGenDenoiser
from ...pipelines.llamagen.pipeline_llamagen import LlamaGenPipeline
from ...settings.schema import COMPLETE, Batch, Count, Flag, Seed, Share, Width
from ..data.captioned import ImageCaptions
from ..loop import OptimizerSettings, fit
from ..processes import batch_generator
from ..resuming import of_data, of_pipeline, of_settings
from ..saving import save_float16
from ..tables import load_both, read_tables, settings_of
from .drafter import check_reads_texts, examples


@dataclass(frozen=True)
class DenoiserSettings:
    """How a denoiser is trained: cross-entropy of the probabilities that the transformer samples the next token from
    after clean tokens, predicted where the last tokens are noisy. With `fine_tune` the transformer is trained too, at
    clean and at noisy positions, as published (https://arxiv.org/abs/2510.08994): images then follow the distribution
    of the fine-tuned transformer.

    The images are those of the data set and, `samples_per_image` times as many, images that the pipeline generates
    from their captions. In each image of a batch, `segments` runs of `length` tokens are noisy, each after the clean
    tokens before it: all pure noise in a `pure_share` of them, and otherwise with levels that rise from left to right,
    as in a window of drafts.
    """

    optimizer: OptimizerSettings
    batch_size: Batch = 4
    segments: Annotated[int, Field(strict=True, ge=1, le=1000)] = 8
    length: Count = 16
    pure_share: Share = 0.5
    rank: Width = 64
    samples_per_image: Annotated[int, Field(strict=True, ge=0, le=1000)] = 1
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


class DenoiserTask(nn.Module):
    def __init__(
        self,
        denoiser: LlamaGenDenoiser,
        pipe: LlamaGenPipeline,
        data: ImageCaptions,
        heldout: ImageCaptions,
        settings: DenoiserSettings,
    ):
        super().__init__()
        self.denoiser, self.settings = denoiser, settings
        # Not a module: what is in it is neither trained nor part of a checkpoint.
        self.frozen = SimpleNamespace(pipe=pipe, teacher=pipe.transformer)
        if settings.fine_tune:
            self.transformer, self.frozen.teacher = pipe.transformer, copy.deepcopy(pipe.transformer)
            self.transformer.requires_grad_(True)
        self.train_set, self.report_sets = examples(pipe, data, heldout, settings.seed, settings.samples_per_image)

    def figures(
        self, captions: list[str], codes: torch.LongTensor, pure_share: float, generator: torch.Generator
    ) -> dict[str, torch.Tensor]:
        """The loss on noise of these segments, if the transformer is fine-tuned also that on clean tokens, and the
        overlap of the distributions after noise with those after clean tokens."""
        settings, pipe, teacher = self.settings, self.frozen.pipe, self.frozen.teacher
        transformer, sampling = pipe.transformer, pipe.sampling()
        device, batch, count = transformer.device, len(codes), codes.shape[1]
        # Guided, for the rows without the condition.
        condition = pipe.prepare(captions, guidance_scale=2.0).model.condition
        codes, keys = codes.to(device), GivenKeys()
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
            guided = logits[1] + (logits[0] - logits[1]) * sampling.guidance_scale
            return -(target * (guided / sampling.temperature).log_softmax(-1)).sum(-1).mean()

        clean = cross_entropy(clean_logits.unflatten(0, (2, -1)), target) if settings.fine_tune else 0.0
        target = target.gather(1, (positions + 1)[..., None].expand(-1, -1, target.shape[-1]))
        drafted = sampling.probabilities(logits.detach(), positions + 1)
        overlap = torch.minimum(target, drafted).sum(-1).mean()
        return {"loss": cross_entropy(logits, target) + clean, "overlap": overlap}

    def loss(self, step: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        settings, (captions, codes) = self.settings, self.train_set
        generator = batch_generator(settings.seed, step)
        index = torch.randint(len(codes), (settings.batch_size,), generator=generator)
        chosen = [captions[i] for i in index.tolist()]
        figures = self.figures(chosen, codes[index], settings.pure_share, generator)
        return figures["loss"], {name: value.detach() for name, value in figures.items()}

    def report(self, step: int, out: Path) -> dict[str, float]:
        """Loss and overlap where all noise is pure, on held-out images and on images that the pipeline generates from
        other seeds."""
        report = {}
        for name, (captions, codes) in self.report_sets.items():
            figures = self.figures(captions, codes, 1.0, torch.Generator().manual_seed(0))
            report |= {f"{name} {figure}": float(value) for figure, value in figures.items()}
        return report


def train_denoiser(
    pipe: LlamaGenPipeline,
    data: ImageCaptions,
    heldout: ImageCaptions,
    settings: DenoiserSettings,
    out: str | Path,
    on_report: Callable[[LlamaGenPipeline], None] | None = None,
) -> LlamaGenPipeline:
    """Train a `LlamaGenDenoiser` for the text-conditional `pipe`, and its transformer if the settings say so; returns
    `pipe` with the averaged weights, those of the denoiser as its component `denoiser`.

    `out` keeps checkpoint, log and curve; a second call with the same settings and data resumes the run.
    """
    torch.manual_seed(settings.seed)
    pipe.transformer.requires_grad_(False)
    about = {
        **of_settings(settings),
        **of_pipeline(pipe, "denoiser"),
        "data": of_data(data),
        "heldout": of_data(heldout),
    }
    denoiser = LlamaGenDenoiser.for_transformer(pipe.transformer, pipe.vq.config.codebook_dim, settings.rank)
    denoiser = denoiser.to(pipe.device).type(pipe.transformer.dtype)
    task = DenoiserTask(denoiser, pipe, data, heldout, settings)
    pipe.register_modules(denoiser=denoiser)
    hook = None if on_report is None else lambda: on_report(pipe)
    fit(task, settings.optimizer, out, on_report=hook, about=about, seed=settings.seed)
    return pipe


def run_denoiser(
    recipe: dict, pipe: LlamaGenPipeline, train: str | Path, heldout: str | Path, out: str | Path
) -> LlamaGenPipeline:
    """Train a denoiser for `pipe` by a recipe. The pipeline with it is saved in `out`/model, in float16.

    Raises:
        ValueError: if `pipe` is not a LlamaGen pipeline that reads texts.
    """
    check_reads_texts(pipe)
    tables, out = read_tables(recipe), Path(out)
    settings = settings_of(DenoiserSettings, tables.table("denoiser"), "denoiser")
    data, heldout_data = load_both(tables, "transformer", train, heldout)
    pipe = train_denoiser(pipe, data, heldout_data, settings, out / "denoiser")
    save_float16(pipe, out / "model")
    return pipe
