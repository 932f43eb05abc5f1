"""Training of a text-conditional transformer, jointly with a small T5 encoder, on the tokens of an image tokenizer."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from arimage.pipelines.kinds.class_or_text import left_pad
from arimage.pipelines.llamagen.pipeline_llamagen import LlamaGenPipeline
from arimage.pipelines.llamagen.transformer_llamagen import LlamaGenTransformer
from arimage.settings.schema import Count, Share
from arimage.tokenizers.vq_llamagen import LlamaGenVQModel
from arimage.training.data.pictures import to_unit_range
from arimage.training.processes import batch_generator

from ..captioned import ImageCaptions
from ..captions import CaptionSettings, CaptionTask
from ..tables import Recipe


@dataclass(frozen=True)
class TransformerSettings(CaptionSettings):
    """How a LlamaGen transformer is trained, besides `CaptionSettings`.

    At the full learning rate, text encoder and caption projection end in a constant that no longer tells captions
    apart. `short_share` of the steps train on the first `short_tokens` tokens only, with as many more images: there
    the caption decides most, while later tokens follow from the image's own beginning.
    """

    short_share: Share = 0.75
    short_tokens: Count = 96


class TransformerTask(CaptionTask):
    """Teaches the transformer and the text encoder of `pipe` the tokens that its `vq` gives to `data`."""

    transformer_class, pipeline_class = LlamaGenTransformer, LlamaGenPipeline
    settings_class = TransformerSettings

    @classmethod
    def arguments(cls, recipe: Recipe, vq: LlamaGenVQModel, caption_dim: int, config: dict) -> dict[str, Any]:
        return {
            "conditioning": "text",
            "caption_dim": caption_dim,
            "vocab_size": vq.config.codebook_size,
            "grid_size": recipe.image_size // vq.scale_factor,
        }

    def __init__(
        self, pipe: LlamaGenPipeline, data: ImageCaptions, heldout: ImageCaptions, settings: TransformerSettings
    ):
        super().__init__(pipe, data, heldout, settings)
        self.transformer, self.text_encoder = pipe.transformer, pipe.text_encoder
        self.codes, self.heldout_codes = self.encode(data), self.encode(heldout)

    @torch.no_grad()
    def encode(self, data: ImageCaptions) -> torch.LongTensor:
        vq = self.frozen.pipe.vq
        batches = data.images.split(64)
        return torch.cat([vq.encode(to_unit_range(batch).to(vq.device)).flatten(1).cpu() for batch in batches])

    def logits(
        self, captions: list[str], codes: torch.LongTensor, unconditional: torch.BoolTensor, **order
    ) -> torch.Tensor:
        embeds, mask = left_pad(*self.embed(captions))
        unconditional = unconditional.to(codes.device)
        return self.transformer.predict(
            codes, prompt_embeds=embeds, prompt_attention_mask=mask, unconditional=unconditional, **order
        )

    def batch_shape(self, step: int, generator: torch.Generator) -> tuple[int, int]:
        """How many images a step trains on, and how many of their first tokens."""
        settings, length = self.settings.at(step), self.codes.shape[1]
        batch_size = settings.batch_size
        if torch.rand((), generator=generator) < settings.short_share and settings.short_tokens < length:
            batch_size, length = batch_size * length // settings.short_tokens, settings.short_tokens
        return batch_size, length

    def loss(self, step: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        generator = batch_generator(self.settings.seed, step)
        batch_size, length = self.batch_shape(step, generator)
        index, captions, unconditional = self.batch(batch_size, generator)
        codes = self.codes[index, :length]
        device, vocab_size = self.transformer.device, self.transformer.config.vocab_size
        logits = self.logits(captions, self.noisy(codes, vocab_size, step, generator).to(device), unconditional)
        loss = F.cross_entropy(logits.flatten(0, 1), codes.to(device).flatten())
        return loss, {"loss": loss.detach()}

    def report(self, step: int, out: Path) -> dict[str, float]:
        losses = []
        for index in torch.arange(len(self.heldout_captions)).split(32):
            codes = self.heldout_codes[index].to(self.transformer.device)
            captions = [self.heldout_captions[i] for i in index.tolist()]
            logits = self.logits(captions, codes, torch.zeros(len(index), dtype=torch.bool))
            losses.append(F.cross_entropy(logits.flatten(0, 1), codes.flatten(), reduction="none"))
        self.save_samples(out / "samples.png")
        return {"held-out loss": float(torch.cat(losses).mean())}
