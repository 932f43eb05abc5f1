"""Training of a text-conditional transformer, jointly with a small T5 encoder, on the tokens of an image tokenizer."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from arimage.cli.options import fast_dtype
from arimage.pipelines.base import ARImagePipeline
from arimage.pipelines.kinds.class_or_text import left_pad
from arimage.pipelines.llamagen.pipeline_llamagen import LlamaGenPipeline
from arimage.pipelines.llamagen.transformer_llamagen import LlamaGenTransformer
from arimage.settings.schema import Count, Share
from arimage.tokenizers.vq_llamagen import LlamaGenVQModel
from arimage.training.data.pictures import to_unit_range
from arimage.training.processes import batch_generator
from arimage.training.recipe import new_model

from ..beginning import FRESH, Beginning, Run
from ..captioned import ImageCaptions
from ..captions import CaptionSettings, CaptionTask
from ..tables import Recipe, settings_of


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
    def settings_of(cls, recipe: Recipe) -> TransformerSettings:
        sampling = recipe.table("generation").sampling
        return settings_of(cls.settings_class, recipe.table("transformer"), "transformer", sampling=sampling)

    @classmethod
    def trial(cls, recipe: Recipe, vq: LlamaGenVQModel) -> ARImagePipeline:
        """The pipeline of a recipe, without memory for its weights."""
        settings, width = cls.settings_of(recipe), recipe.table("text_encoder").d_model
        given = _arguments(vq, recipe.image_size, width)
        config = {"num_condition_tokens": settings.caption_length} | recipe.table("transformer").model
        return cls.pipeline_class(new_model(cls.transformer_class, config, "transformer.model", **given), vq)

    @classmethod
    def run(cls, run: Run) -> ARImagePipeline:
        """Train the transformer of a recipe."""
        settings, vq = cls.settings_of(run.recipe), LlamaGenVQModel.from_pretrained(run.tokenizer)
        parts = (run.recipe.table("transformer").model, run.text_config, vq, run.data, run.heldout, settings)
        more = {"on_report": run.save, "task_class": cls, "beginning": run.beginning}
        return train_transformer(*parts, run.out / "transformer", run.device, **more)

    @staticmethod
    def starting_weights(trained: nn.Module) -> dict[str, torch.Tensor]:
        """The weights of a trained transformer under the names of this task's."""
        return trained.state_dict()

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


def train_transformer(
    model_config: dict,
    text_config: dict,
    vq: LlamaGenVQModel,
    data: ImageCaptions,
    heldout: ImageCaptions,
    settings: TransformerSettings,
    out: str | Path,
    device: str = "cpu",
    on_report: Callable[[ARImagePipeline], None] | None = None,
    *,
    task_class: type[TransformerTask] = TransformerTask,
    beginning: Beginning = FRESH,
) -> ARImagePipeline:
    """Train a text-conditional transformer of `task_class`, made with the arguments `model_config`, and a
    `T5EncoderModel` (`T5Config(**text_config)`) on the tokens that `vq` gives to `data`; returns the pipeline with the
    averaged weights, in float32.

    `out` keeps checkpoint, log, curve and samples; a second call with the same settings and data resumes the run.
    """
    torch.manual_seed(settings.seed)
    tokenizer, text_encoder = beginning.text_parts(
        data, settings, text_config, Path(out).with_name("text_encoder"), device
    )
    transformer = task_class.transformer_class(
        **_arguments(vq, data.images.shape[-1], text_encoder.config.d_model),
        **{"num_condition_tokens": settings.caption_length} | model_config,
    )
    beginning.start(transformer, device, task_class.starting_weights)
    nn.Module.to(text_encoder, device, fast_dtype(device))
    pipe = task_class.pipeline_class(
        transformer=transformer, vq=vq.to(device), tokenizer=tokenizer, text_encoder=text_encoder
    )
    hook = None if on_report is None else lambda: on_report(pipe)
    about = {"model": model_config, **beginning.about(text_config, text_encoder)}
    task = task_class(pipe, data, heldout, settings)
    task.fit(out, about, slow=("text_encoder.", "transformer.caption_projection."), on_report=hook)
    for model in (transformer, text_encoder):
        model.float()
    return pipe


def _arguments(vq: LlamaGenVQModel, image_size: int, caption_dim: int) -> dict:
    """The arguments of a transformer that follow from its image tokenizer and its text encoder."""
    return {
        "conditioning": "text",
        "caption_dim": caption_dim,
        "vocab_size": vq.config.codebook_size,
        "grid_size": image_size // vq.scale_factor,
    }
