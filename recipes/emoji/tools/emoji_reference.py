"""The figures of the card of assets/emoji-reference, from the training set of the packaged models.

python recipes/emoji/tools/emoji_reference.py --train train.parquet
"""

import argparse

import numpy as np
import torch
from emoji_quality import caption_retrieval, retrieval_accuracy
from PIL import Image, ImageFilter

from arimage import AutoPipeline
from arimage.training.data.pictures import to_unit_range
from arimage_emoji.metrics.emoji_kid import EmojiExtractor, emoji_kernel_distance
from arimage_emoji.metrics.reference import read_gallery, reference_features
from arimage_emoji.training.captioned import ImageCaptions, load_captioned_images


def pictures(images: torch.Tensor) -> list[Image.Image]:
    """uint8 [M, 3, S, S] as pictures."""
    return [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in images]


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", required=True)
    parser.add_argument("--count", type=int, default=200)
    arguments = parser.parse_args()

    part = {"skin_tones": False, "groups": ["smileys-emotion", "animals-nature", "food-drink"]}
    learned = load_captioned_images(arguments.train, 64, ["noto"], **part)
    whole = load_captioned_images(arguments.train, 64, ["noto"])
    pipe = AutoPipeline.from_pretrained("emoji-llamagen")
    pipe.set_progress_bar_config(disable=True)

    extractor, reference = EmojiExtractor(), reference_features()
    noise = np.random.default_rng(0).normal(size=(len(learned), 64, 64, 3))
    own = pictures(learned.images)
    sets = {"the reference pictures": own}
    batches = learned.images.split(64)
    rebuilt = torch.cat([pipe.vq.decode(pipe.vq.encode(to_unit_range(batch))) for batch in batches])
    sets["after the tokenizer of emoji-llamagen"] = pictures(((rebuilt.clamp(-1, 1) + 1) * 127.5).round().byte())
    for level in (10, 20, 60):
        noisy = (learned.images.permute(0, 2, 3, 1).numpy() + level * noise).clip(0, 255).astype(np.uint8)
        sets[f"noise of {level} levels"] = [Image.fromarray(image) for image in noisy]
    for radius in (1, 2, 3):
        sets[f"blur of {radius} pixels"] = [image.filter(ImageFilter.GaussianBlur(radius)) for image in own]
    sets["half of the pictures, twice"] = own[: len(own) // 2] * 2
    for style in ("twemoji", "blob"):
        other = load_captioned_images(arguments.train, 64, [style], **part)
        sets[f"the same concepts in {style} style"] = pictures(other.images)
    others = [i for i, name in enumerate(whole.names) if name not in set(learned.names)]
    sets["the other noto pictures"] = pictures(whole.images[others])
    for name, images in sets.items():
        features = torch.cat([extractor(images[start : start + 64]) for start in range(0, len(images), 64)]).numpy()
        found = emoji_kernel_distance(features, reference, [str(i) for i in range(len(images))])
        print(f"emoji-kid, {name}: {found.value:.3f} ({len(images)} images)")

    gallery, names = read_gallery()
    print(
        "retrieval, the reference pictures:", retrieval_accuracy(learned.images / 255, learned.names, gallery, names)
    )
    packaged = ImageCaptions((gallery * 255).round().byte(), None, None, names, names, None)
    found = caption_retrieval(pipe, learned, packaged, count=arguments.count)
    print(f"retrieval, {arguments.count} samples:", {name: found[name] for name in ("top-1", "top-5")})


if __name__ == "__main__":
    main()
