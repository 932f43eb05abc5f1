"""The figures of a packaged model's card, from the parquet files of the emoji data set.

python recipes/emoji/tools/packaged_model.py --train train.parquet --heldout heldout.parquet
"""

import argparse
import json

import torch
from emoji_quality import caption_retrieval, patch_kmeans_reconstructions, psnr

from arimage import AutoPipeline
from arimage.training.data.pictures import to_unit_range
from arimage_emoji.training.captioned import load_captioned_images
from arimage_emoji.training.recipe import load_recipe


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", required=True)
    parser.add_argument("--heldout", required=True)
    parser.add_argument("--model", default="emoji-llamagen")
    parser.add_argument("--recipe", default="emoji-llamagen")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--decoding", nargs="+", default=["ar", "sjd-coupled"])
    arguments = parser.parse_args()

    recipe = load_recipe(arguments.recipe)
    size = recipe["image_size"]
    pipe = AutoPipeline.from_pretrained(arguments.model)
    pipe.set_progress_bar_config(disable=True)
    trained_on = load_captioned_images(arguments.train, size, **recipe["transformer"]["data"])
    gallery = load_captioned_images(arguments.train, size, **recipe["tokenizer"]["data"])
    heldout = load_captioned_images(arguments.heldout, size, **recipe["tokenizer"]["data"]).images
    figures = {"parameters": {}, "retrieval": {}}
    for name, part in pipe.components.items():
        if isinstance(part, torch.nn.Module):
            figures["parameters"][name] = sum(p.numel() for p in part.parameters())
    for decoding in arguments.decoding:
        figures["retrieval"][decoding] = caption_retrieval(
            pipe, trained_on, gallery, count=arguments.count, decoding=decoding
        )
    rebuilt = torch.cat([pipe.vq.decode(pipe.vq.encode(to_unit_range(batch))) for batch in heldout.split(64)])
    floor = patch_kmeans_reconstructions(
        gallery.images / 255, heldout / 255, pipe.vq.scale_factor, pipe.vq.config.codebook_size
    )
    figures["held-out PSNR"] = psnr(heldout / 255, (rebuilt.clamp(-1, 1) + 1) / 2)
    figures["held-out PSNR of patch k-means"] = psnr(heldout / 255, floor)
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
