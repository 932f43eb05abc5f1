"""What the training of every text-conditional transformer shares: captions, their encoder, noise, and sample
images."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar, Self

import torch
from pydantic import Field
from torch import nn

from arimage.cli.options import fast_dtype
from arimage.pipelines.kinds.class_or_text import last_state
from arimage.pipelines.text.captions import caption_for
from arimage.settings.schema import COMPLETE, Batch, Flag, Number, Rows, Seed, Share, Text, check
from arimage.tokenizers.vq_llamagen import LlamaGenVQModel
from arimage.training.data.pictures import save_grid
from arimage.training.loop import OptimizerSettings, fit
from arimage.training.recipe import new_model
from arimage.training.resuming import digest, of_data, of_settings
from arimage.training.tokens.text import CaptionLength, TextVocabulary

from .beginning import Run
from .captioned import ImageCaptions
from .sentences import sample_captions
from .tables import Recipe, settings_of


@dataclass(frozen=True)
class CaptionSettings:
    """How a transformer is trained on captions.

    `primary_share` of the captions are the primary one, the others a random variant; `framed_share` of them become
    part of a sentence ("show me a cute dog"), `caption_dropout` are replaced by "no caption", and `code_noise` of the
    input tokens by random ones. `noisy_share` of the images have more of these, any share up to `most_noise`, half of
    which come from another image of the batch: without them the model continues an image from its own beginning, and a
    token that strays from the caption is followed by others. The text encoder and the caption projection learn at
    `text_learning_rate_scale` times the learning rate; without `train_text` the encoder stays as it is. `mixed_share`
    of the captions have up to half of another one of the batch mixed into their embeddings, so that words the encoder
    places near a caption mean the same to the transformer. Every report generates images of `sample_prompts`, with the
    arguments `sampling` of the pipeline. Each of `stages` has the step `start` that it begins with, and the settings
    that change from there.
    """

    optimizer: OptimizerSettings
    batch_size: Batch = 32
    primary_share: Share = 0.5
    framed_share: Share = 0.0
    train_text: Flag = True
    mixed_share: Share = 0.0
    caption_dropout: Share = 0.1
    code_noise: Share = 0.03
    noisy_share: Share = 0.0
    most_noise: Share = 0.7
    text_learning_rate_scale: Number = 0.2
    caption_length: CaptionLength = 24
    text_vocab_size: TextVocabulary = 2048
    sample_prompts: Annotated[tuple[Text, ...], Field(min_length=1, max_length=100)] = ("a red heart",)
    sampling: dict[str, Any] = field(default_factory=dict)
    seed: Seed = 0
    stages: tuple[dict[str, Any], ...] = ()
    __pydantic_config__ = COMPLETE

    def __post_init__(self):
        for number, stage in enumerate(self.stages):
            where, changes = f"stages[{number}]", dict(stage)
            check(Rows, changes.pop("start", None), f"{where}.start")
            for name in changes.keys() & {"optimizer", "sampling", "stages"}:
                raise ValueError(f"{where}.{name} cannot change in training: leave it out")
            check(type(self), vars(self) | changes | {"stages": ()}, where)

    def at(self, step: int) -> Self:
        """The settings of `step`."""
        changes = {}
        for stage in self.stages:
            changes |= stage if stage["start"] <= step else {}
        changes.pop("start", None)
        return replace(self, **changes, stages=())


class CaptionTask(nn.Module):
    """The part of a task that does not depend on the kind of transformer.

    `frozen.pipe` generates the samples of the reports with `decoding`. Subclasses register what is trained; the order
    is that of the parameters in a checkpoint.

    Attributes:
        slow: how the names of the parameters begin that learn at the learning rate of the text.
    """

    transformer_class: ClassVar[Any]
    pipeline_class: ClassVar[Any]
    tokenizer_class: ClassVar[Any] = LlamaGenVQModel
    settings_class: ClassVar[Any]
    slow: ClassVar[tuple[str, ...]] = ("text_encoder.", "transformer.caption_projection.")

    @classmethod
    def settings_of(cls, recipe: Recipe) -> Any:
        sampling = recipe.table("generation").sampling
        return settings_of(cls.settings_class, recipe.table("transformer"), "transformer", sampling=sampling)

    @classmethod
    def arguments(cls, recipe: Recipe, vq: Any, caption_dim: int, config: dict) -> dict[str, Any]:
        """The arguments of a transformer that follow from the recipe, its image tokenizer, the width of its text
        encoder, and its other arguments `config`."""
        raise NotImplementedError

    @classmethod
    def chosen(cls, config: dict, settings: CaptionSettings) -> dict[str, Any]:
        """The arguments of a transformer that a recipe may choose."""
        return {"num_condition_tokens": settings.caption_length} | config

    @classmethod
    def join(cls, transformer: Any, vq: Any, tokenizer: Any = None, text_encoder: Any = None) -> Any:
        """The pipeline of these components."""
        return cls.pipeline_class(transformer=transformer, vq=vq, tokenizer=tokenizer, text_encoder=text_encoder)

    @staticmethod
    def starting_weights(trained: nn.Module) -> dict[str, torch.Tensor]:
        """The weights of a trained transformer under the names of this task's."""
        return trained.state_dict()

    @classmethod
    def trial(cls, recipe: Recipe, vq: Any) -> Any:
        """The pipeline of a recipe, without memory for its weights."""
        settings, config = cls.settings_of(recipe), recipe.table("transformer").model
        given = cls.arguments(recipe, vq, recipe.table("text_encoder").d_model, config)
        model = new_model(cls.transformer_class, cls.chosen(config, settings), "transformer.model", **given)
        return cls.join(model, vq)

    @classmethod
    def run(cls, run: Run) -> Any:
        """Train the transformer of a recipe and its text encoder; returns the pipeline with the averaged weights, in
        float32. `run.out` keeps checkpoint, log, curve and samples; a second call with the same settings and data
        resumes the run."""
        settings, vq = cls.settings_of(run.recipe), cls.tokenizer_class.from_pretrained(run.tokenizer)
        config, text_config = run.recipe.table("transformer").model, run.text_config
        torch.manual_seed(settings.seed)
        tokenizer, text_encoder = run.beginning.text_parts(
            run.data,
            settings.text_vocab_size,
            settings.caption_length,
            text_config,
            run.out / "text_encoder",
            run.device,
        )
        given = cls.arguments(run.recipe, vq, text_encoder.config.d_model, config)
        transformer = cls.transformer_class(**given, **cls.chosen(config, settings))
        run.beginning.start(transformer, run.device, cls.starting_weights)
        nn.Module.to(text_encoder, run.device, fast_dtype(run.device))
        pipe = cls.join(transformer, vq.to(run.device), tokenizer, text_encoder)
        about = {"model": config, **run.beginning.about(text_config, text_encoder)}
        task = cls(pipe, run.data, run.heldout, settings)
        task.fit(run.out / "transformer", about, slow=cls.slow, on_report=lambda: run.save(pipe))
        for model in (transformer, text_encoder):
            model.float()
        return pipe

    def __init__(
        self,
        pipe: Any,
        data: ImageCaptions,
        heldout: ImageCaptions,
        settings: CaptionSettings,
        decoding: str = "sjd-coupled",
    ):
        super().__init__()
        self.data, self.settings, self.decoding = data, settings, decoding
        # Not a module: what is in it is neither trained nor part of a checkpoint.
        self.frozen = SimpleNamespace(pipe=pipe, heldout=heldout)
        tokenizer = pipe.tokenizer
        self.captions = [[caption_for(tokenizer, text) for text in variants] for variants in data.captions]
        self.heldout_captions = [caption_for(tokenizer, variants[0]) for variants in heldout.captions]

    def embed(self, captions: list[str]) -> tuple[torch.Tensor, torch.LongTensor]:
        """Embeddings [B, P, D] and mask [B, P] of the captions, as the pipeline's `encode_condition` gives them."""
        pipe, length = self.frozen.pipe, self.settings.caption_length
        text = pipe.tokenizer(captions, padding="max_length", max_length=length, truncation=True, return_tensors="pt")
        text = text.to(self.text_encoder.device)
        mask = text.attention_mask
        hidden = self.text_encoder(text.input_ids, attention_mask=mask).last_hidden_state
        if pipe.transformer.config.get("num_condition_tokens") == 1:
            hidden, mask = last_state(hidden, mask)
        if self.training:
            each = (len(hidden), 1, 1)
            share = (torch.rand(each) < self.settings.mixed_share) * torch.rand(each) / 2
            # Captions end together, as where they are prefixes: the last state is that of a whole caption.
            lengths = mask.sum(1, keepdim=True)
            places = torch.arange(hidden.shape[1], device=hidden.device) - lengths + lengths.roll(1, 0)
            places = places.clamp(0, hidden.shape[1] - 1)[..., None].expand_as(hidden)
            hidden = hidden.lerp(hidden.roll(1, 0).gather(1, places), share.to(hidden))
        return hidden, mask

    def batch(self, size: int, generator: torch.Generator) -> tuple[torch.LongTensor, list[str], torch.BoolTensor]:
        """Indices of images [B], their captions, and which of these to drop [B]."""
        index = self.data.sample(size, generator)
        settings = self.settings
        captions = sample_captions(
            self.captions, index, generator, primary_share=settings.primary_share, framed_share=settings.framed_share
        )
        return index, captions, torch.rand(len(index), generator=generator) < self.settings.caption_dropout

    def noisy(
        self, tokens: torch.LongTensor, vocab_size: int, step: int, generator: torch.Generator
    ) -> torch.LongTensor:
        """`tokens` [B, ...], some of them replaced by random ones or by those of another image."""
        settings, each = self.settings.at(step), (len(tokens), *[1] * (tokens.ndim - 1))
        noisy = torch.rand(each, generator=generator) < settings.noisy_share
        share = torch.where(noisy, settings.most_noise * torch.rand(each, generator=generator), settings.code_noise)
        chosen = torch.rand(tokens.shape, generator=generator) < share
        random = torch.randint(vocab_size, tokens.shape, generator=generator).to(tokens.device)
        of_another = noisy & (torch.rand(each, generator=generator) < 0.5)
        noise = torch.where(of_another.to(tokens.device), tokens.roll(1, 0), random)
        return torch.where(chosen.to(tokens.device), noise, tokens)

    def save_samples(self, path: Path) -> None:
        """Generate images of the sample prompts and save them as one."""
        pipe = self.frozen.pipe
        pipe.set_progress_bar_config(disable=True)
        images = pipe(
            list(self.settings.sample_prompts),
            **self.settings.sampling,
            decoding=self.decoding,
            generator=torch.Generator().manual_seed(self.settings.seed),
            output_type="pt",
        ).images
        save_grid(images, path, columns=8)

    def fit(
        self,
        out: str | Path,
        about: dict[str, Any],
        *,
        slow: tuple[str, ...] = (),
        on_report: Callable[[], None] | None = None,
    ) -> None:
        """Train with `loop.fit`; parameters whose names begin like one of `slow` learn at the text's learning rate.
        `about` says what the result depends on besides the settings, the data and the image tokenizer."""
        if not self.settings.train_text:
            self.text_encoder.requires_grad_(False)
        scales = dict.fromkeys(slow, self.settings.text_learning_rate_scale)
        about = {
            # How the samples of reports are generated may change.
            **of_settings(self.settings, "sampling", "sample_prompts"),
            **about,
            "vq": digest(self.frozen.pipe.vq),
            "data": of_data(self.data),
            "heldout": of_data(self.frozen.heldout),
        }
        fit(
            self,
            self.settings.optimizer,
            out,
            learning_rate_scales=scales,
            on_report=on_report,
            about=about,
            seed=self.settings.seed,
        )
