"""Training of a whole transformer, or of an adapter of it, on a cache of tokens."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import nn

from ...options import fast_dtype
from ...pipelines.base import ARPipeline
from ...pipelines.cosmos.pipeline_cosmos import CosmosPipeline
from ...schema import COMPLETE, Batch, Positive, Seed, Share, Whole, Workers
from ..adapters.lora import add_adapter, save_adapter
from ..cards import data_name, from_base
from ..data.captioned import save_grid
from ..loop import OptimizerSettings, fit
from ..losses import Losses, condition_of, reads_text
from ..processes import batch_generator, processes
from ..resuming import digest, of_settings
from ..saving import save_float16
from .batches import TokenBatch, TokenBatches
from .cache import TokenCache
from .heldout import Part, reported


HELD_OUT_LOSS = "held-out loss"
# The images of a sheet of samples.
SHOWN = 8


@dataclass(frozen=True)
class TokenSettings:
    """How a transformer is trained on tokens.

    Attributes:
        batch_size: images per process and step, or per part of a step, see `OptimizerSettings.accumulate`.
        dropout: the share of images that are learned without their class or caption.
        workers: processes that prepare batches.
        lora_rank: rank of an adapter, which is trained in place of the whole transformer; 0 for none.
        lora_alpha: the adapter is scaled by alpha / rank.
        lora_targets: "attention", or "all" linear layers of the decoder.
    """

    optimizer: OptimizerSettings
    batch_size: Batch = 32
    dropout: Annotated[Share, Field(lt=1)] = 0.1
    workers: Workers = 2
    lora_rank: Whole = 0
    lora_alpha: Positive = 16.0
    lora_targets: Literal["attention", "all"] = "attention"
    seed: Seed = 0
    __pydantic_config__ = COMPLETE


class TokenTask(nn.Module):
    """Teaches the transformer of a pipeline the tokens of a cache, as `losses` measure them. With an adapter, only the
    adapter's weights are trained and kept.

    Reports are on images of `heldout`, which must not be in `cache`; None: on those that are trained, which the log
    says."""

    def __init__(
        self,
        pipe: ARPipeline,
        losses: Losses,
        cache: TokenCache | Part,
        settings: TokenSettings,
        *,
        heldout: TokenCache | Part | None,
        base: str | None = None,
    ):
        super().__init__()
        (self.key,) = pipe._lora_loadable_modules
        network = pipe.components[self.key]
        self.settings = settings
        # Not modules: what is in it is neither trained nor part of a checkpoint.
        self.frozen = SimpleNamespace(
            pipe=pipe,
            losses=losses,
            network=network,
            heldout=cache if heldout is None else heldout,
            figure="loss of trained images" if heldout is None else HELD_OUT_LOSS,
            base=base,
            data=data_name(cache.index.about["data"]),
            batches=None,
            next=None,
        )
        self.about = {
            **of_settings(settings, "workers"),
            "model": digest(network),
            "tokens": cache.digest,
            "heldout": None if heldout is None else heldout.digest,
        }
        nn.Module.to(network, dtype=fast_dtype(pipe._execution_device.type))
        if settings.lora_rank:
            torch.manual_seed(settings.seed)
            add_adapter(network, settings.lora_rank, settings.lora_alpha, settings.lora_targets)
            self.weights = nn.ParameterList([one for one in network.parameters() if one.requires_grad])
        else:
            self.network = network
        self.frozen.batches = TokenBatches(cache, settings.batch_size, settings.dropout, settings.seed)

    @property
    def held_out(self) -> str:
        """How many images are trained, and how many not, in words."""
        frozen = self.frozen
        if frozen.figure != HELD_OUT_LOSS:
            return (
                f"{len(frozen.batches.cache)} images are trained, too few to hold some out: give others as --heldout"
            )
        return f"{len(frozen.batches.cache)} images are trained, {len(frozen.heldout)} are held out"

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
        heldout, size, found = self.frozen.heldout, self.settings.batch_size, []
        for part in reported(heldout).split(size):
            tokens, captions = heldout.read(part.tolist(), [0] * len(part))
            tokens, kept = tokens.to(self.frozen.pipe._execution_device), torch.zeros(len(part), dtype=torch.bool)
            generator = torch.Generator().manual_seed(self.settings.seed)
            found.append(self.frozen.losses(captions, tokens, kept, tokens.shape[1], generator).flatten(1).mean(1))
        self._save_samples(out / "samples.png")
        return {self.frozen.figure: float(torch.cat(found).mean())}

    def _save_samples(self, path: Path) -> None:
        pipe, heldout = self.frozen.pipe, self.frozen.heldout
        images = torch.linspace(0, len(heldout) - 1, min(SHOWN, len(heldout))).long().tolist()
        tokens, captions = heldout.read(images, [0] * len(images))
        given = condition_of(pipe, captions) if reads_text(pipe) else {}
        if isinstance(pipe, CosmosPipeline) and not pipe.begins_with_text:
            # Such a model continues videos: here the first map of each.
            given["tokens"] = tokens.unflatten(1, pipe.transformer.config.shape)[:, :1]
        pipe.set_progress_bar_config(disable=True)
        output: Any = pipe(**given, generator=torch.Generator().manual_seed(self.settings.seed), output_type="pt")
        if pipe.abilities.generates_video:
            shown, columns = output.frames.flatten(0, 1), output.frames.shape[1]
        else:
            shown, columns = output.images, SHOWN
        height, width = shown.shape[2:]
        side = min(width, 256)
        shown = F.interpolate(shown.float().cpu(), (height * side // width, side), mode="area")
        save_grid(shown, path, columns)

    def save(self, out: Path) -> None:
        """Write OUT/model, the pipeline in float16, or OUT/adapter. Of processes that train together the first one
        does."""
        if processes()[0]:
            return
        base = self.frozen.base
        if self.settings.lora_rank:
            save_adapter(self.frozen.pipe, out / "adapter", base=base, captions=[])
        else:
            begun = {} if base is None else from_base(base)
            save_float16(self.frozen.pipe, out / "model", **begun, datasets=[self.frozen.data])

    def fit(self, out: Path, report_every_seconds: float = 900.0, log_with: str | None = None) -> None:
        """Train, or resume, and leave the averaged weights in the pipeline; every report saves them. `log_with` is
        that of `fit`."""
        fit(
            self,
            self.settings.optimizer,
            out / "transformer",
            report_every_seconds=report_every_seconds,
            about=self.about,
            on_report=lambda: self.save(out),
            log_with=log_with,
            seed=self.settings.seed,
        )
        self.save(out)

    def train(self, mode: bool = True) -> "TokenTask":
        """Also after a report, which leaves an adapter without gradients."""
        for weight in getattr(self, "weights", ()):
            weight.requires_grad_(mode)
        return super().train(mode)
