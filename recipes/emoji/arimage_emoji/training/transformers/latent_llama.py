"""Training of a text-conditional transformer of continuous tokens, jointly with a small T5 encoder, and of its
drafter."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

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

from ..beginning import Beginning, Run
from ..captioned import ImageCaptions
from ..captions import CaptionSettings, CaptionTask
from ..tables import Recipe


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
    """Teaches the transformer of `pipe`, or a drafter for it, and its text encoder unless that is frozen, the vectors
    that its `vq` gives to `data`."""

    transformer_class, pipeline_class = LatentLlamaTransformer, LatentLlamaPipeline
    settings_class = LatentLlamaSettings

    @classmethod
    def settings_of(cls, recipe: Recipe) -> LatentLlamaSettings:
        settings = super().settings_of(recipe)
        if recipe.table("transformer").drafter is not None and settings.drafter_steps == 0:
            raise ValueError(
                "table [transformer.training]: drafter_steps is 0: give at least 1, or no table [transformer.drafter]"
            )
        return settings

    @classmethod
    def arguments(cls, recipe: Recipe, vq: LlamaGenVQModel, caption_dim: int, config: dict) -> dict[str, Any]:
        side = recipe.image_size // vq.scale_factor
        patch = check(Side, config.get("patch_size", 1), "table [transformer]: patch_size")
        if side % patch:
            raise ValueError(f"patch_size is {patch}: give a number that divides the {side} vectors along a side")
        return {
            "conditioning": "text",
            "caption_dim": caption_dim,
            "token_dim": vq.config.codebook_dim * patch**2,
            "grid_size": side // patch,
        }

    @classmethod
    def trial(cls, recipe: Recipe, vq: LlamaGenVQModel) -> LatentLlamaPipeline:
        pipe, config = super().trial(recipe, vq), recipe.table("transformer").drafter
        if config is not None:
            given = cls.arguments(recipe, vq, recipe.table("text_encoder").d_model, config)
            config = cls.chosen(config, cls.settings_of(recipe))
            drafter = new_model(LatentLlamaTransformer, config, "transformer.drafter", **given)
            pipe = LatentLlamaPipeline(pipe.transformer, vq, drafter=drafter)
        return pipe

    @classmethod
    def run(cls, run: Run) -> LatentLlamaPipeline:
        """Train the transformer of a recipe, and then its drafter with the text encoder as it is."""
        pipe, config, settings = super().run(run), run.recipe.table("transformer").drafter, cls.settings_of(run.recipe)
        if config is not None:
            given = cls.arguments(run.recipe, pipe.vq, pipe.text_encoder.config.d_model, config)
            drafter = LatentLlamaTransformer(**given, **cls.chosen(config, settings))
            Beginning(compile=run.beginning.compile).start(drafter, run.device)
            # In the dtype in which it was trained.
            nn.Module.to(pipe.text_encoder, run.device, fast_dtype(run.device)).requires_grad_(False)
            optimizer = replace(settings.optimizer, steps=settings.drafter_steps)
            task = cls(pipe, run.data, run.heldout, replace(settings, optimizer=optimizer), drafter)
            task.fit(run.out / "drafter", {"model": config, "text_encoder": digest(pipe.text_encoder)})
            pipe.text_encoder.float()
            pipe = LatentLlamaPipeline(**pipe.components | {"drafter": drafter.float()})
        return pipe

    def __init__(
        self,
        pipe: LatentLlamaPipeline,
        data: ImageCaptions,
        heldout: ImageCaptions,
        settings: LatentLlamaSettings,
        drafter: LatentLlamaTransformer | None = None,
    ):
        super().__init__(pipe, data, heldout, settings)
        self.transformer, self.text_encoder = drafter or pipe.transformer, pipe.text_encoder
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
