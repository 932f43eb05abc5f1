"""Training of text-conditional VAR transformers on the tokens of a multi-scale tokenizer: a large one jointly with a
small T5 encoder, and a small one that refines what the large one begins."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field

from arimage.pipelines.var.pipeline_var import VARPipeline
from arimage.pipelines.var.transformer_var import VARTransformer
from arimage.settings.schema import Number, Whole
from arimage.tokenizers.vq_var import VARVQModel
from arimage.training.data.pictures import to_unit_range
from arimage.training.processes import batch_generator
from arimage.training.recipe import new_model
from arimage.training.resuming import digest

from ..beginning import Run
from ..captioned import ImageCaptions
from ..captions import CaptionSettings, CaptionTask
from ..tables import Recipe, settings_of


@dataclass(frozen=True)
class VARTransformerSettings(CaptionSettings):
    """How a VAR transformer is trained, besides `CaptionSettings`.

    `scale_shares[k]` of the steps train on the first k + 1 scales only, with as many more images as those and the
    caption are shorter: the first scales decide what a caption asks for. Default: all steps train on all scales. The
    losses of the scales from `first_scale` on are weighted by their numbers of tokens to the power `token_power`: with
    1 every token counts the same, with 0 every scale. With a teacher, `law_weight` weighs the divergence from its
    distribution.
    """

    text_learning_rate_scale: Number = 0.5
    scale_shares: tuple[Number, ...] | None = None
    first_scale: Whole = 0
    token_power: Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0, le=10)] = 0.5
    law_weight: Number = 1.0

    def __post_init__(self):
        super().__post_init__()
        if self.scale_shares is not None and not any(self.scale_shares[self.first_scale :]):
            raise ValueError(
                f"scale_shares is {list(self.scale_shares)}: give a number above 0 from scale {self.first_scale} on"
            )


def _check_scales(settings: VARTransformerSettings, count: int, name: str) -> None:
    """Refuse settings that do not fit a tokenizer of `count` scales."""
    if settings.first_scale >= count:
        raise ValueError(f"table [{name}.training]: first_scale is {settings.first_scale}: give less than {count}")
    for shares in (settings.scale_shares, *(stage.get("scale_shares") for stage in settings.stages)):
        if shares is not None and len(shares) != count:
            raise ValueError(
                f"table [{name}.training]: scale_shares has {len(shares)} numbers: give one per scale, {count} in all"
            )


class VARTransformerTask(CaptionTask):
    """Teaches the transformer of `pipe` the tokens that its `vq` gives to `data`, under the captions that its text
    encoder reads, which is trained too if its parameters require gradients."""

    transformer_class, pipeline_class, tokenizer_class = VARTransformer, VARPipeline, VARVQModel
    settings_class, slow = VARTransformerSettings, ("text_encoder.", "network.caption_projection.")

    @classmethod
    def settings_of(cls, recipe: Recipe, part: str = "transformer") -> VARTransformerSettings:
        """The settings of the table `part`. [transformer.training] gives those that it leaves out."""
        table, sampling = recipe.table(part), recipe.table("generation").sampling
        whole = table.model_copy(update={"training": recipe.table("transformer").training | table.training})
        return settings_of(VARTransformerSettings, whole, part, sampling=sampling)

    @classmethod
    def arguments(cls, recipe: Recipe, vq: VARVQModel, caption_dim: int, config: dict) -> dict[str, Any]:
        return _arguments(vq, caption_dim)

    @classmethod
    def trial(cls, recipe: Recipe, vq: VARVQModel) -> VARPipeline:
        for part in ("transformer", "refiner"):
            _check_scales(cls.settings_of(recipe, part), len(vq.config.scales), part)
        large = super().trial(recipe, vq).transformer
        # The pipeline gives both transformers the same embeddings.
        config = {"num_condition_tokens": large.config.num_condition_tokens}
        given = _arguments(vq, recipe.table("text_encoder").d_model)
        refiner = new_model(VARTransformer, config | recipe.table("refiner").model, "refiner.model", **given)
        return VARPipeline(large, vq, refiner=refiner)

    @classmethod
    def run(cls, run: Run) -> VARPipeline:
        """Train the transformer of a recipe, then its refiner."""
        pipe, config = super().run(run), run.recipe.table("refiner").model
        parts = (config, run.data, run.heldout, cls.settings_of(run.recipe, "refiner"), run.out / "refiner")
        return train_refiner(pipe, *parts, on_report=run.save, compile=run.beginning.compile)

    def __init__(
        self,
        pipe: VARPipeline,
        data: ImageCaptions,
        heldout: ImageCaptions,
        settings: VARTransformerSettings,
        teacher: VARTransformer | None = None,
    ):
        super().__init__(pipe, data, heldout, settings, "next-scale")
        self.network, self.text_encoder = pipe.transformer, pipe.text_encoder
        self.frozen.teacher = teacher
        self.sizes = [side * side for side in self.network.config.scales]
        self.codes, self.heldout_codes = self.encode(data), self.encode(heldout)

    @torch.no_grad()
    def encode(self, data: ImageCaptions) -> list[torch.LongTensor]:
        vq = self.frozen.pipe.vq
        batches = [vq.encode(to_unit_range(batch).to(vq.device)) for batch in data.images.split(64)]
        return [torch.cat(maps) for maps in zip(*batches, strict=True)]

    def losses(
        self, captions: list[str], codes: list[torch.LongTensor], unconditional: torch.BoolTensor, noise: list
    ) -> list[torch.Tensor]:
        """The mean loss per scale of `codes`, the first scales of all; `noise` are the tokens that the inputs are made
        from. In evaluation mode it is the cross-entropy, with or without a teacher."""
        vq, teacher = self.frozen.pipe.vq, self.frozen.teacher
        embeds, mask = self.embed(captions)
        condition = {
            "prompt_embeds": embeds,
            "prompt_attention_mask": mask,
            "unconditional": unconditional.to(self.network.device),
        }
        targets = torch.cat([one.flatten(1) for one in codes], dim=1)
        with torch.no_grad():
            inputs = vq.inputs(noise)[:, : targets.shape[1] - 1]
        logits = self.network.predict(inputs, **condition)
        losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        if teacher is not None and self.training:
            with torch.no_grad():
                target = teacher.predict(inputs, **condition).log_softmax(-1)
            divergences = F.kl_div(logits.log_softmax(-1), target, reduction="none", log_target=True).sum(-1)
            losses = losses + self.settings.law_weight * divergences
        return [one.mean() for one in losses.split(self.sizes[: len(codes)], dim=1)]

    def loss(self, step: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        settings, sizes = self.settings.at(step), self.sizes
        generator = batch_generator(settings.seed, step)
        shares = torch.tensor(settings.scale_shares or [0] * (len(sizes) - 1) + [1]).float()
        count = 1 + int(torch.multinomial(shares, 1, generator=generator))
        condition = self.network.config.num_condition_tokens
        whole, short = (condition + sum(some) for some in (sizes, sizes[:count]))
        index, captions, unconditional = self.batch(settings.batch_size * whole // short, generator)
        codes = [one[index.to(one.device)] for one in self.codes[:count]]
        noisy = [self.noisy(one, self.network.config.vocab_size, step, generator) for one in codes]
        losses = self.losses(captions, codes, unconditional, noisy)
        weights = torch.tensor(sizes[settings.first_scale : count]).float() ** settings.token_power
        trained = torch.stack(losses[settings.first_scale :])
        total = (trained * (weights / weights.sum()).to(trained.device)).sum()
        return total, {f"loss of scale {k}": value.detach() for k, value in enumerate(losses)}

    def report(self, step: int, out: Path) -> dict[str, float]:
        losses = []
        for index in torch.arange(len(self.heldout_captions)).split(32):
            codes = [one[index.to(one.device)] for one in self.heldout_codes]
            captions = [self.heldout_captions[i] for i in index.tolist()]
            losses.append(len(index) * torch.stack(self.losses(captions, codes, torch.zeros(len(index)) > 0, codes)))
        self.save_samples(out / "samples.png")
        by_scale = sum(losses) / len(self.heldout_captions)
        return {f"held-out loss of scale {k}": float(value) for k, value in enumerate(by_scale)}


def _arguments(vq: VARVQModel, caption_dim: int) -> dict:
    """The arguments of a transformer that follow from its image tokenizer and its text encoder."""
    return {
        "conditioning": "text",
        "caption_dim": caption_dim,
        "vocab_size": vq.config.codebook_size,
        "codebook_dim": vq.config.codebook_dim,
        "scales": vq.config.scales,
    }


def train_refiner(
    pipe: VARPipeline,
    model_config: dict,
    data: ImageCaptions,
    heldout: ImageCaptions,
    settings: VARTransformerSettings,
    out: str | Path,
    on_report: Callable[[VARPipeline], None] | None = None,
    *,
    compile: bool = False,
) -> VARPipeline:
    """Train a second, smaller `VARTransformer(**model_config)` that reads the text encoder of `pipe` and learns from
    its transformer as well as from the data; returns `pipe` with the averaged weights as its component `refiner`, in
    float32.

    `out` keeps checkpoint, log, curve and samples; a second call with the same settings and data resumes the run.
    """
    torch.manual_seed(settings.seed)
    for model in (pipe.transformer, pipe.text_encoder):
        model.requires_grad_(False)
    # The pipeline gives both transformers the same embeddings.
    length = pipe.transformer.config.num_condition_tokens
    given = _arguments(pipe.vq, pipe.text_encoder.config.d_model)
    refiner = VARTransformer(**given, **{"num_condition_tokens": length} | model_config)
    refiner.init_weights()
    refiner.to(pipe.device)
    if compile:
        refiner.compile_repeated_blocks()
    alone = VARPipeline(refiner, pipe.vq, pipe.tokenizer, pipe.text_encoder)
    task = VARTransformerTask(alone, data, heldout, settings, teacher=pipe.transformer)
    pipe.register_modules(refiner=refiner)
    hook = None if on_report is None else lambda: on_report(pipe)
    about = {"model": model_config, "text_encoder": digest(pipe.text_encoder), "teacher": digest(pipe.transformer)}
    task.fit(out, about, slow=("network.caption_projection.",), on_report=hook)
    return pipe
