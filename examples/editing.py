"""Generate images, then generate parts of them again: python examples/editing.py docs/images/editing.png [MODEL
...]"""

import sys

import torch
from diffusers.utils import make_image_grid
from PIL import Image, ImageChops

from arimage import AutoPipeline


SIZE = 128
# The first prompt, the second, and the box (left, upper, right, lower) that is generated again, or all but it.
EDITS = [
    ("a red heart", "a blue heart", (0, 64, 128, 128), False),
    ("grinning face", "loudly crying face", (0, 60, 128, 128), False),
    ("tomato", "red apple", (0, 0, 128, 56), False),
    ("a red heart", "a red heart", (48, 40, 80, 72), False),
    ("pizza", "pizza", (32, 32, 96, 96), True),
]


def main(path: str, *models: str) -> None:
    rows = []
    models = models or ("emoji-llamagen", "emoji-var", "emoji-arpg")
    for name in models:
        pipe = AutoPipeline.from_pretrained(name)
        pipe.set_progress_bar_config(disable=True)
        columns = []
        for first, then, box, outside in EDITS:
            image = pipe(first, generator=torch.Generator().manual_seed(0)).images[0]
            mask = Image.new("L", (SIZE, SIZE))
            mask.paste(255, box)
            if outside:
                mask = ImageChops.invert(mask)
            edited = pipe(then, image=image, mask_image=mask, generator=torch.Generator().manual_seed(1)).images[0]
            shown = Image.composite(Image.new("RGB", image.size, "#8899aa"), image, mask)
            columns += [image, shown, edited]
        rows += columns
    make_image_grid(rows, rows=len(models), cols=3 * len(EDITS)).save(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
