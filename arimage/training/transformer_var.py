"""Training of text-conditional VAR transformers on the codes of a multi-scale tokenizer: the large one jointly with a small
T5 encoder, and a small one beside it that refines what the large one begins."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torchvision.utils import make_grid, save_image

from ..decoding import Decoding
from ..models.transformer_var import VARTransformer
from ..pipelines.pipeline_var import VARPipeline
from ..tokenizers.vq_var import VARVQModel
from .data import ImageCaptions, to_unit_range
from .loop import OptimizerSettings, fit, training_dtype
from .transformer import draw_captions, new_text_encoder, train_text_tokenizer


@dataclass(frozen=True)
class VARTransformerSettings:
    """How a transformer is trained.

    `scale_shares[k]` of the steps train on the first k + 1 scales only, by default all on all of them, with as many more
    images as those and the caption are shorter: what a caption asks for is decided in the first scales. The losses of the
    scales from `first_scale` on are weighed by their numbers of tokens to the power `token_power`: by 1 every token counts the
    same, by 0 every scale. Beside a teacher, `law_weight` weighs the divergence from its law.

    Captions are drawn as for LlamaGen; `caption_dropout` of them are replaced by "no caption", `code_noise` of the codes that
    the inputs are made from by random ones. The text encoder and the caption projection learn at `text_learning_rate_scale`
    times the rate. `sample_prompts` are drawn at every report.
    """

    optimizer: OptimizerSettings
    batch_size: int = 32
    scale_shares: tuple[float, ...] | None = None
    first_scale: int = 0
    token_power: float = 0.5
    law_weight: float = 1.0
    caption_dropout: float = 0.1
    code_noise: float = 0.03
    text_learning_rate_scale: float = 0.5
    caption_length: int = 24
    text_vocab_size: int = 2048
    sample_prompts: tuple[str, ...] = ("a red heart",)
    seed: int = 0


class VARTransformerTask(nn.Module):
    """Teaches `network` what `data` shows: the codes of `pipe.vq` under the captions that `pipe.text_encoder` reads, which
    learns along if its parameters ask for it. `pipe` draws the samples of the reports by `decoding`."""

    def __init__(
        self,
        network: VARTransformer,
        pipe: VARPipeline,
        data: ImageCaptions,
        heldout: ImageCaptions,
        settings: VARTransformerSettings,
        teacher: VARTransformer | None = None,
        decoding: Decoding | str = "next-scale",
    ):
        super().__init__()
        self.network, self.text_encoder = network, pipe.text_encoder
        self.data, self.settings, self.decoding = data, settings, decoding
        # In a list so that what is frozen is not among the trained modules.
        self._frozen = [pipe, teacher]
        self.sizes = [side * side for side in network.config.scales]
        self.codes, self.heldout_codes = self.encode(data), self.encode(heldout)
        clean = functools.partial(pipe._text_preprocessing, clean_caption=True)
        self.captions = [clean(variants) for variants in data.captions]
        self.heldout_captions = clean([variants[0] for variants in heldout.captions])

    @torch.no_grad()
    def encode(self, data: ImageCaptions) -> list[torch.LongTensor]:
        vq = self._frozen[0].vq
        batches = [vq.encode(to_unit_range(batch).to(vq.device)) for batch in data.images.split(64)]
        return [torch.cat(maps) for maps in zip(*batches, strict=True)]

    def losses(
        self, captions: list[str], codes: list[torch.LongTensor], unconditional: torch.BoolTensor, noise: list
    ) -> list[torch.Tensor]:
        """The mean loss of every scale of `codes`, the first ones of all; `noise` are the codes that the inputs are made
        from. In evaluation mode it is the cross-entropy, with or without a teacher."""
        (pipe, teacher), settings = self._frozen, self.settings
        device = self.network.device
        text = pipe.tokenizer(
            captions,
            padding="max_length",
            max_length=self.network.config.num_condition_tokens,
            truncation=True,
            return_tensors="pt",
        ).to(device)
        condition = {
            "prompt_embeds": self.text_encoder(text.input_ids, attention_mask=text.attention_mask).last_hidden_state,
            "prompt_attention_mask": text.attention_mask,
            "unconditional": unconditional.to(device),
        }
        targets = torch.cat([one.flatten(1) for one in codes], dim=1)
        with torch.no_grad():
            inputs = pipe.vq.inputs(noise)[:, : targets.shape[1] - 1]
        logits = self.network.predict(inputs, **condition)
        losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        if teacher is not None and self.training:
            with torch.no_grad():
                law = teacher.predict(inputs, **condition).log_softmax(-1)
            divergences = F.kl_div(logits.log_softmax(-1), law, reduction="none", log_target=True).sum(-1)
            losses = losses + settings.law_weight * divergences
        return [one.mean() for one in losses.split(self.sizes[: len(codes)], dim=1)]

    def loss(self, step: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        settings, sizes = self.settings, self.sizes
        generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + step)
        shares = torch.tensor(settings.scale_shares or [0] * (len(sizes) - 1) + [1]).float()
        count = 1 + int(torch.multinomial(shares, 1, generator=generator))
        whole, short = (settings.caption_length + sum(some) for some in (sizes, sizes[:count]))
        index = self.data.draw(settings.batch_size * whole // short, generator)
        captions = draw_captions(self.captions, index, generator)
        unconditional = torch.rand(len(index), generator=generator) < settings.caption_dropout
        codes = [one[index.to(one.device)] for one in self.codes[:count]]
        noisy = []
        for one in codes:
            chosen = torch.rand(one.shape, generator=generator) < settings.code_noise
            random = torch.randint(self.network.config.vocab_size, one.shape, generator=generator)
            noisy.append(torch.where(chosen.to(one.device), random.to(one.device), one))
        losses = self.losses(captions, codes, unconditional, noisy)
        weights = torch.tensor(sizes[settings.first_scale : count]).float() ** settings.token_power
        trained = torch.stack(losses[settings.first_scale :])
        total = (trained * (weights / weights.sum()).to(trained.device)).sum()
        return total, {f"loss of scale {k}": value.detach() for k, value in enumerate(losses)}

    def report(self, step: int, out: Path) -> dict[str, float]:
        settings = self.settings
        losses = []
        for index in torch.arange(len(self.heldout_captions)).split(32):
            codes = [one[index.to(one.device)] for one in self.heldout_codes]
            captions = [self.heldout_captions[i] for i in index.tolist()]
            losses.append(len(index) * torch.stack(self.losses(captions, codes, torch.zeros(len(index)) > 0, codes)))
        pipe = self._frozen[0]
        pipe.set_progress_bar_config(disable=True)
        images = pipe(
            list(settings.sample_prompts),
            guidance_scale=1.5,
            temperature=0.5,
            top_k=20,
            decoding=self.decoding,
            generator=torch.Generator().manual_seed(settings.seed),
            output_type="pt",
        ).images
        save_image(make_grid(images.cpu(), nrow=8), out / "samples.png")
        by_scale = sum(losses) / len(self.heldout_captions)
        return {f"held-out loss of scale {k}": float(value) for k, value in enumerate(by_scale)}


def new_transformer(
    vq: VARVQModel, settings: VARTransformerSettings, text_config: dict, config: dict
) -> VARTransformer:
    """A text-conditional `VARTransformer(**config)` with fresh weights for the codes of `vq`."""
    transformer = VARTransformer(
        conditioning="text",
        caption_dim=text_config["d_model"],
        num_condition_tokens=settings.caption_length,
        vocab_size=vq.config.codebook_size,
        codebook_dim=vq.config.codebook_dim,
        scales=vq.config.scales,
        **config,
    )
    transformer.init_weights()
    return transformer


def train_var_transformer(
    model_config: dict,
    text_config: dict,
    vq: VARVQModel,
    data: ImageCaptions,
    heldout: ImageCaptions,
    settings: VARTransformerSettings,
    out: str | Path,
    device: str = "cpu",
    on_report: Callable[[VARPipeline], None] | None = None,
) -> VARPipeline:
    """Train a text-conditional `VARTransformer(**model_config)` and a `T5EncoderModel` (`T5Config(**text_config)`) on the
    codes that `vq` gives to `data`; returns the pipeline with the averaged weights, in float32.

    `out` keeps checkpoint, log, curve and samples; a second call continues an interrupted run.
    """
    torch.manual_seed(settings.seed)
    captions = [caption for variants in data.captions for caption in variants]
    tokenizer = train_text_tokenizer(captions, settings.text_vocab_size, settings.caption_length)
    text_encoder = new_text_encoder(tokenizer, text_config)
    transformer = new_transformer(vq, settings, text_config, model_config)
    dtype = training_dtype(torch.device(device))
    for model in (transformer, text_encoder):
        nn.Module.to(model, device, dtype)
    pipe = VARPipeline(transformer, vq.to(device), tokenizer, text_encoder)
    task = VARTransformerTask(transformer, pipe, data, heldout, settings)
    scales = dict.fromkeys(("text_encoder.", "network.caption_projection."), settings.text_learning_rate_scale)
    hook = None if on_report is None else lambda: on_report(pipe)
    fit(task, settings.optimizer, out, learning_rate_scales=scales, on_report=hook)
    for model in (transformer, text_encoder):
        model.float()
    return pipe


def train_refiner(
    pipe: VARPipeline,
    model_config: dict,
    data: ImageCaptions,
    heldout: ImageCaptions,
    settings: VARTransformerSettings,
    out: str | Path,
    on_report: Callable[[VARPipeline], None] | None = None,
) -> VARPipeline:
    """Train a second, smaller `VARTransformer(**model_config)` that reads the text encoder of `pipe` and learns from its
    transformer as well as from the data; returns `pipe` with the averaged weights as its component `refiner`, in float32.

    `out` keeps checkpoint, log, curve and samples; a second call continues an interrupted run.
    """
    torch.manual_seed(settings.seed)
    for model in (pipe.transformer, pipe.text_encoder):
        model.requires_grad_(False)
    refiner = new_transformer(pipe.vq, settings, pipe.text_encoder.config.to_dict(), model_config).to(pipe.device)
    alone = VARPipeline(refiner, pipe.vq, pipe.tokenizer, pipe.text_encoder)
    task = VARTransformerTask(refiner, alone, data, heldout, settings, teacher=pipe.transformer)
    pipe.register_modules(refiner=refiner)
    scales = {"network.caption_projection.": settings.text_learning_rate_scale}
    hook = None if on_report is None else lambda: on_report(pipe)
    fit(task, settings.optimizer, out, learning_rate_scales=scales, on_report=hook)
    return pipe
