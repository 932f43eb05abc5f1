"""Training of a text-conditional LlamaGen transformer, jointly with a small T5 encoder, on the tokens of an image tokenizer."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from ..models.transformer_llamagen import LlamaGenTransformer
from ..options import fast_dtype
from ..pipelines.class_or_text import left_pad
from ..pipelines.pipeline_llamagen import LlamaGenPipeline
from ..tokenizers.vq_llamagen import LlamaGenVQModel
from .captions import CaptionSettings, CaptionTask, new_text_parts
from .data import ImageCaptions, to_unit_range


@dataclass(frozen=True)
class TransformerSettings(CaptionSettings):
    """How a LlamaGen transformer is trained, besides `CaptionSettings`.

    At the full learning rate, text encoder and caption projection end in a constant that no longer tells captions apart.
    `short_share` of the steps train on the first `short_tokens` tokens only, with as many more images: there the caption
    decides most, while later tokens follow from the image's own beginning.
    """

    short_share: float = 0.75
    short_tokens: int = 96


class TransformerTask(CaptionTask):
    """Teaches the transformer and the text encoder of `pipe` the tokens that its `vq` gives to `data`."""

    def __init__(
        self, pipe: LlamaGenPipeline, data: ImageCaptions, heldout: ImageCaptions, settings: TransformerSettings
    ):
        super().__init__(pipe, data, heldout, settings, "sjd-coupled")
        self.transformer, self.text_encoder = pipe.transformer, pipe.text_encoder
        self.codes, self.heldout_codes = self.encode(data), self.encode(heldout)

    @torch.no_grad()
    def encode(self, data: ImageCaptions) -> torch.LongTensor:
        vq = self.frozen.pipe.vq
        batches = data.images.split(64)
        return torch.cat([vq.encode(to_unit_range(batch).to(vq.device)).flatten(1).cpu() for batch in batches])

    def logits(self, captions: list[str], codes: torch.LongTensor, unconditional: torch.BoolTensor) -> torch.Tensor:
        embeds, mask = left_pad(*self.embed(captions, self.settings.caption_length))
        unconditional = unconditional.to(codes.device)
        return self.transformer.predict(
            codes, prompt_embeds=embeds, prompt_attention_mask=mask, unconditional=unconditional
        )

    def loss(self, step: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        settings = self.settings.at(step)
        generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + step)
        batch_size, length = settings.batch_size, self.codes.shape[1]
        if torch.rand((), generator=generator) < settings.short_share and settings.short_tokens < length:
            batch_size, length = batch_size * length // settings.short_tokens, settings.short_tokens
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


def train_transformer(
    model_config: dict,
    text_config: dict,
    vq: LlamaGenVQModel,
    data: ImageCaptions,
    heldout: ImageCaptions,
    settings: TransformerSettings,
    out: str | Path,
    device: str = "cpu",
    on_report: Callable[[LlamaGenPipeline], None] | None = None,
) -> LlamaGenPipeline:
    """Train a text-conditional `LlamaGenTransformer(**model_config)` and a `T5EncoderModel` (`T5Config(**text_config)`) on
    the tokens that `vq` gives to `data`; returns the pipeline with the averaged weights, in float32.

    `out` keeps checkpoint, log, curve and samples; a second call resumes an interrupted run.
    """
    torch.manual_seed(settings.seed)
    tokenizer, text_encoder = new_text_parts(data, settings, text_config)
    transformer = LlamaGenTransformer(
        conditioning="text",
        caption_dim=text_encoder.config.d_model,
        num_condition_tokens=settings.caption_length,
        vocab_size=vq.config.codebook_size,
        grid_size=data.images.shape[-1] // vq.scale_factor,
        **model_config,
    )
    transformer.init_weights()
    for model in (transformer, text_encoder):
        nn.Module.to(model, device, fast_dtype(device))
    pipe = LlamaGenPipeline(transformer=transformer, vq=vq.to(device), tokenizer=tokenizer, text_encoder=text_encoder)
    task = TransformerTask(pipe, data, heldout, settings)
    hook = None if on_report is None else lambda: on_report(pipe)
    task.fit(out, slow=("text_encoder.", "transformer.caption_projection."), on_report=hook)
    for model in (transformer, text_encoder):
        model.float()
    return pipe
