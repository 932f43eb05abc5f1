"""What an upscaler adds to bicubic interpolation of the images that a model of emoji decodes: on held-out pictures and
on generated images, whose tokens are the same for both.

python recipes/emoji/tools/upscaling.py --train train.parquet --heldout heldout.parquet --out upscaling.png
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from emoji_quality import psnr
from PIL import Image

from arimage import AutoPipeline
from arimage.eval.metrics.standard_errors import Estimate, estimate_text, mean_estimate
from arimage.eval.runs.prompts import prompt_file, read_prompts
from arimage.pipelines.kinds.upscaling import UpscalingPipeline
from arimage.tokenizers.upscaler import ImageUpscaler
from arimage_emoji.metrics.classifier_emoji import EmojiClassifier
from arimage_emoji.metrics.emoji_kid import EmojiExtractor, emoji_kernel_distance
from arimage_emoji.metrics.reference import read_gallery
from arimage_emoji.metrics.retrieval import retrieval_hits
from arimage_emoji.training.captioned import load_captioned_images


SHOWN = (
    "a red heart",
    "pizza",
    "a house",
    "a castle",
    "a robot",
    "a butterfly",
    "a rocket",
    "a guitar",
    "a cat face",
    "a tiger face",
)


def interpolated(images: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Images [B, 3, H, W] in [0, 1] at another size, by bicubic interpolation."""
    return F.interpolate(images, size=size, mode="bicubic").clamp(0, 1)


def feature_distance(classifier: EmojiClassifier, images: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """The distance [B] of images [B, 3, H, W] in [0, 1]: squared distances of the unit vectors of channels after each
    convolution of the classifier, averaged over places and summed over convolutions. The classifier was trained on
    half the size of upscaled images, so that it looks at half of what it is used to at a time."""
    total, pair = torch.zeros(len(images)), torch.cat([images, others]) * 2 - 1
    for layer in classifier.convolutions:
        pair = layer(pair)
        if isinstance(layer, torch.nn.SiLU):
            one, other = F.normalize(pair, dim=1).chunk(2)
            total += (one - other).pow(2).sum(1).mean((1, 2))
    return total


def decode_both(pipe: UpscalingPipeline, prompts: list[str], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images of prompts [M, 3, H, W] in [0, 1] as decoded, and upscaled."""
    sizes = [], []
    for start in range(0, len(prompts), 24):
        for images, (height, width) in zip(sizes, reversed(pipe.image_sizes), strict=True):
            generator = torch.Generator().manual_seed(seed + start)
            call = {"generator": generator, "height": height, "width": width, "output_type": "pt"}
            images.append(pipe(prompts[start : start + 24], **call).images)
    return torch.cat(sizes[0]), torch.cat(sizes[1])


def to_pil(images: torch.Tensor) -> list[Image.Image]:
    return [Image.fromarray(image) for image in (images * 255).round().byte().permute(0, 2, 3, 1).numpy()]


def text(estimate: Estimate) -> str:
    return estimate_text(estimate.value, estimate.standard_error, estimate.interval)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", required=True)
    parser.add_argument("--heldout", required=True)
    parser.add_argument("--model", default="emoji-arpg")
    parser.add_argument("--upscaler", help="folder of an upscaler in place of the model's own")
    parser.add_argument("--style", default="noto")
    parser.add_argument("--count", type=int, default=336, help="how many of the prompts `emoji` are generated")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file for a picture of generated images, interpolated and upscaled")
    arguments = parser.parse_args()

    pipe = AutoPipeline.from_pretrained(arguments.model)
    pipe.set_progress_bar_config(disable=True)
    if arguments.upscaler:
        pipe.register_modules(upscaler=ImageUpscaler.from_pretrained(arguments.upscaler))
    if pipe.upscaler is None:
        raise SystemExit(
            f"{arguments.model} has no upscaler: give the folder of one, as in --upscaler run/model/upscaler"
        )
    size, extractor = pipe.image_sizes[0], EmojiExtractor()
    classifier = extractor.classifier
    rows = {"interpolated": [], "upscaled": []}

    heldout = load_captioned_images(arguments.heldout, size[0], styles=[arguments.style]).images / 255
    rebuilt = {name: [] for name in rows}
    for images in heldout.split(32):
        decoded = pipe.vq.decode(pipe.vq.encode(pipe.to_decoded_size(images) * 2 - 1))
        rebuilt["interpolated"].append(interpolated(decoded / 2 + 0.5, size))
        rebuilt["upscaled"].append((pipe.upscaler.upscale(decoded) / 2 + 0.5).clamp(0, 1))
    for name, parts in rebuilt.items():
        distances = torch.cat(
            [feature_distance(classifier, *pair) for pair in zip(parts, heldout.split(32), strict=True)]
        )
        rows[name] += [f"{psnr(heldout, torch.cat(parts)):.2f}", text(mean_estimate(distances.numpy()))]

    prompts = read_prompts(prompt_file("emoji"))[: arguments.count]
    names = [row["name"] for row in prompts]
    train = load_captioned_images(arguments.train, size[0], styles=[arguments.style])
    real = train.images[[train.names.index(name) for name in names]] / 255
    decoded, upscaled = decode_both(pipe, [row["prompt"] for row in prompts], arguments.seed)
    gallery, gallery_names = read_gallery()
    reference = extractor(to_pil(real)).numpy()
    for name, small, large in (
        ("interpolated", decoded, interpolated(decoded, size)),
        ("upscaled", upscaled, upscaled),
    ):
        features, wanted = (classifier.features(images * 2 - 1).numpy() for images in (large, real))
        rows[name].append(text(emoji_kernel_distance(features, wanted, names)))
        rows[name].append(text(emoji_kernel_distance(extractor(to_pil(small)).numpy(), reference, names)))
        hits = retrieval_hits(small, names, gallery, gallery_names)[:, 0]
        rows[name].append(text(mean_estimate(hits.numpy())))

    titles = [f"held-out PSNR, dB, at {size[0]} px", "feature distance ↓", f"kernel distance at {size[0]} px ↓"]
    print("| | " + " | ".join([*titles, "`emoji-kid` ↓", "`retrieval` ↑"]) + " |")
    print("| --- " * 6 + "|")
    for name, figures in rows.items():
        print(f"| {name} | " + " | ".join(figures) + " |")
    if arguments.out:
        decoded, upscaled = decode_both(pipe, list(SHOWN), arguments.seed)
        sheet = torch.cat([interpolated(decoded, size), upscaled]).unflatten(0, (2, -1))
        Image.fromarray((sheet.permute(0, 3, 1, 4, 2).flatten(0, 1).flatten(1, 2) * 255).round().byte().numpy()).save(
            arguments.out
        )


if __name__ == "__main__":
    main()
