"""Training of a text-conditional Cosmos transformer, jointly with a small T5 encoder, on the tokens of clips."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from arimage.pipelines.cosmos.pipeline_cosmos import CosmosPipeline
from arimage.pipelines.cosmos.transformer_cosmos import CosmosTransformer
from arimage.settings.schema import Count, Share
from arimage.tokenizers.vq_frames import FramewiseVQModel
from arimage.tokenizers.vq_llamagen import LlamaGenVQModel
from arimage.training.data.pictures import save_grid, to_unit_range
from arimage.training.processes import batch_generator
from arimage.training.recipe import new_model

from ..captioned import ImageCaptions
from ..captions import CaptionSettings, CaptionTask
from ..clips import FPS
from ..tables import Recipe


@dataclass(frozen=True)
class VideoSettings(CaptionSettings):
    """How a Cosmos transformer is trained, besides `CaptionSettings`.

    `short_share` of the steps train on the first `short_frames` frames only, with as many more clips: what they show
    follows from the caption, while later frames follow from those before.
    """

    short_share: Share = 0.5
    short_frames: Count = 2


class VideoTask(CaptionTask):
    """Teaches the transformer and the text encoder of `pipe` the tokens that its `vq` gives to the clips of `data`."""

    transformer_class, pipeline_class, tokenizer_class = CosmosTransformer, CosmosPipeline, FramewiseVQModel
    settings_class, slow = VideoSettings, ("text_encoder.",)

    @classmethod
    def arguments(cls, recipe: Recipe, vq: LlamaGenVQModel, caption_dim: int, config: dict) -> dict[str, Any]:
        side = recipe.image_size // vq.scale_factor
        shape = recipe.table("clips").frames, side, side
        return {"shape": shape, "vocab_size": vq.config.codebook_size, "context_dim": caption_dim}

    @classmethod
    def chosen(cls, config: dict, settings: CaptionSettings) -> dict[str, Any]:
        return config

    @classmethod
    def join(cls, transformer: Any, vq: Any, tokenizer: Any = None, text_encoder: Any = None) -> CosmosPipeline:
        return CosmosPipeline(transformer, vq, tokenizer, text_encoder, begins_with_text=True, fps=FPS)

    @classmethod
    def trial(cls, recipe: Recipe, vq: LlamaGenVQModel) -> CosmosPipeline:
        frames = new_model(FramewiseVQModel, recipe.table("tokenizer").model, "tokenizer.model")
        return super().trial(recipe, frames)

    def __init__(self, pipe: CosmosPipeline, data: ImageCaptions, heldout: ImageCaptions, settings: VideoSettings):
        super().__init__(pipe, data, heldout, settings)
        self.transformer, self.text_encoder = pipe.transformer, pipe.text_encoder
        self.tokens, self.heldout_tokens = self.encode(data), self.encode(heldout)

    @torch.no_grad()
    def encode(self, data: ImageCaptions) -> torch.LongTensor:
        """The tokens [M, T, h, w] of clips."""
        vq = self.frozen.pipe.vq
        batches = (to_unit_range(clips).transpose(1, 2) for clips in data.images.split(8))
        return torch.cat([vq.encode(clips.to(vq.device, vq.dtype)).cpu() for clips in batches])

    def logits(self, captions: list[str], tokens: torch.LongTensor, dropped: torch.BoolTensor) -> torch.Tensor:
        """[B, N, V] for clips [B, t, h, w]; those whose caption is dropped read zeros, like padding."""
        embeds, mask = self.embed(captions)
        read = mask.bool() & ~dropped.to(mask.device)[:, None]
        return self.transformer.predict(tokens, embeds.masked_fill(~read[..., None], 0))

    def loss(self, step: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        settings = self.settings.at(step)
        generator = batch_generator(settings.seed, step)
        batch_size, frames = settings.batch_size, self.tokens.shape[1]
        if torch.rand((), generator=generator) < settings.short_share and settings.short_frames < frames:
            batch_size, frames = batch_size * frames // settings.short_frames, settings.short_frames
        index, captions, dropped = self.batch(batch_size, generator)
        tokens = self.tokens[index, :frames]
        device, vocab_size = self.transformer.device, self.transformer.config.vocab_size
        logits = self.logits(captions, self.noisy(tokens, vocab_size, step, generator).to(device), dropped)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.to(device).flatten())
        return loss, {"loss": loss.detach()}

    def report(self, step: int, out: Path) -> dict[str, float]:
        losses = []
        for index in torch.arange(len(self.heldout_captions)).split(16):
            tokens = self.heldout_tokens[index].to(self.transformer.device)
            logits = self.logits(
                [self.heldout_captions[i] for i in index.tolist()], tokens, torch.zeros(len(index)).bool()
            )
            losses.append(F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none"))
        self.save_samples(out / "samples.png")
        return {"held-out loss": float(torch.cat(losses).mean())}

    def save_samples(self, path: Path) -> None:
        """Generate videos of the sample prompts and save their frames as one image, a video per row."""
        pipe = self.frozen.pipe
        pipe.set_progress_bar_config(disable=True)
        frames = pipe(
            list(self.settings.sample_prompts),
            **self.settings.sampling,
            decoding=self.decoding,
            generator=torch.Generator().manual_seed(self.settings.seed),
            output_type="pt",
        ).frames
        save_grid(frames.flatten(0, 1), path, columns=frames.shape[1])
