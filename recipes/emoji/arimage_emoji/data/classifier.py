"""Training of the classifier in whose features `arimage eval` compares emoji, and the reference that it compares them
to."""

import copy
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

from arimage.media.gallery import GALLERY_COLUMNS, GALLERY_SIZE
from arimage.training.data.pictures import to_unit_range
from arimage.training.loop import OptimizerSettings, fit
from arimage.training.processes import batch_generator
from arimage.training.resuming import of_data, of_settings

from ..metrics.classifier_emoji import EmojiClassifier
from ..metrics.emoji_kid import EmojiExtractor
from ..training.captioned import ImageCaptions, load_captioned_images


@dataclass(frozen=True)
class ClassifierSettings:
    """How the classifier is trained: on images turned by up to `max_degrees`, scaled by up to `max_scale` and shifted
    by up to `max_shift` of their size, but neither blurred nor noisy, which its features must notice."""

    optimizer: OptimizerSettings = OptimizerSettings(steps=5000, learning_rate=4e-3, ema_decay=0.995)
    batch_size: int = 64
    max_degrees: float = 12.0
    max_scale: float = 0.15
    max_shift: float = 0.08
    label_smoothing: float = 0.05
    seed: int = 0


class ClassifierTask(nn.Module):
    def __init__(
        self, model: EmojiClassifier, data: ImageCaptions, heldout: ImageCaptions, settings: ClassifierSettings
    ):
        super().__init__()
        self.model, self.data, self.settings = model, data, settings
        concepts = {base: label for label, base in enumerate(sorted(set(data.bases)))}
        self.labels = torch.tensor([concepts[base] for base in data.bases])
        known = [i for i, base in enumerate(heldout.bases) if base in concepts]
        self.heldout = heldout.images[known]
        self.heldout_labels = torch.tensor([concepts[heldout.bases[i]] for i in known])

    def batch(self, step: int) -> tuple[torch.Tensor, torch.LongTensor]:
        """Images [B, 3, S, S] in [-1, 1], turned, scaled and shifted at random on white, and their labels [B]."""
        settings = self.settings
        generator = batch_generator(settings.seed, step)
        index = torch.randint(len(self.labels), (settings.batch_size,), generator=generator)
        turn, scale, *shift = torch.rand(4, len(index), generator=generator) * 2 - 1
        angle = turn * math.radians(settings.max_degrees)
        scale = (scale * settings.max_scale).exp()
        cosine, sine = angle.cos() * scale, angle.sin() * scale
        across, down = (2 * settings.max_shift * part for part in shift)
        transforms = torch.stack([cosine, -sine, across, sine, cosine, down], -1).view(-1, 2, 3)
        # White is 0 where the grid leaves the picture.
        ink = 1 - to_unit_range(self.data.images[index])
        grid = F.affine_grid(transforms, list(ink.shape), align_corners=False)
        return 1 - F.grid_sample(ink, grid, align_corners=False), self.labels[index]

    def loss(self, step: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        images, labels = self.batch(step)
        logits = self.model(images.to(self.model.device, memory_format=torch.channels_last))
        labels = labels.to(logits.device)
        loss = F.cross_entropy(logits, labels, label_smoothing=self.settings.label_smoothing)
        return loss, {"loss": loss.detach(), "accuracy": (logits.argmax(-1) == labels).float().mean()}

    def report(self, step: int, out: Path) -> dict[str, float]:
        """Shares of the held-out images whose concept is the likeliest, or among the five likeliest."""
        logits = torch.cat(
            [self.model(to_unit_range(images).to(self.model.device)) for images in self.heldout.split(64)]
        )
        hits = logits.topk(min(5, logits.shape[1])).indices.cpu() == self.heldout_labels[:, None]
        return {
            "held-out top-1": float(hits[:, 0].float().mean()),
            "held-out top-5": float(hits.any(1).float().mean()),
        }


def train_classifier(
    data: ImageCaptions,
    heldout: ImageCaptions,
    out: str | Path,
    device: str = "cpu",
    settings: ClassifierSettings = ClassifierSettings(),
) -> EmojiClassifier:
    """Train an `EmojiClassifier` to classify the `bases` of `data`, whatever their style.

    `out` keeps checkpoint, log and curve; a second call with the same settings and data resumes the run. The held-out
    figures are of the images whose concept is in `data` too.
    """
    torch.manual_seed(settings.seed)
    model = EmojiClassifier(num_classes=len(set(data.bases)), image_size=data.images.shape[-1])
    nn.Module.to(model, device, memory_format=torch.channels_last)
    about = {**of_settings(settings), "data": of_data(data), "heldout": of_data(heldout)}
    task = ClassifierTask(model, data, heldout, settings)
    fit(task, settings.optimizer, out, about=about, seed=settings.seed)
    return nn.Module.to(model, memory_format=torch.contiguous_format)


def run_classifier(
    recipe: dict,
    train: str | Path,
    heldout: str | Path,
    out: str | Path,
    device: str,
    settings: ClassifierSettings = ClassifierSettings(),
) -> None:
    """Train a classifier on the untoned images of all styles; `out`/reference is what `arimage eval` needs to score a
    model that was trained by `recipe`."""
    size, out = recipe["image_size"], Path(out)
    learn, test = (load_captioned_images(path, size, skin_tones=False) for path in (train, heldout))
    model = train_classifier(learn, test, out / "classifier", device, settings)
    learned, gallery = (
        load_captioned_images(train, size, **recipe[part].get("data", {})) for part in ("transformer", "tokenizer")
    )
    write_reference(model, learned, gallery, out / "reference")


def write_reference(classifier: EmojiClassifier, learned: ImageCaptions, gallery: ImageCaptions, folder: Path) -> None:
    """What the metrics read: the classifier in float16, prompts and features of the images of `learned`, and the
    pictures of `gallery` at 32x32 by area averaging in one lossless sheet, of 32 levels a channel."""
    (folder / "classifier").mkdir(parents=True, exist_ok=True)
    copy.deepcopy(classifier).half().save_pretrained(folder / "classifier")
    rows = [
        {"prompt": captions[0], "name": name} for captions, name in zip(learned.captions, learned.names, strict=True)
    ]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    extractor = EmojiExtractor(folder)
    pictures = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in learned.images]
    features = torch.cat([extractor(pictures[start : start + 64]) for start in range(0, len(pictures), 64)])
    np.save(folder / "features.npy", features.numpy().astype(np.float16))
    (folder / "gallery.txt").write_text("\n".join(gallery.names) + "\n", encoding="utf-8")
    tiles = F.interpolate(gallery.images.float(), size=(GALLERY_SIZE, GALLERY_SIZE), mode="area")
    tiles = F.pad(tiles, [0] * 7 + [-len(tiles) % GALLERY_COLUMNS], value=255).unflatten(0, (-1, GALLERY_COLUMNS))
    sheet = tiles.permute(0, 3, 1, 4, 2).flatten(0, 1).flatten(1, 2)
    sheet = ((sheet * 31 / 255).round() * 255 / 31).round().byte()
    Image.fromarray(sheet.numpy()).save(folder / "gallery.webp", lossless=True, quality=100, method=6)
