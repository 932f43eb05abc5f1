"""Training of the VQ tokenizer: reconstruction in colour and gradients, codes by moving averages on the unit sphere."""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torchvision.utils import save_image

from ..tokenizers.vq_llamagen import LlamaGenVQModel
from .data import ImageCaptions, to_unit_range
from .loop import OptimizerSettings, fit, training_dtype


@dataclass(frozen=True)
class TokenizerSettings:
    """How the tokenizer is trained.

    For `codebook_start` steps the encoder runs without quantisation; then the codebook starts from k-means over the
    encodings of `kmeans_batches` batches. A code whose moving count falls under `dead_code_count` is put on a random
    encoding of the batch, every `restart_every` steps until `restart_until` (a share of all steps).
    """

    optimizer: OptimizerSettings
    batch_size: int = 32
    codebook_start: int = 100
    kmeans_batches: int = 8
    codebook_decay: float = 0.98
    commitment: float = 0.25
    dead_code_count: float = 0.5
    restart_every: int = 25
    restart_until: float = 0.8
    max_shift: int = 3
    seed: int = 0


def spherical_kmeans(points: torch.Tensor, count: int, generator: torch.Generator, rounds: int = 20) -> torch.Tensor:
    """`count` unit vectors [count, D] that minimise the angles to unit vectors `points` [M, D], M >= count."""
    centres = points[torch.randperm(len(points), generator=generator)[:count]]
    for _ in range(rounds):
        nearest = (points @ centres.T).argmax(-1)
        sums = torch.zeros_like(centres).index_add_(0, nearest, points)
        empty = sums.norm(dim=-1) < 1e-6
        sums[empty] = points[torch.randint(len(points), (int(empty.sum()),), generator=generator)]
        centres = F.normalize(sums, dim=-1)
    return centres


class TokenizerTask(nn.Module):
    def __init__(
        self, model: LlamaGenVQModel, data: ImageCaptions, heldout: ImageCaptions, settings: TokenizerSettings
    ):
        super().__init__()
        self.model, self.data, self.heldout, self.settings = model, data, heldout, settings
        model.codebook.weight.requires_grad_(False)
        self.register_buffer("counts", torch.ones(model.config.codebook_size))
        self.register_buffer("sums", F.normalize(model.codebook.weight.detach().float(), dim=-1))
        self.register_buffer("codes", self.sums.clone())

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Images [B, 3, S, S] in [-1, 1], flipped and shifted at random, and the weights [B, 1, S, S] of their pixels."""
        generator = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + step)
        index = self.data.draw(self.settings.batch_size, generator)
        images, alpha = self.data.images[index], self.data.alpha[index]
        shift = self.settings.max_shift
        if torch.rand((), generator=generator) < 0.5:
            images, alpha = images.flip(-1), alpha.flip(-1)
        size = images.shape[-1]
        top, left = torch.randint(0, 2 * shift + 1, (2,), generator=generator).tolist()
        images = F.pad(images, [shift] * 4, value=255)[..., top : top + size, left : left + size]
        alpha = F.pad(alpha, [shift] * 4)[..., top : top + size, left : left + size]
        device = self.counts.device
        return to_unit_range(images.to(device)), 1 + alpha.to(device).float() / 255

    def encode(self, images: torch.Tensor) -> torch.Tensor:
        """Unit vectors [B, h, w, D] in float32."""
        images = images.to(self.model.dtype, memory_format=torch.channels_last)
        latents = self.model.quant_conv(self.model.encoder(images))
        return F.normalize(latents.permute(0, 2, 3, 1).float(), dim=-1)

    def start_codebook(self, step: int) -> None:
        generator = torch.Generator().manual_seed(self.settings.seed)
        points = torch.cat([self.encode(self.batch(step + i)[0]) for i in range(self.settings.kmeans_batches)])
        points = points.reshape(-1, points.shape[-1]).cpu()
        self.codes.copy_(spherical_kmeans(points, len(self.codes), generator))
        self.sums.copy_(self.codes)
        self.counts.fill_(1)

    def update_codebook(self, step: int, latents: torch.Tensor, nearest: torch.Tensor) -> None:
        settings = self.settings
        self.counts.mul_(settings.codebook_decay).add_(
            torch.bincount(nearest, minlength=len(self.counts)), alpha=1 - settings.codebook_decay
        )
        sums = torch.zeros_like(self.sums).index_add_(0, nearest, latents)
        self.sums.mul_(settings.codebook_decay).add_(sums, alpha=1 - settings.codebook_decay)
        if step % settings.restart_every == 0 and step < settings.restart_until * settings.optimizer.steps:
            generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + step)
            dead = (self.counts < settings.dead_code_count).nonzero().flatten()
            chosen = torch.randint(len(latents), (len(dead),), generator=generator).to(latents.device)
            self.sums[dead] = latents[chosen]
            self.counts[dead] = 1
        self.codes.copy_(F.normalize(self.sums, dim=-1))

    def loss(self, step: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        images, weight = self.batch(step)
        if step == self.settings.codebook_start:
            with torch.no_grad():
                self.start_codebook(step)
        latents = self.encode(images)
        figures = {}
        commitment = 0.0
        quantised = latents
        if step >= self.settings.codebook_start:
            flat = latents.detach().flatten(0, 2)
            nearest = (flat @ self.codes.T).argmax(-1)
            codes = self.codes[nearest].reshape(latents.shape)
            with torch.no_grad():
                self.update_codebook(step, flat, nearest)
            commitment = (latents - codes).pow(2).sum(-1).mean()
            quantised = latents + (codes - latents).detach()
            figures = {"commitment": commitment.detach(), "codes used": (self.counts > 0.1).sum()}
        decoded = self.model.decode_latents(quantised.permute(0, 3, 1, 2).to(self.model.dtype)).float()
        reconstruction = 0.0
        for level in range(3):
            error = decoded - images
            reconstruction = reconstruction + (weight * (error.abs() + 2 * error.pow(2))).mean()
            for axis in (-1, -2):
                reconstruction = reconstruction + 0.5 * error.diff(dim=axis).abs().mean()
            if level < 2:
                decoded, images, weight = (F.avg_pool2d(x, 2) for x in (decoded, images, weight))
        total = reconstruction + self.settings.commitment * commitment
        return total, {"loss": total.detach(), **figures}

    def reconstruct(self, images: torch.Tensor) -> torch.Tensor:
        """uint8 images [B, 3, S, S] through codes and back, in [-1, 1]."""
        codes = self.encode(to_unit_range(images.to(self.counts.device))) @ self.codes.T
        latents = self.codes[codes.argmax(-1)].permute(0, 3, 1, 2)
        return self.model.decode_latents(latents.to(self.model.dtype)).float().clamp(-1, 1)

    def report(self, step: int, out: Path) -> dict[str, float]:
        shown = self.heldout.images[:: max(1, len(self.heldout) // 16)][:16]
        pairs = torch.stack([to_unit_range(shown), self.reconstruct(shown).cpu()], dim=1).flatten(0, 1)
        save_image((pairs + 1) / 2, out / "reconstructions.png", nrow=8)
        errors = [
            (self.reconstruct(batch).cpu() - to_unit_range(batch)).pow(2).flatten(1).mean(-1)
            for batch in self.heldout.images.split(64)
        ]
        return {"held-out PSNR": float((10 * torch.log10(4 / torch.cat(errors))).mean())}


def train_tokenizer(
    model_config: dict,
    data: ImageCaptions,
    heldout: ImageCaptions,
    settings: TokenizerSettings,
    out: str | Path,
    device: str = "cpu",
) -> LlamaGenVQModel:
    """Train a `LlamaGenVQModel(**model_config)` on `data` and save it in the folder `out`/tokenizer, in float32.

    `out` keeps checkpoint, log, curve and reconstructions; a second call continues an interrupted run.
    """
    torch.manual_seed(settings.seed)
    model = LlamaGenVQModel(**model_config)
    task = TokenizerTask(model, data, heldout, settings).to(device)
    nn.Module.to(model, training_dtype(torch.device(device)), memory_format=torch.channels_last)
    fit(task, settings.optimizer, out)
    model.float()
    model.codebook.weight.data.copy_(task.codes)
    nn.Module.to(model, memory_format=torch.contiguous_format).save_pretrained(Path(out) / "tokenizer")
    return model
