"""Training of a text-conditional Cosmos transformer, jointly with a small T5 encoder, on the tokens of clips."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from arimage.cli.options import fast_dtype
from arimage.pipelines.cosmos.pipeline_cosmos import CosmosPipeline
from arimage.pipelines.cosmos.transformer_cosmos import CosmosTransformer
from arimage.settings.schema import Count, Share
from arimage.tokenizers.vq_frames import FramewiseVQModel
from arimage.tokenizers.vq_llamagen import LlamaGenVQModel
from arimage.training.data.pictures import save_grid, to_unit_range
from arimage.training.processes import batch_generator
from arimage.training.recipe import new_model

from ..beginning import FRESH, Beginning, Run
from ..captioned import ImageCaptions
from ..captions import CaptionSettings, CaptionTask
from ..clips import FPS
from ..tables import Recipe, settings_of


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

    @classmethod
    def settings_of(cls, recipe: Recipe) -> VideoSettings:
        sampling = recipe.table("generation").sampling
        return settings_of(VideoSettings, recipe.table("transformer"), "transformer", sampling=sampling)

    @classmethod
    def trial(cls, recipe: Recipe, vq: LlamaGenVQModel) -> CosmosPipeline:
        """The pipeline of a recipe, without memory for its weights."""
        cls.settings_of(recipe)
        side, config = recipe.image_size // vq.scale_factor, recipe.table("transformer").model
        transformer = new_model(
            CosmosTransformer,
            config,
            "transformer.model",
            shape=(recipe.table("clips").frames, side, side),
            vocab_size=vq.config.codebook_size,
            context_dim=recipe.table("text_encoder").d_model,
        )
        frames = new_model(FramewiseVQModel, recipe.table("tokenizer").model, "tokenizer.model")
        return CosmosPipeline(transformer, frames, begins_with_text=True, fps=FPS)

    @classmethod
    def run(cls, run: Run) -> CosmosPipeline:
        """Train the transformer of a recipe."""
        settings, vq = cls.settings_of(run.recipe), FramewiseVQModel.from_pretrained(run.tokenizer)
        parts = (run.recipe.table("transformer").model, run.text_config, vq, run.data, run.heldout, settings)
        more = {"on_report": run.save, "beginning": run.beginning}
        return train_cosmos_transformer(*parts, run.out / "transformer", run.device, **more)

    def __init__(self, pipe: CosmosPipeline, data: ImageCaptions, heldout: ImageCaptions, settings: VideoSettings):
        super().__init__(pipe, data, heldout, settings, "sjd-coupled")
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


def train_cosmos_transformer(
    model_config: dict,
    text_config: dict,
    vq: FramewiseVQModel,
    data: ImageCaptions,
    heldout: ImageCaptions,
    settings: VideoSettings,
    out: str | Path,
    device: str = "cpu",
    on_report: Callable[[CosmosPipeline], None] | None = None,
    *,
    beginning: Beginning = FRESH,
) -> CosmosPipeline:
    """Train a `CosmosTransformer(**model_config)` and a `T5EncoderModel` (`T5Config(**text_config)`) on the tokens
    that `vq` gives to the clips of `data`, returns the pipeline with the averaged weights, in
    float32.

    `out` keeps checkpoint, log, curve and samples; a second call with the same settings and data resumes the run.
    """
    torch.manual_seed(settings.seed)
    tokenizer, text_encoder = beginning.text_parts(
        data, settings, text_config, Path(out).with_name("text_encoder"), device
    )
    frames, side = data.images.shape[1], data.images.shape[-1] // vq.scale_factor
    transformer = CosmosTransformer(
        shape=(frames, side, side),
        vocab_size=vq.codebook_size,
        context_dim=text_encoder.config.d_model,
        **model_config,
    )
    beginning.start(transformer, device)
    nn.Module.to(text_encoder, device, fast_dtype(device))
    pipe = CosmosPipeline(transformer, vq.to(device), tokenizer, text_encoder, begins_with_text=True, fps=FPS)
    task = VideoTask(pipe, data, heldout, settings)
    hook = None if on_report is None else lambda: on_report(pipe)
    about = {"model": model_config, **beginning.about(text_config, text_encoder)}
    task.fit(out, about, slow=("text_encoder.",), on_report=hook)
    for model in (transformer, text_encoder):
        model.float()
    return pipe
