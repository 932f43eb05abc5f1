"""Training of a text-conditional transformer of continuous tokens, jointly with a small T5 encoder, and of its
drafter."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import nn

from arimage.cli.options import fast_dtype
from arimage.models.denoising_head import diffusion_tables
from arimage.pipelines.kinds.class_or_text import left_pad
from arimage.pipelines.latent_llama.pipeline_latent_llama import LatentLlamaPipeline
from arimage.pipelines.latent_llama.transformer_latent_llama import LatentLlamaTransformer, velocity
from arimage.settings.schema import Number, Rows, Side, check
from arimage.tokenizers.vq_llamagen import LlamaGenVQModel
from arimage.training.data.pictures import to_unit_range
from arimage.training.processes import batch_generator
from arimage.training.recipe import new_model
from arimage.training.resuming import digest

from ..beginning import FRESH, Beginning, Run
from ..captioned import ImageCaptions
from ..captions import CaptionSettings, CaptionTask
from ..tables import Recipe, settings_of


@dataclass(frozen=True)
class LatentLlamaSettings(CaptionSettings):
    """How a transformer of continuous tokens is trained, besides `CaptionSettings`; `code_noise`, `noisy_share` and
    what belongs to them mean nothing.

    The head sees every token at `noises` random steps of the diffusion per forward pass of the transformer. To the
    tokens that the transformer reads, noise is added, of a standard deviation up to `input_noise` per image: generated
    tokens are not exactly those of the data either. A drafter is trained for `drafter_steps`.
    """

    noises: Annotated[int, Field(strict=True, ge=1, le=1000)] = 4
    input_noise: Number = 0.0
    drafter_steps: Rows = 0


class LatentLlamaTask(CaptionTask):
    """Teaches `transformer`, and the text encoder of `pipe` unless it is frozen, the vectors that the `vq` of `pipe`
    gives to `data`."""

    @classmethod
    def settings_of(cls, recipe: Recipe) -> LatentLlamaSettings:
        sampling, table = recipe.table("generation").sampling, recipe.table("transformer")
        settings = settings_of(LatentLlamaSettings, table, "transformer", sampling=sampling)
        if table.drafter is not None and settings.drafter_steps == 0:
            raise ValueError(
                "table [transformer.training]: drafter_steps is 0: give at least 1, or no table [transformer.drafter]"
            )
        return settings

    @classmethod
    def trial(cls, recipe: Recipe, vq: LlamaGenVQModel) -> LatentLlamaPipeline:
        """The pipeline of a recipe, without memory for its weights."""
        settings, table = cls.settings_of(recipe), recipe.table("transformer")
        width, networks = recipe.table("text_encoder").d_model, {}
        for name, config in (("model", table.model), ("drafter", table.drafter)):
            if config is not None:
                patch = check(Side, config.get("patch_size", 1), f"table [transformer.{name}]: patch_size")
                given = _arguments(vq, recipe.image_size, width, patch)
                config = {"num_condition_tokens": settings.caption_length} | config
                networks[name] = new_model(LatentLlamaTransformer, config, f"transformer.{name}", **given)
        return LatentLlamaPipeline(networks["model"], vq, drafter=networks.get("drafter"))

    @classmethod
    def run(cls, run: Run) -> LatentLlamaPipeline:
        """Train the transformer of a recipe, and its drafter."""
        settings, vq = cls.settings_of(run.recipe), LlamaGenVQModel.from_pretrained(run.tokenizer)
        table = run.recipe.table("transformer")
        parts = (table.model, table.drafter, run.text_config, vq, run.data, run.heldout, settings)
        more = {"on_report": run.save, "beginning": run.beginning}
        return train_latent_llama(*parts, run.out, run.device, **more)

    def __init__(
        self,
        pipe: LatentLlamaPipeline,
        transformer: LatentLlamaTransformer,
        data: ImageCaptions,
        heldout: ImageCaptions,
        settings: LatentLlamaSettings,
    ):
        super().__init__(pipe, data, heldout, settings, "sjd-coupled")
        self.transformer, self.text_encoder = transformer, pipe.text_encoder
        # Not a buffer: it follows from the config.
        self.kept = torch.tensor(diffusion_tables(self._timesteps, self._timesteps).alphas_cumprod)
        self.tokens, self.heldout_tokens = self.encode(data), self.encode(heldout)

    @property
    def _timesteps(self) -> int:
        return self.transformer.config.num_train_timesteps

    @torch.no_grad()
    def encode(self, data: ImageCaptions) -> torch.FloatTensor:
        pipe = self.frozen.pipe
        batches = [to_unit_range(batch).to(pipe.vq.device) for batch in data.images.split(64)]
        return torch.cat([pipe.to_tokens(pipe.vq.encode_latents(batch)).cpu() for batch in batches])

    def errors(
        self,
        captions: list[str],
        tokens: torch.FloatTensor,
        unconditional: torch.BoolTensor,
        generator: torch.Generator,
    ) -> torch.FloatTensor:
        """Squared errors [B, N, noises, D] of the velocity of tokens [B, N, D], each at several random steps of the
        diffusion."""
        embeds, mask = left_pad(*self.embed(captions))
        read = tokens
        if self.training and self.settings.input_noise:
            level = self.settings.input_noise * torch.rand(len(tokens), 1, 1, generator=generator)
            read = tokens + (level * torch.randn(tokens.shape, generator=generator)).to(tokens.device)
        conditions = self.transformer.predict(
            read, prompt_embeds=embeds, prompt_attention_mask=mask, unconditional=unconditional.to(tokens.device)
        )
        shape = *tokens.shape[:2], self.settings.noises
        timesteps = torch.randint(self._timesteps, shape, generator=generator)
        noise = torch.randn(*shape, tokens.shape[2], generator=generator).to(tokens.device)
        kept = self.kept[timesteps].to(tokens.device)[..., None]
        noisy, expected = velocity(tokens[:, :, None], noise, kept)
        head = self.transformer.denoising_head
        return F.mse_loss(head(noisy, timesteps.to(tokens.device), conditions[:, :, None]), expected, reduction="none")

    def loss(self, step: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        generator = batch_generator(self.settings.seed, step)
        index, captions, unconditional = self.batch(self.settings.batch_size, generator)
        tokens = self.tokens[index].to(self.transformer.device)
        loss = self.errors(captions, tokens, unconditional, generator).mean()
        return loss, {"loss": loss.detach()}

    def report(self, step: int, out: Path) -> dict[str, float]:
        losses, generator = [], torch.Generator().manual_seed(self.settings.seed)
        for index in torch.arange(len(self.heldout_captions)).split(32):
            tokens = self.heldout_tokens[index].to(self.transformer.device)
            captions = [self.heldout_captions[i] for i in index.tolist()]
            unconditional = torch.zeros(len(index), dtype=torch.bool)
            losses.append(self.errors(captions, tokens, unconditional, generator).mean((1, 2, 3)))
        if self.transformer is self.frozen.pipe.transformer:
            self.save_samples(out / "samples.png")
        return {"held-out loss": float(torch.cat(losses).mean())}


def train_latent_llama(
    model_config: dict,
    drafter_config: dict | None,
    text_config: dict,
    vq: LlamaGenVQModel,
    data: ImageCaptions,
    heldout: ImageCaptions,
    settings: LatentLlamaSettings,
    out: str | Path,
    device: str = "cpu",
    on_report: Callable[[LatentLlamaPipeline], None] | None = None,
    *,
    beginning: Beginning = FRESH,
) -> LatentLlamaPipeline:
    """Train a text-conditional `LatentLlamaTransformer(**model_config)` and a `T5EncoderModel`
    (`T5Config(**text_config)`) on the vectors that `vq` gives to `data`, and then, with the text encoder as it is, a
    drafter (`drafter_config`, None for none); returns the pipeline with the averaged weights, in float32.

    `out` keeps checkpoints, logs, curves and samples; a second call with the same settings and data resumes the run.
    """
    torch.manual_seed(settings.seed)
    tokenizer, text_encoder = beginning.text_parts(data, settings, text_config, Path(out) / "text_encoder", device)

    def new(config: dict) -> LatentLlamaTransformer:
        return LatentLlamaTransformer(
            **_arguments(vq, data.images.shape[-1], text_encoder.config.d_model, config.get("patch_size", 1)),
            **{"num_condition_tokens": settings.caption_length} | config,
        )

    transformer = new(model_config)
    beginning.start(transformer, device)
    nn.Module.to(text_encoder, device, fast_dtype(device))
    parts = {"vq": vq.to(device), "tokenizer": tokenizer, "text_encoder": text_encoder}
    pipe = LatentLlamaPipeline(transformer, **parts)
    hook = None if on_report is None else lambda: on_report(pipe)
    task = LatentLlamaTask(pipe, transformer, data, heldout, settings)
    slow = ("text_encoder.", "transformer.caption_projection.")
    begun = beginning.about(text_config, text_encoder)
    task.fit(Path(out) / "transformer", {"model": model_config, **begun}, slow=slow, on_report=hook)
    if drafter_config is not None:
        drafter = new(drafter_config)
        Beginning(compile=beginning.compile).start(drafter, device)
        text_encoder.requires_grad_(False)
        optimizer = replace(settings.optimizer, steps=settings.drafter_steps)
        task = LatentLlamaTask(pipe, drafter, data, heldout, replace(settings, optimizer=optimizer))
        task.fit(Path(out) / "drafter", {"model": drafter_config, "text_encoder": digest(text_encoder)})
        pipe = LatentLlamaPipeline(transformer, **parts, drafter=drafter.float())
    for model in (transformer, text_encoder):
        model.float()
    return pipe


def _arguments(vq: LlamaGenVQModel, image_size: int, caption_dim: int, patch_size: int) -> dict:
    """The arguments of a transformer that follow from its image tokenizer and its text encoder."""
    side = image_size // vq.scale_factor
    if side % patch_size:
        raise ValueError(f"patch_size is {patch_size}: give a number that divides the {side} vectors along a side")
    return {
        "conditioning": "text",
        "caption_dim": caption_dim,
        "token_dim": vq.config.codebook_dim * patch_size**2,
        "grid_size": side // patch_size,
    }
