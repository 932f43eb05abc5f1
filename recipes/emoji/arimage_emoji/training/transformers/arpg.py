"""Training of a text-conditional ARPG transformer in many orders."""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from arimage.decoding import order_of
from arimage.pipelines.arpg.pipeline_arpg import ARPGPipeline
from arimage.pipelines.arpg.transformer_arpg import ARPGTransformer
from arimage.pipelines.llamagen.transformer_llamagen import LlamaGenTransformer
from arimage.settings.schema import Share, Whole
from arimage.training.orders import Orders
from arimage.training.processes import batch_generator

from .llamagen import TransformerSettings, TransformerTask


@dataclass(frozen=True)
class ARPGSettings(TransformerSettings):
    """How an ARPG transformer is trained, besides `TransformerSettings`, whose first tokens are those of an image's
    order. `raster_share`, `farthest_share` and `first_places` are those of `Orders`."""

    raster_share: Share = 0.25
    farthest_share: Share = 0.25
    first_places: Whole = 0

    def __post_init__(self):
        super().__post_init__()
        self.orders  # noqa: B018 what it refuses

    @property
    def orders(self) -> Orders:
        return Orders(self.raster_share, self.farthest_share, self.first_places)


class ARPGTask(TransformerTask):
    """Teaches the transformer and the text encoder of `pipe` the tokens that its `vq` gives to `data`, in many
    orders."""

    transformer_class, pipeline_class = ARPGTransformer, ARPGPipeline
    settings_class = ARPGSettings

    @staticmethod
    def starting_weights(trained: nn.Module) -> dict[str, torch.Tensor]:
        """Of a LlamaGen, the first half of its blocks reads tokens, and what the others do besides attention starts
        the query blocks. The head starts at zero: it was trained on other features."""
        if not isinstance(trained, LlamaGenTransformer):
            return trained.state_dict()
        weights, half = trained.state_dict(), trained.config.num_layers // 2
        del weights["head.weight"]
        for name in [name for name in weights if name.startswith("blocks.")]:
            _, layer, part = name.split(".", 2)
            if int(layer) >= half:
                weights[f"query_blocks.{int(layer) - half}.{part}"] = weights[name]
        return weights

    def orders(self, count: int, generator: torch.Generator) -> torch.LongTensor:
        """The places by rank of `count` images, [B, N]."""
        return self.settings.orders.sample(count, self.transformer.config.grid_size, generator)

    def loss(self, step: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        generator = batch_generator(self.settings.seed, step)
        batch_size, length = self.batch_shape(step, generator)
        index, captions, unconditional = self.batch(batch_size, generator)
        codes, order = self.codes[index], self.orders(batch_size, generator)[:, :length]
        device, vocab_size = self.transformer.device, self.transformer.config.vocab_size
        noisy = self.noisy(codes, vocab_size, step, generator).to(device)
        first = torch.randint(codes.shape[1], (batch_size, self.settings.first_places), generator=generator)
        logits = self.logits(captions, noisy, unconditional, order=order.to(device), first_places=first.to(device))
        predicted = codes.gather(1, torch.cat([order, first], dim=1))
        loss = F.cross_entropy(logits.flatten(0, 1), predicted.to(device).flatten())
        return loss, {"loss": loss.detach()}

    def report(self, step: int, out: Path) -> dict[str, float]:
        shape, device = (self.transformer.config.grid_size,) * 2, self.transformer.device
        index = torch.arange(len(self.heldout_captions))
        orders = {"farthest": order_of("farthest", shape, index), "raster": None}
        figures = {}
        for name, order in orders.items():
            losses = []
            for part in index.split(32):
                codes = self.heldout_codes[part]
                captions = [self.heldout_captions[i] for i in part.tolist()]
                ordered = None if order is None else order[part].to(device)
                logits = self.logits(
                    captions, codes.to(device), torch.zeros(len(part), dtype=torch.bool), order=ordered
                )
                target = codes if order is None else codes.gather(1, order[part])
                losses.append(F.cross_entropy(logits.flatten(0, 1), target.to(device).flatten(), reduction="none"))
            figures[f"held-out loss, {name}"] = float(torch.cat(losses).mean())
        self.save_samples(out / "samples.png")
        return figures
