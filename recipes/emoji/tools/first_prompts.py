"""One sheet of the pictures of a model for the sixty prompts of first_prompts.txt, each with its prompt, to be judged
by eye.

python recipes/emoji/tools/first_prompts.py --model run/model --out first_prompts.png
"""

import argparse
from pathlib import Path

import torch
from PIL import Image, ImageDraw

from arimage import AutoPipeline
from arimage.eval.runs.prompts import read_prompts


COLUMNS, TILE, LINE = 10, 128, 16


def sheet(images: list[Image.Image], prompts: list[str]) -> Image.Image:
    """The images, 128 pixels large and ten to a row, with their prompts below."""
    rows = -(-len(images) // COLUMNS)
    canvas = Image.new("RGB", (COLUMNS * TILE, rows * (TILE + LINE)), "white")
    draw = ImageDraw.Draw(canvas)
    for k, (image, prompt) in enumerate(zip(images, prompts, strict=True)):
        down, across = divmod(k, COLUMNS)
        place = across * TILE, down * (TILE + LINE)
        canvas.paste(image.convert("RGB").resize((TILE, TILE), Image.Resampling.NEAREST), place)
        draw.text((place[0] + 2, place[1] + TILE + 2), prompt, fill="black")
    return canvas


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="emoji-llamagen")
    parser.add_argument("--prompts", type=Path, default=Path(__file__).with_name("first_prompts.txt"))
    parser.add_argument("--out", type=Path, default=Path("first_prompts.png"))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    prompts = [row["prompt"] for row in read_prompts(arguments.prompts)]
    pipe = AutoPipeline.from_pretrained(arguments.model)
    images = pipe(prompts, generator=torch.Generator().manual_seed(arguments.seed)).images
    sheet(images, prompts).save(arguments.out)


if __name__ == "__main__":
    main()
