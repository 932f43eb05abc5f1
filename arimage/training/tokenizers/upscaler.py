"""Training of an upscaler for a finished pipeline: on what its image tokenizer makes of images of twice its size."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import nn

from ...cli.options import fast_dtype
from ...models.layers import GroupNorm
from ...pipelines.kinds.upscaling import UpscalingPipeline
from ...settings.schema import COMPLETE, Batch, Number, Rows, Seed, Share
from ...tokenizers.upscaler import ImageUpscaler
from ...tokenizers.vq_llamagen import LlamaGenVQModel
from ...tokenizers.vq_var import VARVQModel
from ..data.pictures import Pixels, save_grid, to_unit_range
from ..loop import OptimizerSettings, fit
from ..pixels import open_both
from ..processes import batch_generator
from ..recipe import PartRecipe, new_model, settings_of
from ..resuming import digest, of_settings
from ..saving import save_float16


NEIGHBOURS = 8


@dataclass(frozen=True)
class UpscalerSettings:
    """How an upscaler is trained: L1 of colours, of their Sobel gradients and of the image at half its size,
    and from the step `adversarial_start` on, weighted by `adversarial`, the hinge loss of a discriminator of patches
    that compares it with the interpolated image (https://arxiv.org/abs/1611.07004).

    Images are flipped, shifted by up to `max_shift` pixels, in a `shrunk_share` of the batches shrunk to at least half
    their size, in a `permuted_share` of the batches with other colours, and in a `ground_share` put on a background of
    one colour. Generated tokens are not quite those of an image: in a `noisy_share` of the images up to `most_noise`
    of the tokens are replaced by near ones.
    """

    optimizer: OptimizerSettings
    batch_size: Batch = 8
    adversarial: Number = 0.0
    adversarial_start: Rows = 0
    discriminator_rate: Number = 0.3
    discriminator_channels: Annotated[int, Field(strict=True, ge=8, le=2**12, multiple_of=8)] = 32
    max_shift: Annotated[int, Field(strict=True, ge=0, le=2**10)] = 8
    shrunk_share: Share = 0.25
    permuted_share: Share = 0.25
    ground_share: Share = 0.2
    noisy_share: Share = 0.5
    most_noise: Share = 0.1
    seed: Seed = 0
    __pydantic_config__ = COMPLETE


class Discriminator(nn.Sequential):
    """Tells patches of images from upscaled ones: [B, 6, S, S], an image and its interpolation, to scores [B, 1, S /
    4, S / 4], high for images."""

    def __init__(self, channels: int):
        layers: list[nn.Module] = [nn.Conv2d(6, channels, 4, 2, padding=1), nn.LeakyReLU(0.2)]
        for before, after, stride in ((channels, 2 * channels, 2), (2 * channels, 2 * channels, 1)):
            layers += [nn.Conv2d(before, after, 3, stride, padding=1), GroupNorm(8, after), nn.LeakyReLU(0.2)]
        super().__init__(*layers, nn.Conv2d(2 * channels, 1, 3, padding=1))


def sobel(images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of images [B, C, H, W] across and down, [B, C, H - 2, W - 2] each."""
    across, down = images[..., 2:] - images[..., :-2], images[..., 2:, :] - images[..., :-2, :]
    return (
        (across[..., :-2, :] + 2 * across[..., 1:-1, :] + across[..., 2:, :]) / 8,
        (down[..., :-2] + 2 * down[..., 1:-1] + down[..., 2:]) / 8,
    )


class UpscalerTask(nn.Module):
    def __init__(
        self,
        upscaler: ImageUpscaler,
        vq: LlamaGenVQModel | VARVQModel,
        data: Pixels,
        heldout: Pixels,
        settings: UpscalerSettings,
    ):
        super().__init__()
        self.upscaler, self.data, self.heldout, self.settings = upscaler, data, heldout, settings
        self.discriminator = Discriminator(settings.discriminator_channels) if settings.adversarial else None
        vectors = vq.code_vectors().detach().float()
        near = torch.cdist(vectors, vectors).topk(1 + NEIGHBOURS, largest=False).indices[:, 1:]
        # Not a module: the tokenizer is neither trained nor part of a checkpoint.
        self.frozen = SimpleNamespace(vq=vq, near=near)

    def batch(self, part: int) -> torch.Tensor:
        """Images [B, 3, S, S] in [-1, 1] with the changes of the settings."""
        settings, generator = self.settings, batch_generator(self.settings.seed, part)

        def happens(share: float) -> bool:
            return float(torch.rand((), generator=generator)) < share

        images, alpha = self.data.batch(part, settings.batch_size, generator)
        images, alpha = to_unit_range(images), alpha.float() / 255
        layers, size = torch.cat([images, alpha], dim=1), images.shape[-1]
        # White and transparent where the image ends.
        layers = layers - torch.tensor([1.0, 1.0, 1.0, 0.0]).view(1, 4, 1, 1)
        side = size
        if happens(settings.shrunk_share):
            side = int(torch.randint(size // 2, size, (), generator=generator))
            layers = F.interpolate(layers, size=(side, side), mode="bicubic", antialias=True)
        if happens(0.5):
            layers = layers.flip(-1)
        room = size - side + settings.max_shift
        top, left = torch.randint(0, room + settings.max_shift + 1, (2,), generator=generator).tolist()
        layers = F.pad(layers, [room] * 4)[..., top : top + size, left : left + size]
        images, alpha = layers[:, :3] + 1, layers[:, 3:]
        if happens(settings.ground_share):
            ground = torch.rand(len(images), 3, 1, 1, generator=generator) * 2 - 1
            images = images + (1 - alpha) * (ground - 1)
        if happens(settings.permuted_share):
            images = images[:, torch.randperm(3, generator=generator)]
        return images.clamp(-1, 1)

    @torch.no_grad()
    def decoded(self, images: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """What the tokenizer decodes, [B, 3, S / scale, S / scale], of images [B, 3, S, S] after the share `noise` [B]
        of their tokens is replaced."""
        vq, near = self.frozen.vq, self.frozen.near
        small = F.avg_pool2d(images, self.upscaler.config.scale).to(vq.dtype)
        codes = vq.encode(small)

        def noisy(codes: torch.LongTensor) -> torch.LongTensor:
            other = near[codes, torch.randint(NEIGHBOURS, codes.shape, device=codes.device)]
            return torch.where(torch.rand(codes.shape, device=codes.device) < noise[:, None, None], other, codes)

        return vq.decode([noisy(part) for part in codes] if isinstance(codes, list) else noisy(codes))

    def loss(self, part: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        settings, device = self.settings, self.upscaler.device
        images = self.batch(part).to(device)
        noise = torch.rand(len(images), device=device) * settings.most_noise
        noise = noise * (torch.rand(len(images), device=device) < settings.noisy_share)
        decoded = self.decoded(images, noise)
        upscaled = self.upscaler.upscale(decoded)
        error = upscaled - images
        total = error.abs().mean() + F.avg_pool2d(error, 2).abs().mean()
        for gradient in sobel(error):
            total = total + gradient.abs().mean()
        figures = {"reconstruction": total.detach()}
        if self.discriminator is not None and part // settings.optimizer.accumulate >= settings.adversarial_start:
            enlarged = F.interpolate(decoded.float(), size=images.shape[-2:], mode="bicubic")
            fooled, told = self.adversarial(self.discriminator, upscaled, images, enlarged)
            total = total + settings.adversarial * fooled + told
            figures |= {"adversarial": fooled.detach(), "discriminator": told.detach()}
        return total, figures

    def adversarial(
        self, discriminator: Discriminator, upscaled: torch.Tensor, images: torch.Tensor, enlarged: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The losses of the upscaler, whose gradient leaves the discriminator alone, and of the discriminator."""
        dtype = next(discriminator.parameters()).dtype
        frozen = {name: parameter.detach() for name, parameter in discriminator.named_parameters()}
        pair = torch.cat([upscaled, enlarged], dim=1).to(dtype)
        fooled = -torch.func.functional_call(discriminator, frozen, (pair,)).float().mean()
        both = torch.cat([pair.detach(), torch.cat([images, enlarged], dim=1).to(dtype)])
        made, real = discriminator(both).float().chunk(2)
        return fooled, (F.relu(1 + made).mean() + F.relu(1 - real).mean()) / 2

    def report(self, step: int, out: Path) -> dict[str, float]:
        """Held-out images, what the tokenizer decodes, and the upscaled ones, and the mean PSNR in dB of the upscaled
        and of the interpolated ones."""
        errors = {"held-out PSNR": [], "held-out PSNR of interpolation": []}
        every = range(len(self.heldout))
        for start in every[::32]:
            images, *made = self._upscaled(every[start : start + 32])
            for name, each in zip(errors, made, strict=True):
                errors[name].append((each - images).pow(2).flatten(1).mean(1).cpu())
        images, upscaled, enlarged = self._upscaled(every[:: max(1, len(every) // 18)][:18])
        rows = torch.stack([images, enlarged, upscaled], dim=1).cpu()
        save_grid((rows.flatten(0, 1) + 1) / 2, out / "upscaled.png", 9)
        return {name: float((10 * torch.log10(4 / torch.cat(each))).mean()) for name, each in errors.items()}

    def _upscaled(self, numbers: range) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Some held-out images, and what is upscaled and interpolated from their tokens, all in [-1, 1]."""
        images = to_unit_range(self.heldout.read(numbers)[0].to(self.upscaler.device))
        decoded = self.decoded(images, torch.zeros(len(images), device=images.device))
        enlarged = F.interpolate(decoded.float(), size=images.shape[-2:], mode="bicubic")
        return images, self.upscaler.upscale(decoded).clamp(-1, 1), enlarged.clamp(-1, 1)


def train_upscaler(
    pipe: UpscalingPipeline,
    model_config: dict,
    data: Pixels,
    heldout: Pixels,
    settings: UpscalerSettings,
    out: str | Path,
    on_report: Callable[[], None] | None = None,
) -> UpscalingPipeline:
    """Train an `ImageUpscaler(**model_config)` for the image tokenizer of `pipe`; returns `pipe` with the averaged
    weights as its component `upscaler`. Images of `data` are `scale` times as large as those that the tokenizer
    decodes.

    `out` keeps checkpoint, log, curve and pictures; a second call with the same settings and data resumes the run.
    """
    torch.manual_seed(settings.seed)
    device = str(pipe.device)
    vq = copy.deepcopy(pipe.vq).requires_grad_(False)
    task = UpscalerTask(ImageUpscaler(**model_config), vq, data, heldout, settings)
    for part in (vq, task):
        nn.Module.to(part, device, fast_dtype(device), memory_format=torch.channels_last)
    pipe.register_modules(upscaler=task.upscaler)
    scales = {"discriminator.": settings.discriminator_rate}
    about = {
        **of_settings(settings),
        "model": model_config,
        "vq": digest(vq),
        "data": data.about,
        "heldout": heldout.about,
    }
    fit(
        task,
        settings.optimizer,
        out,
        learning_rate_scales=scales,
        on_report=on_report,
        about=about,
        seed=settings.seed,
    )
    nn.Module.to(task.upscaler, torch.float32, memory_format=torch.contiguous_format)
    return pipe


def run_upscaler(
    recipe: PartRecipe, pipe: UpscalingPipeline, train: str, heldout: str, out: Path, **options: Any
) -> UpscalingPipeline:
    """Train an upscaler for the image tokenizer of `pipe` by a recipe, on data sets, see `open_both`. The pipeline
    with it is saved in `out`/model, in float16, at every report."""
    if "upscaler" not in pipe._optional_components:
        raise ValueError(f"{type(pipe).__name__} takes no upscaler: give a LlamaGen, ARPG, VAR or latent Llama model")
    upscaler, settings = new_model(ImageUpscaler, recipe.model, "model"), settings_of(UpscalerSettings, recipe)
    size, *others = pipe.decoded_size
    if others != [size]:
        raise ValueError(
            f"the model decodes {others[0]} x {size} pixels, and upscalers learn squares: give another one"
        )
    data = open_both(train, heldout, size * upscaler.config.scale, seed=settings.seed, **options)
    save = partial(save_float16, pipe, out / "model")
    train_upscaler(pipe, recipe.model, *data, settings, out / "upscaler", on_report=save)
    save()
    return pipe
