"""The prompts of Lumina-mGPT (https://arxiv.org/abs/2408.02657): the sizes of its images, its tasks and its token
ids."""

import itertools

import torch

from .base import BEGIN_OF_IMAGE


# The names of tokens in the vocabulary, which are those of Chameleon in both versions.
ROW_END = "<reserved08799>"
# The token for a height or width of `number - FIRST_SIZE` times PATCH pixels.
SIZE = "<reserved{:05d}>"
FIRST_SIZE = 8800
PATCH = 32

PROMPT = "Generate an image of {width}x{height} according to the following prompt:\n{prompt}"
PANELS = (
    "Generate a dual-panel image of {width}x{height} where the <{shown} half> displays a <{what}>, while the "
    "<{kept} half> retains the original image for direct visual comparison:\n{prompt}"
)
TASKS = {
    "depth": "depth map",
    "canny": "canny edge map",
    "hed": "hed edge map",
    "pose": "pose estimation map",
    "subject": "Bubbly and effervescent with a sparkling allure.",
}


def trained_sizes(image_size: int) -> list[tuple[int, int]]:
    """The sizes (height, width) in pixels that weights for squares of `image_size` were trained for, the square first:
    multiples of 32, as large as the area allows and up to four times as long as wide."""
    side = image_size // PATCH
    sizes = [
        (PATCH * height, PATCH * width)
        for height in range(1, side**2 + 1)
        for width in range(max(1, side**2 // (height + 1)), side**2 // height + 1)
        if max(height, width) <= 4 * min(height, width)
    ]
    return list(dict.fromkeys([(PATCH * side, PATCH * side), *sizes]))


class LuminaPrompts:
    """The texts of prompts, and the header of an image: its begin, height and width, by the transformer's
    `vocabulary_map`."""

    # How many tokens a header has.
    header_length = 3

    def __init__(self, vocabulary: dict[str, int]):
        names = itertools.takewhile(vocabulary.__contains__, (SIZE.format(FIRST_SIZE + n) for n in itertools.count(1)))
        self._begin = vocabulary[BEGIN_OF_IMAGE]
        # The pixels that each token of a size stands for.
        self._sizes = {vocabulary[name]: PATCH * n for n, name in enumerate(names, start=1)}

    def header(self, size: tuple[int, int]) -> list[int]:
        """The tokens between a prompt and its first image token."""
        tokens = {pixels: token for token, pixels in self._sizes.items()}
        return [self._begin, *(tokens[side] for side in size)]

    def check_size(
        self, height: int | None, width: int | None, square: int, headers: torch.LongTensor | None
    ) -> tuple[int, int]:
        """Height and width of images: those given, those in the `headers` [B, 3] of prompts, or the square."""
        announced = None if headers is None else self._announced_size(headers)
        rows, columns = announced or (square, square)
        size = (rows if height is None else height, columns if width is None else width)
        if announced not in (None, size):
            raise ValueError(
                f"height and width are {height} and {width} but input_ids end with a size of "
                f"{announced[0]}x{announced[1]}: leave them out"
            )
        if not all(side in self._sizes.values() for side in size):
            raise ValueError(
                f"height and width are {size[0]} and {size[1]}: give multiples of {PATCH} up to "
                f"{max(self._sizes.values())}, such as those of pipe.image_sizes"
            )
        return size

    def _announced_size(self, headers: torch.LongTensor) -> tuple[int, int]:
        announced = {(self._sizes.get(height), self._sizes.get(width)) for _, height, width in headers.tolist()}
        height, width = announced.pop()
        if announced or height is None or width is None:
            raise ValueError("input_ids end with tokens of no size, or of different sizes: give images of one size")
        return height, width

    def text(self, prompt: str, size: tuple[int, int], task: str | None = None, given: bool = False) -> str:
        """The text of a prompt for an image of `size` (height, width). With a `task` it describes two panels; with
        `given` the upper one is an image of the user."""
        fields = {"height": size[0], "width": size[1], "prompt": prompt}
        if task is None:
            return PROMPT.format(**fields)
        shown, kept = ("upper", "lower") if given else ("lower", "upper")
        return PANELS.format(shown=shown, kept=kept, what=TASKS[task], **fields)
