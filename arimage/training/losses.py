"""The loss of a model on the tokens of images and videos, with the family's own teacher-forced predictions."""

import math
from collections import Counter
from collections.abc import Iterable
from typing import Protocol

import torch
import torch.nn.functional as F

from ..models.denoising_head import diffusion_tables
from ..models.language_model import LanguageTokenModel
from ..pipelines.arpg.pipeline_arpg import ARPGPipeline
from ..pipelines.base import ARPipeline
from ..pipelines.cosmos.pipeline_cosmos import CosmosPipeline
from ..pipelines.kinds.class_or_text import ClassOrTextPipeline
from ..pipelines.latent_llama.pipeline_latent_llama import LatentLlamaPipeline
from ..pipelines.latent_llama.transformer_latent_llama import velocity
from ..tokenizers.tiling import check_encoded
from .orders import Orders


RANDOM = Orders()


class Losses(Protocol):
    """Cross-entropy of the tokens of pictures under a model, differentiable."""

    def tokens(self, pixels: torch.Tensor) -> torch.LongTensor:
        """The tokens [B, N], or continuous ones [B, N, D], of pixels [B, 3, H, W], or [B, 3, T, H, W], in [-1, 1]."""
        ...

    def __call__(
        self,
        captions: list[str],
        tokens: torch.LongTensor,
        unconditional: torch.BoolTensor,
        count: int,
        generator: torch.Generator,
    ) -> torch.Tensor:
        """Losses [B, K] of `tokens` [B, N]: of the first `count` ones where the order of generation is fixed, else of
        all, and of first places. The images `unconditional` [B] have no condition."""
        ...


def condition_of(pipe: ARPipeline, captions: list[str]) -> dict:
    """The argument of a call with these captions, which name classes where the model generates classes."""
    if pipe.num_classes is None:
        return {"prompt": captions}
    return {"class_labels": [int(text) if text.isdecimal() else text for text in captions]}


def with_ids(pipe: ARPipeline, texts: Iterable[str]) -> list[str]:
    """Texts for `condition_of`: the name of a class of the model, which may be a number or a list of synonyms, becomes
    its id in digits."""
    names = pipe.class_names or []
    count = Counter(names)
    ids = {name: str(number) for number, name in enumerate(names) if count[name] == 1}
    return [ids.get(text, text) for text in texts]


def with_names(pipe: ARPipeline, texts: Iterable[str]) -> list[str]:
    """Texts for users: the id of a class becomes its name, if it has one."""
    named = {str(number): name for number, name in enumerate(pipe.class_names or ())}
    return [named.get(text, text) for text in texts]


def reads_text(pipe: ARPipeline) -> bool:
    """Whether the model of a pipeline without classes reads captions, and does not only continue videos."""
    return not isinstance(pipe, CosmosPipeline) or pipe.transformer.reads_text


class PrefixLosses:
    """Of transformers that read a class or a text as a prefix: in raster order, or in an order of its own per image.

    Args:
        orders: those of an any-order model.
        trains_text: whether the text encoder learns too.
    """

    def __init__(self, pipe: ClassOrTextPipeline, orders: Orders = RANDOM, trains_text: bool = False):
        self.pipe, self.any_order = pipe, pipe.abilities.accepts("order")
        self.orders, self.trains_text = orders, trains_text

    def tokens(self, pixels: torch.Tensor) -> torch.LongTensor:
        return self.pipe.encode_image(pixels).flatten(1)

    def _encode(self, captions: list[str]) -> dict[str, torch.Tensor]:
        return self.pipe.encode_prefix(*self._condition(captions))

    def _condition(self, captions: list[str]) -> tuple:
        """The arguments of `encode_condition`."""
        given = condition_of(self.pipe, captions)
        if "prompt" not in given:
            return None, given["class_labels"], None, None
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.trains_text):
            return None, None, *self.pipe.embed_prompt(given["prompt"])

    def conditions(self, captions: list[str]) -> dict[str, torch.Tensor]:
        """The conditions of the captions of a batch, each encoded once, in one call. They depend on nothing but the
        batch: kept ones would be rounded as in the batch that had them first, and a resumed run has another one."""
        places = {text: place for place, text in enumerate(dict.fromkeys(captions))}
        index = [places[text] for text in captions]
        return {name: value[index] for name, value in self._encode(list(places)).items()}

    def __call__(self, captions, tokens, unconditional, count, generator):
        condition = self.conditions(captions) | {"unconditional": unconditional.to(tokens.device)}
        if not self.any_order:
            tokens = tokens[:, :count]
            logits = self.pipe.transformer.predict(tokens, **condition)
        else:
            order = self.orders.sample(len(tokens), self.pipe.transformer.config.grid_size, generator)
            condition["order"] = order = order.to(tokens.device)
            if self.orders.first_places:
                first = torch.randint(tokens.shape[1], (len(tokens), self.orders.first_places), generator=generator)
                condition["first_places"] = first.to(tokens.device)
                order = torch.cat([order, condition["first_places"]], dim=1)
            logits = self.pipe.transformer.predict(tokens, **condition)
            tokens = tokens.gather(1, order)
        return F.cross_entropy(logits.transpose(1, 2), tokens, reduction="none")


class MaskedLosses(PrefixLosses):
    """Of models that decide masked places: one forward pass with some of the places of each image masked.

    Args:
        trains_text: see `PrefixLosses`.
        judges: whether a model is judged, not trained. In training, the share of masked places is 2 / pi arccos(u) for
            a uniform u, and the losses are those of all places, as Halton-MaskGIT is trained
            (https://arxiv.org/abs/2503.17076): at first a model learns faster from all than from masked ones alone.
            To judge it, every number of masked places is as likely, and an image has the mean of its own: N times that
            is, in expectation, the negative log-likelihood of an image whose places are decided one after the other,
            in random order (https://arxiv.org/abs/2110.02037).
    """

    def __init__(self, pipe: ClassOrTextPipeline, trains_text: bool = False, judges: bool = False):
        super().__init__(pipe, trains_text=trains_text)
        self.judges = judges

    def _encode(self, captions: list[str]) -> dict[str, torch.Tensor]:
        return self.pipe.encode_condition(*self._condition(captions))

    def __call__(self, captions, tokens, unconditional, count, generator):
        condition = self.conditions(captions) | {"unconditional": unconditional.to(tokens.device)}
        masked = self.masked(tokens, generator).to(tokens.device)
        network = self.pipe.transformer
        logits = network(tokens.masked_fill(masked, network.config.vocab_size), **condition)
        losses = F.cross_entropy(logits.float().transpose(1, 2), tokens, reduction="none")
        return losses * masked / masked.float().mean(1, keepdim=True) if self.judges else losses

    def masked(self, tokens: torch.LongTensor, generator: torch.Generator) -> torch.Tensor:
        """Which places of `tokens` [B, N] are masked, bool, at least one of each image."""
        images, places = tokens.shape
        if self.judges:
            # At equal distances, which has less variance.
            shares = (torch.arange(images) + torch.rand((), generator=generator)) / images
        else:
            shares = torch.rand(images, generator=generator).acos() * 2 / math.pi
        ranks = torch.rand(images, places, generator=generator).argsort(1).argsort(1)
        return ranks < (shares * places).ceil().clamp(min=1)[:, None]


class ScaleLosses(PrefixLosses):
    """Of VAR: all scales in one forward pass."""

    def tokens(self, pixels: torch.Tensor) -> torch.LongTensor:
        return torch.cat([part.flatten(1) for part in self.pipe.encode_image(pixels)], dim=1)

    def _encode(self, captions: list[str]) -> dict[str, torch.Tensor]:
        return self.pipe.encode_condition(*self._condition(captions))

    def __call__(self, captions, tokens, unconditional, count, generator):
        sides = self.pipe.transformer.config.scales
        parts = zip(tokens.split([side**2 for side in sides], 1), sides, strict=True)
        maps = [part.unflatten(1, (side, side)) for part, side in parts]
        with torch.no_grad():
            inputs = self.pipe.vq.inputs(maps)
        condition = self.conditions(captions) | {"unconditional": unconditional.to(tokens.device)}
        logits = self.pipe.transformer.predict(inputs, **condition)
        return F.cross_entropy(logits.transpose(1, 2), tokens, reduction="none")


class LatentLosses(PrefixLosses):
    """Of continuous tokens in raster order: the squared errors of the velocity that the denoising head predicts, each
    at a random step of the diffusion."""

    pipe: LatentLlamaPipeline

    def __init__(self, pipe: LatentLlamaPipeline, *, trains_text: bool = False):
        super().__init__(pipe, trains_text=trains_text)
        self._kept = torch.tensor(diffusion_tables(pipe.transformer.config.num_train_timesteps).alphas_cumprod)

    def tokens(self, pixels: torch.Tensor) -> torch.FloatTensor:
        return self.pipe.to_tokens(check_encoded(self.pipe.vq.encode_latents(pixels)))

    def __call__(self, captions, tokens, unconditional, count, generator):
        condition = self.conditions(captions) | {"unconditional": unconditional.to(tokens.device)}
        conditions = self.pipe.transformer.predict(tokens, **condition)
        timesteps = torch.randint(len(self._kept), tokens.shape[:2], generator=generator)
        noise = torch.randn(tokens.shape, generator=generator).to(tokens)
        noisy, expected = velocity(tokens, noise, self._kept[timesteps].to(tokens)[..., None])
        predicted = self.pipe.transformer.denoising_head(noisy, timesteps.to(tokens.device), conditions)
        return F.mse_loss(predicted, expected, reduction="none").mean(-1)


class VideoLosses(PrefixLosses):
    """Of Cosmos: all maps of a video in one forward pass, without the first block of a model that reads no text.
    Without a condition the text embeddings are zeros, as when it generates."""

    pipe: CosmosPipeline

    def tokens(self, pixels: torch.Tensor) -> torch.LongTensor:
        return self.pipe.vq.encode(pixels.to(self.pipe.vq.dtype)).flatten(1)

    def _encode(self, captions: list[str]) -> dict[str, torch.Tensor]:
        return {"prompt_embeds": self.pipe.embed_text(captions)}

    def __call__(self, captions, tokens, unconditional, count, generator):
        transformer, embeds = self.pipe.transformer, None
        if transformer.reads_text:
            embeds = self.conditions(captions)["prompt_embeds"]
            embeds = embeds.masked_fill(unconditional.to(embeds.device)[:, None, None], 0)
        logits = transformer.predict(tokens.unflatten(1, transformer.config.shape), embeds)
        return F.cross_entropy(logits.transpose(1, 2), tokens[:, -logits.shape[1] :], reduction="none")


class LanguageLosses:
    """Of language models: prompt and image in one forward pass. Without a condition the prompt is the family's own
    unconditional one."""

    def __init__(self, pipe: ARPipeline):
        self.pipe = pipe

    def tokens(self, pixels: torch.Tensor) -> torch.LongTensor:
        return self.pipe.encode_image(pixels).flatten(1)

    def __call__(self, captions, tokens, unconditional, count, generator):
        model = self.pipe.prepare(**condition_of(self.pipe, captions), guidance_scale=2.0).model
        return F.cross_entropy(model.predict(tokens, unconditional).transpose(1, 2), tokens, reduction="none")


def losses_of(
    pipe: ARPipeline, caption: str, *, orders: Orders = RANDOM, trains_text: bool = False, judges: bool = False
) -> Losses:
    """The losses of the family of a pipeline.

    Args:
        caption: that of one of the pictures.
        orders, trains_text: those of `PrefixLosses`.
        judges: see `MaskedLosses`.
    """
    kind, videos = pipe.abilities.kind, pipe.abilities.generates_video
    if orders != RANDOM and not pipe.abilities.accepts("order"):
        raise ValueError(
            f"raster_share, farthest_share or first_places is given, and a {type(pipe).__name__} has one order: leave "
            "it out"
        )
    if orders.first_places and not isinstance(pipe, ARPGPipeline):
        raise ValueError(f"first_places is given, and a {type(pipe).__name__} predicts none: leave it out")
    if isinstance(pipe, LatentLlamaPipeline):
        return LatentLosses(pipe, trains_text=trains_text)
    if isinstance(pipe, CosmosPipeline):
        pipe.check_text(caption if reads_text(pipe) else None, None)
        return VideoLosses(pipe)
    if kind == "scales" and isinstance(pipe, ClassOrTextPipeline):
        return ScaleLosses(pipe, trains_text=trains_text)
    if kind == "masked_tokens" and isinstance(pipe, ClassOrTextPipeline):
        return MaskedLosses(pipe, trains_text, judges)
    if kind == "tokens" and isinstance(pipe, ClassOrTextPipeline):
        return PrefixLosses(pipe, orders, trains_text)
    if kind == "tokens" and not videos and len(pipe._lora_loadable_modules) == 1:
        with torch.no_grad():
            model = pipe.prepare(**condition_of(pipe, [caption])).model
        if isinstance(model, LanguageTokenModel) and model.trainable:
            return LanguageLosses(pipe)
    raise ValueError(
        f"a {type(pipe).__name__} cannot be trained here: choose a model of one of the families that "
        "docs/training_reference.md lists"
    )
