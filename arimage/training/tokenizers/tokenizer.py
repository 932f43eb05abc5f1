"""Training of image tokenizers: reconstruction of colours and gradients, codebooks by moving averages."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import nn

from ...cli.options import fast_dtype
from ...pipelines.saving.saved_folder import stored_elsewhere
from ...settings.installed import installed_models
from ...settings.schema import COMPLETE, Batch, Decay, Number, Rows, Seed, Share, Steps, read_object
from ...tokenizers.vq_llamagen import LlamaGenVQModel
from ...tokenizers.vq_patches import PatchVQModel
from ...tokenizers.vq_var import VARVQModel
from ..data.pictures import Pixels, to_unit_range
from ..loop import OptimizerSettings, fit
from ..pixels import open_both
from ..recipe import TokenizerRecipe, new_model, settings_of
from ..resuming import digest, of_settings
from ..saving import replace_folder
from .patches import PatchSettings, train_patches
from .quantisers import ResidualQuantiser, SphericalQuantiser
from .reconstructions import report_reconstructions


QUANTISERS = {LlamaGenVQModel: SphericalQuantiser, VARVQModel: ResidualQuantiser}
# Those with networks, which are trained, and all.
NETWORKS = {tokenizer.__name__: tokenizer for tokenizer in QUANTISERS}
TOKENIZERS = {**NETWORKS, PatchVQModel.__name__: PatchVQModel}


@dataclass(frozen=True)
class TokenizerSettings:
    """How the tokenizer is trained.

    For `codebook_start` steps the encoder runs without quantisation; then the codebook starts from k-means over the
    encodings of `kmeans_batches` batches. A code whose moving count falls under `dead_code_count` is put on a random
    encoding of the batch, every `restart_every` steps until `restart_until` (a share of all steps). A multi-scale
    tokenizer decodes `partial_share` of the images from their first scales only, so that these give pictures too.
    """

    optimizer: OptimizerSettings
    batch_size: Batch = 32
    codebook_start: Rows = 100
    kmeans_batches: Annotated[int, Field(strict=True, ge=1, le=10_000)] = 8
    codebook_decay: Decay = 0.98
    commitment: Number = 0.25
    dead_code_count: Number = 0.5
    restart_every: Steps = 25
    restart_until: Share = 0.8
    partial_share: Share = 0.1
    max_shift: Annotated[int, Field(strict=True, ge=0, le=2**10)] = 3
    seed: Seed = 0
    __pydantic_config__ = COMPLETE


class TokenizerTask(nn.Module):
    def __init__(
        self,
        model: LlamaGenVQModel | VARVQModel,
        data: Pixels,
        heldout: Pixels,
        settings: TokenizerSettings,
    ):
        super().__init__()
        self.model, self.data, self.heldout, self.settings = model, data, heldout, settings
        self.quantiser = QUANTISERS[type(model)](model, settings.codebook_decay)
        model.codebook.weight.requires_grad_(False)

    def batch(self, part: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Images [B, 3, S, S] in [-1, 1], flipped and shifted at random, and the weights [B, 1, S, S] of their
        pixels."""
        generator = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + part)
        images, alpha = self.data.batch(part, self.settings.batch_size, generator)
        shift = self.settings.max_shift
        if torch.rand((), generator=generator) < 0.5:
            images, alpha = images.flip(-1), alpha.flip(-1)
        size = images.shape[-1]
        top, left = torch.randint(0, 2 * shift + 1, (2,), generator=generator).tolist()
        images = F.pad(images, [shift] * 4, value=255)[..., top : top + size, left : left + size]
        alpha = F.pad(alpha, [shift] * 4)[..., top : top + size, left : left + size]
        device = self.model.device
        return to_unit_range(images.to(device)), 1 + alpha.to(device).float() / 255

    def encode(self, images: torch.Tensor) -> torch.Tensor:
        """Latents [B, C, h, w] in float32, before quantisation."""
        images = images.to(self.model.dtype, memory_format=torch.channels_last)
        return self.quantiser.normalise(self.model.quant_conv(self.model.encoder(images)).float())

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        return self.model.decode_latents(latents.to(self.model.dtype)).float()

    @torch.no_grad()
    def start_codebook(self, part: int) -> None:
        latents = [self.encode(self.batch(part + i)[0]) for i in range(self.settings.kmeans_batches)]
        self.quantiser.start(torch.cat(latents), torch.Generator().manual_seed(self.settings.seed))

    @torch.no_grad()
    def update_codebook(self, part: int, points: torch.Tensor, codes: torch.LongTensor) -> None:
        settings, codebook = self.settings, self.quantiser.codebook
        codebook.update(points, codes)
        step, later = divmod(part, settings.optimizer.accumulate)
        due = not later and step % settings.restart_every == 0
        if due and step < settings.restart_until * settings.optimizer.steps:
            generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + part)
            codebook.restart(points, settings.dead_code_count, generator)

    def quantise(self, part: int, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The latents to decode, straight-through, and their commitment loss over all scales; moves the codebook."""
        partial, points, codes = self.quantiser(latents)
        self.update_codebook(part, points, codes)
        steps = torch.stack(partial)
        commitment = (latents - steps.detach()).pow(2).sum(2).mean()
        if steps.requires_grad:
            # The codes follow the encodings by themselves; the convolutions between them do not.
            commitment = commitment + (latents.detach() - steps).pow(2).sum(2).mean()
        last = torch.full((len(latents),), len(steps) - 1)
        if len(steps) > 1:
            partial_images = torch.rand(len(last)) < self.settings.partial_share
            last = torch.where(partial_images, torch.randint_like(last, len(steps) - 1), last)
        chosen = steps[last, torch.arange(len(last))]
        return latents + (chosen - latents.detach()), commitment

    def loss(self, part: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        images, weight = self.batch(part)
        step = part // self.settings.optimizer.accumulate
        # Where the step that started it was skipped, the next one does.
        if step >= self.settings.codebook_start and not self.quantiser.codebook.moved:
            self.start_codebook(part)
        latents = self.encode(images)
        figures = {}
        commitment = 0.0
        if step >= self.settings.codebook_start:
            latents, commitment = self.quantise(part, latents)
            used = (self.quantiser.codebook.counts > 0.1).sum()
            figures = {"commitment": commitment.detach(), "codes used": used}
        decoded = self.decode(latents)
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

    def quantised(self, images: torch.Tensor) -> list[torch.Tensor]:
        """uint8 images [B, 3, S, S] to the latents that their codes stand for: those of the first scale, the first
        two, ..."""
        return self.quantiser(self.encode(to_unit_range(images.to(self.model.device))))[0]

    def report(self, step: int, out: Path) -> dict[str, float]:
        """Held-out images next to their reconstructions, from the first scale to all of them, and the mean PSNR in
        dB."""
        return report_reconstructions(self.heldout, self.quantised, self.decode, out)


def take_over(model: LlamaGenVQModel | VARVQModel, start_from: str | Path) -> LlamaGenVQModel | VARVQModel:
    """Give `model` the weights of a trained tokenizer of the same widths, of either class, where names and shapes
    agree: between the classes those of encoder and decoder but for the convolutions next to the latents. `start_from`
    is an installed model's name, or a folder with a pipeline or a tokenizer. Returns the trained one."""
    folder = Path(start_from)
    if installed := installed_models().get(str(start_from)):
        folder = stored_elsewhere(installed).get("vq", installed)
    if (folder / "vq").is_dir():
        folder = folder / "vq"
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{start_from} is not a tokenizer: give an installed model's name or a folder of save_pretrained"
        )
    kind = read_object(folder / "config.json").get("_class_name")
    if kind not in NETWORKS:
        raise ValueError(f"{start_from} holds a {kind}: start from one of {', '.join(NETWORKS)}")
    trained = NETWORKS[kind].from_pretrained(folder)
    for name in ("channels", "channel_multipliers", "layers_per_block", "norm_num_groups"):
        # As in the file, where a tuple is a list.
        theirs, ours = (json.dumps(tokenizer.config[name]) for tokenizer in (trained, model))
        if theirs != ours:
            raise ValueError(
                f"{start_from} has {name}={theirs}, not {ours}: start from a tokenizer of the same widths"
            )
    ours, theirs = model.state_dict(), trained.state_dict()
    shared = [name for name in ours if name in theirs and theirs[name].shape == ours[name].shape]
    model.load_state_dict(ours | {name: theirs[name] for name in shared})
    return trained


def train_tokenizer(
    model_config: dict,
    data: Pixels,
    heldout: Pixels,
    settings: TokenizerSettings,
    out: str | Path,
    device: str = "cpu",
    *,
    model_class: type[LlamaGenVQModel] | type[VARVQModel] = LlamaGenVQModel,
    start_from: str | Path | None = None,
) -> LlamaGenVQModel | VARVQModel:
    """Train a `model_class(**model_config)` on `data` and save it in the folder `out`/tokenizer, in float32.

    `out` keeps checkpoint, log, curve and reconstructions; a second call with the same settings and data resumes the
    run. `start_from` names a trained tokenizer, of either class, whose weights the training begins with: see
    `take_over`.

    Raises:
        ValueError: if the images are not of the size that a multi-scale tokenizer's scales stand for.
    """
    torch.manual_seed(settings.seed)
    model = model_class(**model_config)
    _check_size(model, data.size)
    task = TokenizerTask(model, data, heldout, settings)
    about = {
        **of_settings(settings),
        "model": model_config,
        "start_from": None if start_from is None else digest(take_over(model, start_from)),
        "data": data.about,
        "heldout": heldout.about,
    }
    task.to(device)
    nn.Module.to(model, fast_dtype(device), memory_format=torch.channels_last)
    fit(task, settings.optimizer, out, about=about, seed=settings.seed)
    model.float()
    model.codebook.weight.data.copy_(task.quantiser.codebook.codes)
    replace_folder(Path(out) / "tokenizer", nn.Module.to(model, memory_format=torch.contiguous_format).save_pretrained)
    return model


def _check_size(model: LlamaGenVQModel | VARVQModel | PatchVQModel, size: int) -> None:
    """Refuse a `size` in pixels that is not a whole number of tokens."""
    factor = model.scale_factor
    if size % factor:
        raise ValueError(
            f"image_size is {size}, and a token has {factor} pixels along a side: give a multiple of {factor}"
        )
    if isinstance(model, VARVQModel) and size != model.config.scales[-1] * factor:
        raise ValueError(
            f"images of {size} pixels do not fit scales up to {model.config.scales[-1]} at {factor} pixels per cell: "
            f"end the scales with {size // factor}"
        )


def new_tokenizer(recipe: TokenizerRecipe) -> LlamaGenVQModel | VARVQModel | PatchVQModel:
    """The tokenizer of a recipe, without memory for its weights."""
    model = new_model(TOKENIZERS[recipe.tokenizer], recipe.model, "model")
    _check_size(model, recipe.image_size)
    settings = _settings_of(recipe)
    if isinstance(settings, PatchSettings):
        return model
    if settings.codebook_start >= settings.optimizer.steps:
        raise ValueError(
            f"table [training]: codebook_start is {settings.codebook_start}: give less than the "
            f"{settings.optimizer.steps} steps of the training"
        )
    # K-means of each scale starts a share of the codes.
    sides = model.config.scales if isinstance(model, VARVQModel) else [recipe.image_size // model.scale_factor]
    images = settings.batch_size * settings.kmeans_batches
    for side in sides:
        codes = round(model.config.codebook_size * side / sum(sides))
        if images * side * side < codes:
            raise ValueError(
                f"{images} images of {side} x {side} tokens cannot start {codes} codes: raise kmeans_batches or "
                "batch_size"
            )
    return model


def _settings_of(recipe: TokenizerRecipe) -> TokenizerSettings | PatchSettings:
    return settings_of(PatchSettings if recipe.tokenizer == PatchVQModel.__name__ else TokenizerSettings, recipe)


def fit_tokenizer(
    recipe: TokenizerRecipe, data: Pixels, heldout: Pixels, out: Path, device: str
) -> LlamaGenVQModel | VARVQModel | PatchVQModel:
    """Train the tokenizer of a recipe on images, and save it in `out`/tokenizer/tokenizer."""
    settings = _settings_of(recipe)
    parts = recipe.model, data, heldout, settings, out / "tokenizer", device
    if isinstance(settings, PatchSettings):
        return train_patches(*parts)
    return train_tokenizer(*parts, model_class=NETWORKS[recipe.tokenizer], start_from=recipe.start_from)


def run_tokenizer(
    recipe: TokenizerRecipe, train: str, heldout: str, out: Path, device: str, **options: Any
) -> LlamaGenVQModel | VARVQModel | PatchVQModel:
    """Train the tokenizer of a recipe on data sets, see `open_both`, and save it in `out`/tokenizer/tokenizer.

    Raises:
        ValueError: if a setting or the data do not fit.
    """
    new_tokenizer(recipe)
    data = open_both(train, heldout, recipe.image_size, seed=_settings_of(recipe).seed, **options)
    return fit_tokenizer(recipe, *data, out, device)
