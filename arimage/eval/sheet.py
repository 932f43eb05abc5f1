"""A sheet to look at: images, and under each its nearest training example."""

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from .runs.files import write_whole


# Prompts of a sheet, next to each other in a line, and images of each.
PROMPTS, LINE, IMAGES = 12, 3, 4
TITLE, GAP = 14, 6
# Letters that fit over the images.
LETTERS = 44


def chosen_images(prompts: np.ndarray) -> list[list[int]]:
    """The numbers of the first `IMAGES` images of each of the first `PROMPTS` prompts, of the prompt of each image."""
    found: dict[int, list[int]] = {}
    for number, prompt in enumerate(prompts.tolist()):
        if prompt in found or len(found) < PROMPTS:
            found.setdefault(prompt, []).append(number)
    return [numbers[:IMAGES] for numbers in found.values()]


def write_sheet(path: Path, cells: list[tuple[str, np.ndarray, np.ndarray]]) -> None:
    """Write a PNG with a cell for each prompt: its title, its images, and their nearest examples below them, uint8
    [K, 3, S, S]."""
    side = cells[0][1].shape[-1]
    width, height = IMAGES * side + GAP, TITLE + 2 * side + GAP
    lines = -(-len(cells) // LINE)
    sheet = Image.new("RGB", (LINE * width, lines * height), "lightgrey")
    draw = ImageDraw.Draw(sheet)
    for number, (title, *pictures) in enumerate(cells):
        left, top = number % LINE * width, number // LINE * height
        draw.text((left + 2, top), " ".join(title.split())[:LETTERS], "black")
        for row, pixels in enumerate(pictures):
            together = pixels.transpose(2, 0, 3, 1).reshape(side, -1, 3)
            sheet.paste(Image.fromarray(together), (left, top + TITLE + row * side))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda file: sheet.save(file, "PNG"))
