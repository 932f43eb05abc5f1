"""The prompts of Lumina-DiMOO (https://arxiv.org/abs/2510.06308): its texts, the sequences before an image, and the
sizes of the pictures that it edits."""

import torch
from PIL import Image
from transformers import PreTrainedTokenizerBase

from ...media.limits import long_cropped
from ..text.tokenizing import check_special, tokenize
from .vocabulary import (
    BEGIN_OF_ANSWER,
    BEGIN_OF_IMAGE,
    END_OF_IMAGE,
    FIRST_CODE,
    ROW_END,
    TAGS,
    UNCONDITIONAL,
)


PATCH = 16
# Pictures to edit have about 256 parts of 32x32 pixels, and are up to four times as long as wide.
PART, PARTS, LONGEST = 32, 256, 4

GENERATE = "Generate an image according to the text prompt."
# What a task with this word in its name is called in a prompt; the first that fits.
TASKS = {
    "dense": "Perform dense prediction on the given images.",
    "control": "Generate an image according to the text prompt and the given control image.",
    "subject": "Generate an image according to the text prompt and the given object image.",
    "edit": "Generate an image applying the following editing instruction based on the original image.",
    "ref_transfer": "Transform the current image into the style of the provided image.",
    "multi_view": "Generate a view-image based on the given image.",
}
OTHER = "Generate an image according to the prompt and image."
STYLE = "image_ref_transfer"


def task_texts(task: str, prompt: str) -> tuple[str, str]:
    """The system's text and the user's for a task with pictures, as the authors word them: some tasks have a prompt of
    their own.

    Raises:
        ValueError: if a view has no name.
    """
    word = next((word for word in TASKS if word in task), None)
    if word == "dense":
        prompt = f"Generate a {task.partition('_')[0]} map according to the image."
    if word == "ref_transfer":
        prompt = TASKS[word]
    if word == "multi_view":
        view = task.partition("multi_view_")[2]
        if not view:
            raise ValueError(f'task is {task!r}: name the view, as in "multi_view_left"')
        prompt = f"Generate the {view} view based on the provided front view."
    return TASKS.get(word or "", OTHER), prompt


def edited_sizes() -> list[tuple[int, int]]:
    """Width and height of the pictures that the model edits, the widest first."""
    across, down, sizes = PARTS, 1, []
    while across:
        if max(across, down) <= LONGEST * min(across, down):
            sizes.append((across * PART, down * PART))
        across, down = (across, down + 1) if across * (down + 1) <= PARTS else (across - 1, down)
    return sizes


def crop_picture(image: Image.Image) -> Image.Image:
    """A picture to edit, scaled to cover the size of the nearest ratio and cropped at its centre. The authors crop at
    a random place."""

    def fit(size: tuple[int, int]) -> tuple[float, tuple[int, int]]:
        factors = size[0] / image.width, size[1] / image.height
        return min(factors) / max(factors), size

    width, height = max(edited_sizes(), key=fit)
    image = long_cropped(image, (height, width))
    while min(image.width // width, image.height // height) >= 2:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = max(width / image.width, height / image.height)
    # One side is exact, and the other one never too short.
    sides = (max(round(image.width * scale), width), max(round(image.height * scale), height))
    image = image.resize(sides, Image.Resampling.BICUBIC)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))


def picture_ids(codes: torch.LongTensor) -> list[int]:
    """The token ids of a picture in a prompt, from its codes [h, w]."""
    rows = [token for row in codes.tolist() for token in (*(FIRST_CODE + code for code in row), ROW_END)]
    return [BEGIN_OF_IMAGE, *rows, END_OF_IMAGE]


class LuminaDiMOOPrompts:
    """Token ids of prompts.

    Args:
        tokenizer: the text tokenizer.

    Raises:
        ValueError: if it lacks one of the tags of a prompt.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        for tag in TAGS:
            if len(tokenize(tokenizer, tag, add_special_tokens=False).input_ids) != 1:
                raise ValueError(f"the tokenizer has no token {tag!r}: give the one of Lumina-DiMOO")

    def text_ids(self, system: str, prompt: str | None) -> list[int]:
        """The ids of a text; `prompt` None is that of the branch without a prompt.

        Raises:
            ValueError: if the prompt contains a special token.
        """
        opened = f"<system>{system}</system><user>"
        if prompt is None:
            [end] = tokenize(self.tokenizer, "</user>", add_special_tokens=False).input_ids
            return [*tokenize(self.tokenizer, opened).input_ids, UNCONDITIONAL, end]
        check_special(self.tokenizer, prompt)
        return tokenize(self.tokenizer, f"{opened}{prompt}</user>").input_ids

    def prefix(self, system: str, prompt: str | None, pictures: list[list[int]] | None = None) -> torch.LongTensor:
        """All ids [P] before the first place of an image, with the ids of `pictures` inside the text."""
        *text, end = self.text_ids(system, prompt)
        shown = [token for picture in pictures or () for token in picture]
        return torch.tensor([*text, *shown, end, BEGIN_OF_ANSWER, BEGIN_OF_IMAGE])
