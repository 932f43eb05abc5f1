"""Training of a whole transformer, or of an adapter of it, on a cache of tokens."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ...cli.options import fast_dtype
from ...decoding import decoding_to_text
from ...pipelines.base import ARPipeline
from ...pipelines.cosmos.pipeline_cosmos import CosmosPipeline
from ...settings.schema import COMPLETE, Batch, Count, Number, Positive, Seed, Share, Text, Whole, Workers
from ..adapters.lora import add_adapter, save_adapter
from ..cards import SHEET, Samples, data_name, from_base
from ..data.pictures import save_grid
from ..loop import OptimizerSettings, fit
from ..losses import condition_of, losses_of, reads_text, with_ids, with_names
from ..orders import Orders
from ..processes import batch_generator, processes
from ..resuming import digest, of_settings
from ..saving import save_trained
from .batches import TokenBatch, TokenBatches
from .cache import TokenCache
from .heldout import HELD_OUT, Part, reported
from .text import CaptionLength, TextVocabulary


HELD_OUT_LOSS, TRAINED_LOSS = "held-out loss", "loss of trained images"
# The images of a sheet of samples.
SHOWN = 8
# The folder of the run in OUT.
RUN = "transformer"
# All but cuDNN's, which refuses some shapes of masks.
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# What learns at the learning rate of the text.
TEXT = ("text_encoder.", "transformer.caption_projection.", "transformer.caption_condition.")


@dataclass(frozen=True)
class TokenSettings:
    """How a transformer is trained on tokens.

    Attributes:
        batch_size: images per process and step, or per part of a step, see `OptimizerSettings.accumulate`.
        dropout: the share of images that are learned without their class or caption.
        primary_share: the share of images with several captions that are learned with the first one, as reports have
            it; the others with any of them.
        raster_share, farthest_share, first_places: those of `Orders`, for models of any order.
        caption_length, text_vocab_size: how many tokens a new text encoder reads, and those of a text tokenizer that
            is learned from the captions.
        text_learning_rate_scale: of the learning rate, for a text encoder that is trained too, and for the projection
            of its states.
        report_images: the most images of a held-out set that a report is on.
        best: the name of the held-out set at whose lowest loss so far the weights are also kept as OUT/best.
        workers: processes that prepare batches.
        lora_rank: rank of an adapter, which is trained in place of the whole transformer; 0 for none.
        lora_alpha: the adapter is scaled by alpha / rank.
        lora_targets: "attention", or "all" linear layers of the decoder.
    """

    optimizer: OptimizerSettings
    batch_size: Batch = 32
    dropout: Annotated[Share, Field(lt=1)] = 0.1
    primary_share: Share = 0.5
    raster_share: Share = 0.0
    farthest_share: Share = 0.0
    first_places: Whole = 0
    caption_length: CaptionLength = 24
    text_vocab_size: TextVocabulary = 2048
    text_learning_rate_scale: Number = 0.2
    report_images: Count = HELD_OUT
    best: Text | None = None
    workers: Workers = 2
    lora_rank: Whole = 0
    lora_alpha: Positive = 16.0
    lora_targets: Literal["attention", "all"] = "attention"
    seed: Seed = 0
    __pydantic_config__ = COMPLETE

    def __post_init__(self):
        self.orders  # noqa: B018 what it refuses

    @property
    def orders(self) -> Orders:
        """Those that are learned."""
        return Orders(self.raster_share, self.farthest_share, self.first_places)

    @property
    def reported_orders(self) -> Orders:
        """Those of reports: farthest ones, as images are generated, or random ones if no others are learned."""
        return Orders(farthest_share=float(self.farthest_share > 0))


def _sampled(pipe: ARPipeline, prompts: list[str], tokens: torch.Tensor) -> dict[str, Any]:
    """The arguments of a call for samples of `prompts`, next to the `tokens` [B, N] of images or videos."""
    given = condition_of(pipe, prompts) if reads_text(pipe) else {}
    if isinstance(pipe, CosmosPipeline) and not pipe.begins_with_text:
        # Such a model continues videos: here the first map of each.
        given["tokens"] = tokens.unflatten(1, pipe.transformer.config.shape)[:, :1]
    return given


class TokenTask(nn.Module):
    """Teaches the transformer of a pipeline the tokens of a cache, and with it the text encoder if it requires
    gradients. With an adapter, only the adapter's weights are trained and kept.

    Reports are on images of `heldout`, sets by their names, which must not be in `cache`; if there are none, on those
    that are trained, which the log says. One set whose name is "" is that of `hold_out`."""

    def __init__(
        self,
        pipe: ARPipeline,
        cache: TokenCache | Part,
        settings: TokenSettings,
        *,
        heldout: Mapping[str, TokenCache | Part],
        base: str | None = None,
        prompts: Sequence[str] = (),
        gradient_checkpointing: bool = False,
    ):
        super().__init__()
        (self.key,) = pipe._lora_loadable_modules
        network, encoder = pipe.components[self.key], pipe.components.get("text_encoder")
        self.trains_text = encoder is not None and next(encoder.parameters()).requires_grad
        tokens, (caption,) = cache.read([0], [0])
        losses = losses_of(pipe, caption, orders=settings.orders, trains_text=self.trains_text)
        judge = losses_of(pipe, caption, orders=settings.reported_orders, judges=True)
        if settings.best is not None and settings.best not in heldout:
            names = f"those are {', '.join(heldout)}" if any(heldout) else "there is none: give --heldout"
            raise ValueError(f"best is {settings.best!r}, which is not the name of a held-out set, and {names}")
        if prompts and not reads_text(pipe):
            raise ValueError(f"--validation-prompts is given, and this {type(pipe).__name__} reads none: leave it out")
        prompts = with_ids(pipe, prompts)
        # A report is too late to learn that a prompt is not a class, or that the decoding does not run.
        asked = prompts or [caption]
        with torch.no_grad():
            model = pipe.prepare(**_sampled(pipe, asked, tokens.repeat_interleave(len(asked), 0))).model
        if (reason := pipe.decoding.supports(model)) is not None:
            raise ValueError(f"samples are generated by {decoding_to_text(pipe.decoding)}, and {reason}")
        self.settings, sets = settings, dict(heldout) or {"": cache}
        # Not modules: what is in it is neither trained nor part of a checkpoint.
        self.frozen = SimpleNamespace(
            pipe=pipe,
            losses=losses,
            judge=judge,
            network=network,
            held_out=len(heldout) > 0,
            sets=sets,
            # The samples of a report are of its images.
            heldout=next(iter(sets.values())),
            base=base,
            prompts=list(prompts),
            checkpointed=checkpointed_layers(network) if gradient_checkpointing else [],
            data=data_name(cache.index.about["data"]),
            batches=None,
            next=None,
        )
        self.about = {
            **of_settings(settings, "workers", "report_images"),
            "model": digest(network),
            "tokens": cache.digest,
            "heldout": {name: held.digest for name, held in heldout.items()},
        }
        dtype = fast_dtype(str(pipe._execution_device))
        nn.Module.to(network, dtype=dtype)
        self.frozen.dtype = dtype
        if settings.lora_rank:
            torch.manual_seed(settings.seed)
            add_adapter(network, settings.lora_rank, settings.lora_alpha, settings.lora_targets)
            self.weights = nn.ParameterList([one for one in network.parameters() if one.requires_grad])
        else:
            self.add_module(self.key, network)
        self.learning_rate_scales = {}
        if self.trains_text:
            self.learning_rate_scales = dict.fromkeys(TEXT, settings.text_learning_rate_scale)
            self.about["text"] = digest([pipe.tokenizer.backend_tokenizer.to_str(), digest(encoder)])
            self.text_encoder = nn.Module.to(encoder, dtype=dtype)
        if settings.best is not None:
            # The lowest loss so far, and its step: buffers are part of a checkpoint.
            self.register_buffer("lowest", torch.tensor([torch.inf, 0.0], dtype=torch.float64))
        more = {"primary_share": settings.primary_share}
        self.frozen.batches = TokenBatches(cache, settings.batch_size, settings.dropout, settings.seed, **more)

    @property
    def held_out(self) -> str:
        """How many images or videos are trained, and how many not, in words."""
        frozen = self.frozen
        what = "videos" if frozen.pipe.abilities.generates_video else "images"
        trained = f"{what} to train on: {len(frozen.batches.cache)}"
        if not frozen.held_out:
            return f"{trained}, too few to hold some out: give others as --heldout"
        return f"{trained}, held out: {sum(len(held) for held in frozen.sets.values())}"

    def _batch(self, step: int) -> TokenBatch:
        frozen, settings = self.frozen, self.settings
        if frozen.next is None or frozen.next[0] != step:
            last = settings.optimizer.steps * settings.optimizer.accumulate
            frozen.next = step, frozen.batches.from_step(step, last, settings.workers)
        batches: Iterator[TokenBatch] = frozen.next[1]
        batch = next(batches)
        frozen.next = step + 1, batches
        return batch

    def loss(self, step: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        tokens, captions, dropped = self._batch(step)
        tokens = tokens.to(self.frozen.pipe._execution_device, non_blocking=True)
        generator = batch_generator(self.settings.seed, step)
        loss = self.frozen.losses(captions, tokens, dropped, tokens.shape[1], generator).mean()
        return loss, {"loss": loss.detach()}

    def report(self, step: int, out: Path) -> dict[str, float]:
        """The loss of each held-out set, and OUT/best where that is the lowest so far."""
        frozen, figures, lowest = self.frozen, {}, False
        what = "clip" if frozen.pipe.abilities.generates_video else "picture"
        for name, held in frozen.sets.items():
            loss, count = self._judge(held)
            if len(frozen.sets) == 1:
                figures[HELD_OUT_LOSS if frozen.held_out else TRAINED_LOSS] = loss
            elif len(held.index.shape) == 1:
                figures[f"nats per {what}, {name}"] = loss * count
            else:
                # Continuous tokens have no likelihood.
                figures[f"{HELD_OUT_LOSS}, {name}"] = loss
            if name == self.settings.best and loss < self.lowest[0]:
                self.lowest.copy_(torch.tensor([loss, step]))
                lowest = True
        self._save_samples(out / SHEET)
        if lowest:
            self._save(out.with_name("best"), out / SHEET)
        return figures

    def _judge(self, heldout: TokenCache | Part) -> tuple[float, int]:
        """The mean loss of a token of held-out images, and how many tokens of each are predicted."""
        found = []
        for part in reported(heldout, self.settings.report_images).split(self.settings.batch_size):
            tokens, captions = heldout.read(part.tolist(), [0] * len(part))
            tokens, kept = tokens.to(self.frozen.pipe._execution_device), torch.zeros(len(part), dtype=torch.bool)
            generator = torch.Generator().manual_seed(self.settings.seed)
            found.append(self.frozen.judge(captions, tokens, kept, tokens.shape[1], generator).flatten(1))
        losses = torch.cat(found)
        return float(losses.mean(1).mean()), losses.shape[1]

    def _shown(self) -> tuple[torch.Tensor, list[str]]:
        """The tokens of the held-out images that samples are next to, and what the samples are of."""
        prompts, heldout = self.frozen.prompts, self.frozen.heldout
        count = len(heldout)
        if prompts:
            images = [number % count for number in range(len(prompts))]
        else:
            images = torch.linspace(0, count - 1, min(SHOWN, count)).long().tolist()
        tokens, captions = heldout.read(images, [0] * len(images))
        return tokens, prompts or captions

    def _save_samples(self, path: Path) -> None:
        pipe, (tokens, prompts) = self.frozen.pipe, self._shown()
        given = _sampled(pipe, prompts, tokens)
        pipe.set_progress_bar_config(disable=True)
        generator = torch.Generator().manual_seed(self.settings.seed)
        output: Any = pipe(**given, generator=generator, output_type="pt", batch_size=SHOWN)
        if pipe.abilities.generates_video:
            shown, columns = output.frames.flatten(0, 1), output.frames.shape[1]
        else:
            shown, columns = output.images, SHOWN
        height, width = shown.shape[2:]
        side = min(width, 256)
        shown = F.interpolate(shown.float().cpu(), (height * side // width, side), mode="area")
        save_grid(shown, path, columns)

    def trained(self, out: Path) -> Path:
        """OUT/model, the pipeline in the dtype that it is trained in, or OUT/adapter."""
        return out / ("adapter" if self.settings.lora_rank else "model")

    def save(self, out: Path) -> None:
        """Write `trained`."""
        self._save(self.trained(out), out / RUN / SHEET)

    def _save(self, folder: Path, sheet: Path) -> None:
        """Write the pipeline or the adapter, with a sheet of samples. Of processes that train together the first one
        does."""
        if processes()[0]:
            return
        frozen, base = self.frozen, self.frozen.base
        samples = Samples(sheet, with_names(frozen.pipe, self._shown()[1]))
        if self.settings.lora_rank:
            save_adapter(frozen.pipe, folder, base=base, captions=[], data=frozen.data, samples=samples)
        else:
            begun = {} if base is None else from_base(base)
            save_trained(frozen.pipe, folder, frozen.dtype, samples=samples, **begun, datasets=[frozen.data])

    def show(self, networks: dict[str, nn.Module]) -> None:
        """Let the pipeline have these networks, of which training divides others over several processes."""
        for name, network in networks.items():
            setattr(self.frozen.pipe, name, network)

    def fit(self, out: Path, report_every_seconds: float = 900.0, **options: Any) -> None:
        """Train, or resume, and leave the averaged weights in the pipeline; every report saves them. The `options` are
        those of `fit`."""
        with sdpa_kernel(ATTENTION):
            fit(
                self,
                self.settings.optimizer,
                out / RUN,
                learning_rate_scales=self.learning_rate_scales,
                report_every_seconds=report_every_seconds,
                about=self.about,
                on_report=lambda: self.save(out),
                seed=self.settings.seed,
                **options,
            )
        # The last report has saved it, with samples of its prompts, unless the run went back to a kept checkpoint.
        if options.get("resume_from") or not self.trained(out).is_dir():
            self.save(out)

    def train(self, mode: bool = True) -> "TokenTask":
        """Also after a report, which leaves an adapter without gradients."""
        for weight in getattr(self, "weights", ()):
            weight.requires_grad_(mode)
        super().train(mode)
        # The network of an adapter is not trained, and has no dropout: only the layers ask for the mode.
        for layer in self.frozen.checkpointed:
            layer.training = mode
        return self


def checkpointed_layers(network: nn.Module) -> list[nn.Module]:
    """The layers of a language model, which from now on keep nothing for the backward pass but what they read."""
    if not isinstance(network, PreTrainedModel) or not network.supports_gradient_checkpointing:
        raise ValueError(
            f"--gradient-checkpointing is for language models, and this is a {type(network).__name__}: leave it out"
        )
    network.gradient_checkpointing_enable({"use_reentrant": False})
    return [layer for layer in network.modules() if isinstance(layer, GradientCheckpointingLayer)]
