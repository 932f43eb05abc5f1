"""The sixty unscripted prompts, and the sheet on which they are judged."""

from pathlib import Path

import first_prompts
from PIL import Image

from arimage.eval.runs.prompts import read_prompts


PROMPTS = Path(first_prompts.__file__).with_name("first_prompts.txt")


def test_there_are_sixty_different_prompts():
    prompts = [row["prompt"] for row in read_prompts(PROMPTS)]
    assert len(prompts) == len(set(prompts)) == 60


def test_the_sheet_shows_every_picture_in_order_with_its_prompt():
    colours = ["red", "lime", "blue"] * 4
    sheet = first_prompts.sheet([Image.new("RGB", (64, 64), colour) for colour in colours], ["a prompt"] * 12)
    assert sheet.size == (1280, 288)
    assert [sheet.getpixel((64 + 128 * k, 64)) for k in range(3)] == [(255, 0, 0), (0, 255, 0), (0, 0, 255)]
    assert sheet.getpixel((64, 208)) == (0, 255, 0)
    assert sheet.crop((0, 128, 128, 144)).getextrema()[0][0] < 100
