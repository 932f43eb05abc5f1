"""Training of a text-conditional LlamaGen transformer, jointly with a small T5 encoder, on the codes of a tokenizer."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import nn
from torchvision.utils import make_grid, save_image
from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

from ..models.transformer_llamagen import LlamaGenTransformer
from ..pipelines.pipeline_llamagen import LlamaGenPipeline, left_pad
from ..tokenizers.vq_llamagen import LlamaGenVQModel
from .data import ImageCaptions, to_unit_range
from .loop import OptimizerSettings, fit, training_dtype


@dataclass(frozen=True)
class TransformerSettings:
    """How the transformer is trained.

    Half of the captions are the primary one, the others a random variant; `caption_dropout` of them are replaced by "no
    caption", `code_noise` of the codes that the model sees by random ones. The text encoder and the caption projection learn
    at `text_learning_rate_scale` times the rate: at the full one they end in a constant that tells captions apart no more.
    `short_share` of the steps train on the first `short_tokens` codes only, with as many more images: there the caption
    decides most, while what follows can be told from the image's own beginning. `sample_prompts` are drawn at every report.
    """

    optimizer: OptimizerSettings
    batch_size: int = 32
    caption_dropout: float = 0.1
    code_noise: float = 0.03
    text_learning_rate_scale: float = 0.2
    short_share: float = 0.75
    short_tokens: int = 96
    caption_length: int = 24
    text_vocab_size: int = 2048
    sample_prompts: tuple[str, ...] = ("a red heart",)
    seed: int = 0


def train_text_tokenizer(captions: list[str], vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """A lower-casing byte-level BPE with T5's special tokens, learned from `captions`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(captions, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", model_max_length=max_length
    )


def draw_captions(captions: list[list[str]], index: torch.LongTensor, generator: torch.Generator) -> list[str]:
    """A caption for each of the images `index`: in half of the cases the primary one, else any of its variants."""
    chosen = []
    for i, variant, plain in zip(
        index.tolist(),
        torch.rand(len(index), generator=generator).tolist(),
        torch.rand(len(index), generator=generator).tolist(),
        strict=True,
    ):
        variants = captions[i]
        chosen.append(variants[0] if plain < 0.5 else variants[int(variant * len(variants))])
    return chosen


def new_text_encoder(tokenizer: PreTrainedTokenizerFast, config: dict) -> T5EncoderModel:
    """A `T5EncoderModel` with random weights for `tokenizer`, with the shape `config` (`T5Config(**config)`)."""
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    return T5EncoderModel(T5Config(vocab_size=len(tokenizer), **special, **config))


class TransformerTask(nn.Module):
    def __init__(
        self,
        transformer: LlamaGenTransformer,
        text_encoder: T5EncoderModel,
        text_tokenizer: PreTrainedTokenizerFast,
        vq: LlamaGenVQModel,
        data: ImageCaptions,
        heldout: ImageCaptions,
        settings: TransformerSettings,
    ):
        super().__init__()
        self.transformer, self.text_encoder = transformer, text_encoder
        self.text_tokenizer, self.data, self.heldout, self.settings = text_tokenizer, data, heldout, settings
        # In a list so that the frozen tokenizer is not among the trained modules.
        self._vq = [vq]
        self.codes, self.heldout_codes = self.encode(data), self.encode(heldout)
        clean = functools.partial(self.pipeline()._text_preprocessing, clean_caption=True)
        self.captions = [clean(variants) for variants in data.captions]
        self.heldout_captions = clean([variants[0] for variants in heldout.captions])

    @torch.no_grad()
    def encode(self, data: ImageCaptions) -> torch.LongTensor:
        vq = self._vq[0]
        batches = data.images.split(64)
        return torch.cat([vq.encode(to_unit_range(batch).to(vq.device)).flatten(1).cpu() for batch in batches])

    def logits(self, captions: list[str], codes: torch.LongTensor, unconditional: torch.BoolTensor) -> torch.Tensor:
        device = self.transformer.device
        length = self.settings.caption_length
        text = self.text_tokenizer(
            captions, padding="max_length", max_length=length, truncation=True, return_tensors="pt"
        ).to(device)
        hidden = self.text_encoder(text.input_ids, attention_mask=text.attention_mask).last_hidden_state
        embeds, mask = left_pad(hidden, text.attention_mask)
        return self.transformer.predict(
            codes, prompt_embeds=embeds, prompt_attention_mask=mask, unconditional=unconditional.to(device)
        )

    def loss(self, step: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        settings = self.settings
        generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + step)
        batch_size, length = settings.batch_size, self.codes.shape[1]
        if torch.rand((), generator=generator) < settings.short_share and settings.short_tokens < length:
            batch_size, length = batch_size * length // settings.short_tokens, settings.short_tokens
        index = self.data.draw(batch_size, generator)
        captions = draw_captions(self.captions, index, generator)
        unconditional = torch.rand(len(index), generator=generator) < settings.caption_dropout
        codes = self.codes[index, :length]
        noisy = torch.rand(codes.shape, generator=generator) < settings.code_noise
        random = torch.randint(self.transformer.config.vocab_size, codes.shape, generator=generator)
        device = self.transformer.device
        logits = self.logits(captions, torch.where(noisy, random, codes).to(device), unconditional)
        loss = F.cross_entropy(logits.flatten(0, 1), codes.to(device).flatten())
        return loss, {"loss": loss.detach()}

    def pipeline(self) -> LlamaGenPipeline:
        return LlamaGenPipeline(
            transformer=self.transformer, vq=self._vq[0], tokenizer=self.text_tokenizer, text_encoder=self.text_encoder
        )

    def report(self, step: int, out: Path) -> dict[str, float]:
        losses = []
        for index in torch.arange(len(self.heldout)).split(32):
            codes = self.heldout_codes[index].to(self.transformer.device)
            captions = [self.heldout_captions[i] for i in index.tolist()]
            logits = self.logits(captions, codes, torch.zeros(len(index), dtype=torch.bool))
            losses.append(F.cross_entropy(logits.flatten(0, 1), codes.flatten(), reduction="none"))
        pipe = self.pipeline()
        pipe.set_progress_bar_config(disable=True)
        images = pipe(
            list(self.settings.sample_prompts),
            guidance_scale=1.5,
            temperature=0.5,
            top_k=20,
            decoding="sjd-coupled",
            generator=torch.Generator().manual_seed(self.settings.seed),
            output_type="pt",
        ).images
        save_image(make_grid(images.cpu(), nrow=8), out / "samples.png")
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
    the codes that `vq` gives to `data`; returns the pipeline with the averaged weights, in float32.

    `out` keeps checkpoint, log, curve and samples; a second call continues an interrupted run.
    """
    torch.manual_seed(settings.seed)
    captions = [caption for variants in data.captions for caption in variants]
    text_tokenizer = train_text_tokenizer(captions, settings.text_vocab_size, settings.caption_length)
    text_encoder = new_text_encoder(text_tokenizer, text_config)
    transformer = LlamaGenTransformer(
        conditioning="text",
        caption_dim=text_encoder.config.d_model,
        num_condition_tokens=settings.caption_length,
        vocab_size=vq.config.codebook_size,
        grid_size=data.images.shape[-1] // vq.scale_factor,
        **model_config,
    )
    transformer.init_weights()
    dtype = training_dtype(torch.device(device))
    for model in (transformer, text_encoder):
        nn.Module.to(model, device, dtype)
    task = TransformerTask(transformer, text_encoder, text_tokenizer, vq.to(device), data, heldout, settings)
    hook = None if on_report is None else lambda: on_report(task.pipeline())
    scales = dict.fromkeys(("text_encoder.", "transformer.caption_projection."), settings.text_learning_rate_scale)
    fit(task, settings.optimizer, out, learning_rate_scales=scales, on_report=hook)
    for model in (transformer, text_encoder):
        model.float()
    return task.pipeline()
