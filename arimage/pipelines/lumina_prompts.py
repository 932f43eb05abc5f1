"""The prompts of Lumina-mGPT (https://arxiv.org/abs/2408.02657): the sizes of its images, its tasks and its token
ids."""

import itertools

import torch
from diffusers import VQModel
from transformers import ChameleonForConditionalGeneration, PreTrainedTokenizerBase

from .abilities import EDITING, TOKEN_SAMPLING, Abilities
from .chameleon import BEGIN_OF_IMAGE, ChameleonPipeline
from .checks import as_texts


# Names of tokens in the vocabulary, which are those of Chameleon in both versions.
ROW_END = "<reserved08799>"
# The image is so many times PATCH pixels high or wide.
SIZE = "<reserved{:05d}>"
FIRST_SIZE = 8800
PATCH = 32

PROMPT = "Generate an image of {width}x{height} according to the following prompt:\n{prompt}"
PANELS = (
    "Generate a dual-panel image of {width}x{height} where the <{shown} half> displays a <{what}>, while the <{kept} "
    "half> "
    "retains the original image for direct visual comparison:\n{prompt}"
)
TASKS = {
    "depth": "depth map",
    "canny": "canny edge map",
    "hed": "hed edge map",
    "pose": "pose estimation map",
    "subject": "Bubbly and effervescent with a sparkling allure.",
}


class LuminaPrompts(ChameleonPipeline):
    """The part of `LuminaMGPTPipeline` that reads prompts and sizes."""

    # The begin of an image, its height and its width.
    _header_length = 3

    def __init__(
        self,
        transformer: ChameleonForConditionalGeneration,
        vq: VQModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        image_size: int = 768,
    ):
        super().__init__(transformer, vq, tokenizer, image_size)
        # Pixels that each token of a size stands for.
        names = itertools.takewhile(
            self._vocabulary.__contains__, (SIZE.format(FIRST_SIZE + n) for n in itertools.count(1))
        )
        self._sizes = {self._vocabulary[name]: PATCH * n for n, name in enumerate(names, start=1)}

    @property
    def abilities(self) -> Abilities:
        has_tasks = self.vq.config.norm_type == "spatial"  # Lumina-mGPT 2.0
        return Abilities("tokens", TOKEN_SAMPLING | EDITING | ({"task"} if has_tasks else set()))

    @property
    def image_sizes(self) -> list[tuple[int, int]]:
        """The sizes (height, width) in pixels that the weights were trained for, the square first: multiples of 32, as
        large as the area allows and up to four times as long as wide."""
        side = self.config.image_size // PATCH
        sizes = [
            (PATCH * height, PATCH * width)
            for height in range(1, side**2 + 1)
            for width in range(max(1, side**2 // (height + 1)), side**2 // height + 1)
            if max(height, width) <= 4 * min(height, width)
        ]
        return list(dict.fromkeys([(PATCH * side, PATCH * side), *sizes]))

    def check_size(
        self, height: int | None, width: int | None, input_ids: torch.LongTensor | None = None
    ) -> tuple[int, int]:
        """Height and width of the images of a call: those given, those at the end of the token ids, or the square.

        Raises:
            ValueError: if the vocabulary has no tokens for them, or the prompts end with others.
        """
        announced = self._announced_size(input_ids)
        square = (self.config.image_size,) * 2
        rows, columns = announced or square
        size = (rows if height is None else height, columns if width is None else width)
        if announced not in (None, size):
            raise ValueError(
                f"height and width are {height} and {width} but input_ids end with a size of "
                f"{announced[0]}x{announced[1]}: "
                "leave them out"
            )
        largest = max(self._sizes.values())
        if not all(side in self._sizes.values() for side in size):
            raise ValueError(
                f"height and width are {size[0]} and {size[1]}: give multiples of {PATCH} up to {largest}, such as "
                "those of "
                "pipe.image_sizes"
            )
        return size

    def _announced_size(self, input_ids: torch.LongTensor | None) -> tuple[int, int] | None:
        if input_ids is None or not self.has_header(input_ids):
            return None
        announced = {(self._sizes.get(height), self._sizes.get(width)) for height, width in input_ids[:, -2:].tolist()}
        height, width = announced.pop()
        if announced or height is None or width is None:
            raise ValueError("input_ids end with tokens of no size, or of different sizes: give images of one size")
        return height, width

    def header(self, size: tuple[int, int]) -> list[int]:
        """The tokens between a prompt and its first image token."""
        tokens = {pixels: token for token, pixels in self._sizes.items()}
        return [self._vocabulary[BEGIN_OF_IMAGE], *(tokens[side] for side in size)]

    def _text(self, prompt: str, size: tuple[int, int], task: str | None, given: bool) -> str:
        fields = {"height": size[0], "width": size[1], "prompt": prompt}
        if task is None:
            return PROMPT.format(**fields)
        shown, kept = ("upper", "lower") if given else ("lower", "upper")
        return PANELS.format(shown=shown, kept=kept, what=TASKS[task], **fields)

    def encode_prompt(
        self, prompt: str | list[str], size: tuple[int, int], task: str | None = None, given: bool = False
    ) -> tuple[torch.LongTensor, torch.LongTensor]:
        """Token ids [B, P] of texts up to the turn end, padded on the left, and their mask. With a `task` they
        describe two panels; with `given` the upper one is an image of the user."""
        return self.encode_texts([self._text(text, size, task, given) for text in as_texts(prompt)])
