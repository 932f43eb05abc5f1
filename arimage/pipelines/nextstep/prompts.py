"""The prompts of NextStep (https://arxiv.org/abs/2508.10711): a text, perhaps a reference image, and the size of the
image in tokens."""

import math
from typing import Any

from PIL import Image

from ..text.token_prompts import Ids, pad_left
from ..text.tokenizing import tokenize


IMAGE_AREA, BEGIN_OF_IMAGE, END_OF_IMAGE = "<|image_area|>", "<|begin_of_image|>", "<|end_of_image|>"
# Where a token of a reference image is, and in a prompt, where the image itself is.
PLACEHOLDER, REFERENCE = "<|image_placeholder|>", "<image>"


def shrink(name: str, image: Image.Image, side: int, multiple: int) -> Image.Image:
    """A reference image of at most about `side` x `side` pixels and of its own ratio, with sides that are multiples of
    `multiple`.

    Raises:
        ValueError: if it is very long; it begins with `name`.
    """
    factor = min(1.0, side / math.sqrt(image.width * image.height))
    width, height = (max(round(length * factor / multiple), 1) * multiple for length in image.size)
    if max(width, height) > 4 * side:
        raise ValueError(f"{name} has {image.width}x{image.height} pixels: crop it, so that it is not as long")
    if (width, height) == image.size:
        return image
    return image.resize((width, height), Image.Resampling.BICUBIC)


class NextStepPrompts:
    """Token ids of prompts, which end with the size of an image and the token that begins it.

    Args:
        tokenizer: the text tokenizer.
        repeats_bos: whether the text of a bos token is put before each prompt, as in NextStep-1.1. It has effect only
            with tokenizers that have one.
    """

    def __init__(self, tokenizer: Any, repeats_bos: bool):
        self.tokenizer, self._repeats_bos = tokenizer, repeats_bos
        self._begin, self.placeholder = self._id(BEGIN_OF_IMAGE), self._id(PLACEHOLDER)

    def with_reference(self, text: str, grid: tuple[int, int]) -> str:
        """A prompt with a reference image of `grid` (rows, columns) tokens in place of `REFERENCE`, or before it.

        Raises:
            ValueError: if the text has several places for it, or a placeholder of its own.
        """
        if PLACEHOLDER in text:
            raise ValueError(f"a prompt contains {PLACEHOLDER!r}, a special token of the model: leave it out")
        if text.count(REFERENCE) > 1:
            raise ValueError(
                f"a prompt says {REFERENCE!r} {text.count(REFERENCE)} times: write it once, where the reference image "
                "is, or leave it out"
            )
        rows, columns = grid
        image = f"{IMAGE_AREA}{rows}*{columns}{BEGIN_OF_IMAGE}{PLACEHOLDER * (rows * columns)}{END_OF_IMAGE}"
        return text.replace(REFERENCE, image) if REFERENCE in text else image + text

    def encode(self, texts: list[str], grid: tuple[int, int]) -> Ids:
        """Token ids [B, P] of texts for an image of `grid` (rows, columns) tokens, padded on the left, and their
        mask."""
        bos = self.tokenizer.bos_token
        # The authors cut the first token of the size if there is a bos token, whether or not the tokenizer added it.
        size = self._ids(f"{IMAGE_AREA}{grid[0]}*{grid[1]}")[bos is not None :]
        begin = bos if bos is not None and self._repeats_bos else ""
        rows = [[*self._ids(begin + text), *size, self._begin] for text in texts]
        return pad_left(rows, self.tokenizer.pad_token_id or 0)

    def _id(self, token: str) -> int:
        number = self.tokenizer.convert_tokens_to_ids(token)
        if number is None or number == self.tokenizer.unk_token_id:
            raise ValueError(f"the tokenizer has no {token!r}: convert the checkpoint again")
        return number

    def _ids(self, text: str) -> list[int]:
        return tokenize(self.tokenizer, text).input_ids
