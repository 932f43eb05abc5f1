"""`arimage train lora`: a LoRA adapter for a finished model, learned from pictures with captions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from diffusers import ModelMixin
from diffusers.loaders.lora_base import LORA_WEIGHT_NAME_SAFE
from pydantic import Field
from torch import nn

from ...eval.bench.measure import choose_decodings
from ...eval.runs.files import remove_all_leftovers, write_whole
from ...pipelines.adapters.lora import check_peft
from ...pipelines.base import ARPipeline
from ...settings.schema import Batch, Count, Positive, Rate, Seed, Share, Steps, Width, checked
from ..cards import SHEET, Samples, write_adapter_card
from ..data.pictures import save_grid, to_unit_range
from ..loop import OptimizerSettings, begin, fit
from ..losses import condition_of, losses_of, with_ids, with_names
from ..processes import batch_generator
from ..resuming import of_data, of_pipeline, of_settings
from .generated import Generated
from .pairs import Pairs


ADAPTER = "trained"
ATTENTION = {"q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "out_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}
# What language models have besides the decoder of the image tokens.
ELSEWHERE = ("vision", "visual", "vqmodel", "aligner")
# Pictures per call of the image tokenizer, and on a sheet.
CHUNK, SHOWN = 32, 8
# The tokens of a short step, see `LoraSettings`.
SHORT = 96
# A share of something that must not be all of it.
Part = Annotated[Share, Field(lt=1)]
# How many dB below that of the model's own pictures a reconstruction is poor.
POOR = 4.0
# From how many dB on pictures are reproduced as these words say. The paper of LlamaGen has 20.8 dB on photos, for its
# tokenizer of 16 x 16 pixels per token.
LOOKS = {27.0: "closely", 20.0: "without their small details", -math.inf: "roughly"}


@dataclass(frozen=True)
class LoraSettings:
    """How an adapter is trained.

    Attributes:
        alpha: the adapter is scaled by alpha / rank.
        targets: "attention", or "all" linear layers of the decoder.
        caption_dropout: the share of pictures that are learned without their caption.
        prior_share: the share of each batch that comes from the prior pictures, if there are any.
        short_share: the share of steps on the first 96 tokens only, with as many more pictures, in raster order: there
            the caption decides most.
    """

    rank: Width = 16
    alpha: Positive = 16.0
    targets: Literal["attention", "all"] = "attention"
    steps: Steps = 500
    learning_rate: Rate = 1e-4
    batch_size: Batch = 8
    caption_dropout: Part = 0.1
    prior_share: Part = 0.5
    short_share: Part = 0.5
    seed: Seed = 0
    accumulate: Count = 1
    max_grad_norm: Positive = 1.0

    @property
    def optimizer(self) -> OptimizerSettings:
        # Averages over the last fifty steps.
        return OptimizerSettings(
            steps=self.steps,
            learning_rate=self.learning_rate,
            weight_decay=0.0,
            warmup_steps=20,
            accumulate=self.accumulate,
            gradient_clip=self.max_grad_norm,
            ema_decay=0.98,
        )


# Python code makes these settings too, not only the command.
LoraSettings.__init__ = checked(LoraSettings.__init__)


def target_names(component: nn.Module, targets: str) -> list[str]:
    """The names of the layers that an adapter changes."""
    every = [name for name, module in component.named_modules() if isinstance(module, nn.Linear)]
    own = isinstance(component, ModelMixin)
    if own and targets == "all":
        return every
    ends = ATTENTION if targets == "attention" else ATTENTION | MLP
    chosen = [name for name in every if name.rpartition(".")[2] in ends]
    return chosen if own else [name for name in chosen if not any(part in name for part in ELSEWHERE)]


def add_adapter(component: nn.Module, rank: int, alpha: float, targets: str) -> None:
    """Add an adapter with random weights to a component; only its weights require gradients."""
    check_peft()
    from peft import LoraConfig, inject_adapter_in_model

    names = target_names(component, targets)
    widest = max(min(component.get_submodule(name).weight.shape) for name in names)
    if rank > widest:
        raise ValueError(f"rank is {rank}: give at most {widest}, the width of the widest layer")
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=alpha, target_modules=names), component, ADAPTER)
    component._hf_peft_config_loaded = True
    component.eval()


def save_adapter(
    pipe: ARPipeline,
    folder: Path,
    *,
    base: str,
    captions: Sequence[str],
    data: str | None = None,
    samples: Samples | None = None,
) -> None:
    """Write the adapter of a pipeline's component into a folder, with the model and the captions that it was trained
    on, and a model card with `data` and `samples`."""
    from peft import get_peft_model_state_dict

    (key,) = pipe._lora_loadable_modules
    component = pipe.components[key]
    parts = {
        f"{key}_lora_layers": get_peft_model_state_dict(component, adapter_name=ADAPTER, save_embedding_layers=False),
        f"{key}_lora_adapter_metadata": component.peft_config[ADAPTER].to_dict(),
    }
    path = folder / LORA_WEIGHT_NAME_SAFE
    folder.mkdir(parents=True, exist_ok=True)
    remove_all_leftovers(folder)
    write_whole(
        path,
        lambda file: type(pipe).save_lora_weights(
            folder, weight_name=file.name, **parts, base=base, captions=captions
        ),
    )
    write_adapter_card(pipe, folder, base, next(iter(captions), None), data, samples)


def split_pictures(data: Pairs, seed: int) -> tuple[Pairs, Pairs]:
    """The captions of a tenth of the pictures, which are held out, and all others. A picture that has several captions
    is on one side."""
    rows: dict[bytes, list[int]] = {}
    for number, picture in enumerate(data.pictures()):
        rows.setdefault(picture, []).append(number)
    if len(rows) < 2:
        raise ValueError(f"there are {len(rows)} different pictures: give at least 2, since a tenth is held out")
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    chosen, count = list(rows.values()), max(1, len(rows) // 10)
    parts = ([row for number in part for row in chosen[number]] for part in (order[:count], order[count:]))
    heldout, trained = map(data.take, parts)
    return heldout, trained


class LoraTask(nn.Module):
    """Teaches an adapter of a pipeline the tokens of pictures. Only its weights are trained and kept."""

    def __init__(
        self,
        pipe: ARPipeline,
        data: Pairs,
        settings: LoraSettings,
        *,
        base: str,
        name: str | None = None,
        prior: Pairs | Generated | None = None,
        prompts: Sequence[str] = (),
        decoding: str | None = None,
    ):
        super().__init__()
        check_peft()
        data = replace(data, captions=with_ids(pipe, data.captions))
        prior = prior and replace(prior, captions=with_ids(pipe, prior.captions))
        prompts = with_ids(pipe, prompts)
        if pipe.num_classes is not None:
            # A step or a report is too late to learn that a caption is not a class.
            every = [*data.captions, *(prior.captions if prior else ()), *prompts]
            pipe.prepare(**condition_of(pipe, list(dict.fromkeys(every))))
        heldout, trained = split_pictures(data, settings.seed)
        self.settings, self.frozen = settings, SimpleNamespace(pipe=pipe, base=base, decoding=decoding, name=name)
        if decoding is not None:
            # A report is too late to learn that it does not run.
            choose_decodings(pipe, condition_of(pipe, data.captions[:1]), [decoding], {})
        losses = losses_of(pipe, data.captions[0])
        self.frozen.losses = losses
        (self.key,) = pipe._lora_loadable_modules
        self.component = SimpleNamespace(it=pipe.components[self.key])
        # More steps train a run further.
        # What the optimizer has is compared with it.
        about = {**of_settings(settings, "steps", "accumulate", "max_grad_norm"), **of_pipeline(pipe)}
        torch.manual_seed(settings.seed)
        add_adapter(self.component.it, settings.rank, settings.alpha, settings.targets)
        self.weights = nn.ParameterList([one for one in self.component.it.parameters() if one.requires_grad])
        # The lowest held-out loss so far, and its step: buffers are part of a checkpoint.
        self.register_buffer("best", torch.tensor([torch.inf, 0.0]))

        if isinstance(prior, Pairs):
            held = set(heldout.pictures())
            prior = prior.take([i for i, picture in enumerate(prior.pictures()) if picture not in held])
            if not len(prior):
                raise ValueError("all prior pictures are among those that are held out: give others, or more of them")
        self.heldout, self.data, self.prior = heldout, trained, prior
        self.tokens, self.heldout_tokens = self.encode(self.data), self.encode(self.heldout)
        self.old = None
        if prior is not None:
            self.old = prior.captions, self.encode(prior) if isinstance(prior, Pairs) else prior.tokens
        priors = [] if prior is None else prior.captions
        shown = [*self.data.captions[:SHOWN], *self.heldout.captions[:SHOWN], *priors[:SHOWN]]
        self.prompts = prompts or shown
        self.about = {
            **about,
            "data": of_data(self.data),
            "heldout": of_data(self.heldout),
            "prior": None if prior is None else of_data(prior),
        }

    @torch.no_grad()
    def encode(self, data: Pairs) -> torch.LongTensor:
        device = self.frozen.pipe._execution_device
        chunks = torch.arange(len(data)).split(CHUNK)
        return torch.cat([self.frozen.losses.tokens(data.pixels(part.tolist()).to(device)).cpu() for part in chunks])

    @torch.no_grad()
    def reconstructions(self, data: Pairs, tokens: torch.LongTensor, count: int = CHUNK) -> torch.Tensor:
        """What the image tokenizer makes of the first pictures of `data`: pixels [M, 3, H, W] in [0, 1]."""
        pipe, texts = self.frozen.pipe, data.captions[:count]
        raster = {"order": "raster"} if pipe.abilities.accepts("order") else {}
        call = pipe.prepare(**condition_of(pipe, texts), **raster, guidance_scale=1.0)
        return (pipe.decode_tokens(call, tokens[: len(texts)].to(pipe._execution_device)).float().cpu() + 1) / 2

    def report_reconstructions(self, out: Path) -> tuple[float, float | None]:
        """The mean PSNR in dB of reconstructed pictures, and of prior ones if some were given. Saves the pictures
        above their reconstructions: an adapter does not learn what the tokenizer cannot reproduce."""
        shown = [("pictures", self.data, self.tokens)]
        if isinstance(self.prior, Pairs) and self.old is not None:
            shown.append(("prior", self.prior, self.old[1]))
        found = []
        for name, data, tokens in shown:
            given = (to_unit_range(data.images[:CHUNK]) + 1) / 2
            decoded = self.reconstructions(data, tokens).clamp(0, 1)
            found.append(float((-10 * (decoded - given).square().mean((1, 2, 3)).log10()).mean()))
            sheet = torch.cat([given[:SHOWN], decoded[:SHOWN]])
            save_grid(sheet, out / f"reconstructions-{name}.png", columns=min(SHOWN, len(given)))
        return found[0], found[1] if len(found) > 1 else None

    def loss(self, step: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        settings, generator = self.settings, batch_generator(self.settings.seed, step)
        size, count = settings.batch_size, self.tokens.shape[1]
        fixed = not self.frozen.pipe.abilities.accepts("order") and self.frozen.pipe.abilities.kind == "tokens"
        if fixed and count > SHORT and torch.rand((), generator=generator) < settings.short_share:
            size, count = size * count // SHORT, SHORT
        old = torch.rand(size, generator=generator) < (settings.prior_share if self.old is not None else 0)
        captions, tokens = [], []
        for is_old in old.tolist():
            texts, every = self.old if is_old and self.old is not None else (self.data.captions, self.tokens)
            index = int(torch.randint(len(every), (), generator=generator))
            captions.append(texts[index])
            tokens.append(every[index])
        dropped = torch.rand(size, generator=generator) < settings.caption_dropout
        device = self.frozen.pipe._execution_device
        losses = self.frozen.losses(captions, torch.stack(tokens).to(device), dropped, count, generator).mean(1)
        figures = {"loss": losses.mean().detach()}
        if old.any() and not old.all():
            figures["new loss"], figures["prior loss"] = losses[~old].mean().detach(), losses[old].mean().detach()
        return losses.mean(), figures

    def report(self, step: int, out: Path) -> dict[str, float]:
        total = []
        for part in torch.arange(len(self.heldout)).split(self.settings.batch_size):
            captions = [self.heldout.captions[i] for i in part.tolist()]
            tokens = self.heldout_tokens[part].to(self.frozen.pipe._execution_device)
            generator = torch.Generator().manual_seed(self.settings.seed)
            kept = torch.zeros(len(part), dtype=torch.bool)
            total.append(self.frozen.losses(captions, tokens, kept, tokens.shape[1], generator).mean(1))
        loss = float(torch.cat(total).mean())
        self.save_sheet(out / SHEET)
        self.save(out / "last")
        if loss < self.best[0]:
            self.best.copy_(torch.tensor([loss, step]))
            self.save(out / "best")
        return {"held-out loss": loss}

    def save(self, folder: Path) -> None:
        frozen, pipe = self.frozen, self.frozen.pipe
        known = with_names(pipe, dict.fromkeys([*self.data.captions, *self.heldout.captions]))
        samples = Samples(folder.with_name(SHEET), with_names(pipe, self.prompts))
        save_adapter(pipe, folder, base=frozen.base, captions=known, data=frozen.name, samples=samples)

    def save_sheet(self, path: Path) -> None:
        """One column per prompt: the base, the adapter at 0.5 and at 1."""
        pipe = self.frozen.pipe
        known, pipe.known_captions = pipe.known_captions, None
        rows = []
        for scale in (0.0, 0.5, 1.0):
            pipe.set_adapters(ADAPTER, scale)
            images = pipe(
                **condition_of(pipe, self.prompts),
                decoding=self.frozen.decoding,
                batch_size=CHUNK,
                generator=torch.Generator().manual_seed(self.settings.seed),
                output_type="pt",
            ).images
            rows.append(images.float().cpu())
        pipe.known_captions = known
        pipe.set_adapters(ADAPTER, 1.0)
        size = [min(side, 256) for side in rows[0].shape[2:]]
        save_grid(F.interpolate(torch.cat(rows), size, mode="area"), path, columns=len(self.prompts))

    def check(self, out: Path, resume_from: str | None = None) -> None:
        """Check that a run in `out` began with these pictures and settings.

        Raises:
            ValueError: if it did not.
        """
        begin(self, self.settings.optimizer, out, about=self.about, resume_from=resume_from)

    def fit(self, out: Path, report_every_seconds: float = 300.0, **options: Any) -> None:
        """Train to the end of the settings, or resume; OUT/best and OUT/last hold the adapters, and OUT/samples.png
        shows what they change. The `options` are those of `fit`."""
        more = {"report_every_seconds": report_every_seconds, "about": self.about, "seed": self.settings.seed}
        fit(self, self.settings.optimizer, out, log_every=10, **more, **options)

    def train(self, mode: bool = True) -> "LoraTask":
        """Also after a report, which leaves the adapter without gradients."""
        for weight in self.weights:
            weight.requires_grad_(mode)
        return super().train(mode)


def looks_of(psnr: float) -> str:
    """How well pictures are reproduced at `psnr` dB, in words."""
    return next(words for least, words in LOOKS.items() if psnr >= least)


def warning_of_poor_pictures(psnr: float, own: float | None) -> str | None:
    """What to tell the user if the image tokenizer reproduces the new pictures much worse than those that it knows."""
    if own is None or psnr >= own - POOR:
        return None
    return (
        f"the image tokenizer reproduces these pictures at {psnr:.1f} dB, and the prior ones at {own:.1f} dB: look at "
        "reconstructions-pictures.png, since an adapter does not learn what it cannot reproduce"
    )
