"""The prompts of Emu3.5 (https://arxiv.org/abs/2510.26583): the names of its tokens, the sizes of its images and its
token ids."""

import torch
from PIL import Image
from transformers import PreTrainedTokenizerFast

from ..text.token_prompts import Ids, check_given_ids, given_size, pad_left, parse_ratio
from ..text.tokenizing import tokenize


# The names of the special tokens in a prompt, by what they stand for in `token_ids`.
TOKENS = {
    "bos": "<|extra_203|>",
    "row_end": "<|extra_200|>",
    "begin_of_image": "<|image start|>",
    "begin_of_codes": "<|image token|>",
    "end_of_image": "<|image end|>",
    "begin_of_answer": "<|extra_100|>",
}
FACTOR, MAX_SIDE = 16, 2048
# The trained sizes, by width to height, in rows and columns of tokens.
TRAINED_AREA = 1024 * 1024
TRAINED = {
    "1:1": (64, 64),
    "4:3": (55, 73),
    "3:4": (73, 55),
    "3:2": (52, 78),
    "2:3": (78, 52),
    "16:9": (47, 85),
    "9:16": (85, 47),
    "21:9": (41, 97),
}


def token_ids_of(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    """The ids of the tokens of a prompt. Those of the codes, which the tokenizer does not hold, follow all others."""
    vocabulary = tokenizer.get_vocab()
    missing = set(TOKENS.values()) - vocabulary.keys()
    if missing:
        raise ValueError(f"the tokenizer has no {min(missing)!r}: convert the checkpoint again")
    return {name: vocabulary[token] for name, token in TOKENS.items()} | {"first_code": len(tokenizer)}


def image_size(
    area: int, height: int | None = None, width: int | None = None, ratio: str | None = None
) -> tuple[int, int]:
    """Height and width of an image in pixels: the given ones, or those of a ratio (by default "1:1") with an area of
    approximately `area`, as the authors round them."""
    if height is not None or width is not None:
        return given_size(height, width, ratio, FACTOR, MAX_SIDE)
    ratio = "1:1" if ratio is None else ratio
    across, down = parse_ratio(ratio)
    if area == TRAINED_AREA and ratio in TRAINED:
        rows, columns = TRAINED[ratio]
    else:
        rows, columns = (max(side // FACTOR, 1) for side in _sides(area, across, down))
    if max(rows, columns) * FACTOR > MAX_SIDE:
        raise ValueError(f"ratio is {ratio!r}, whose longer side is above {MAX_SIDE} pixels: give one nearer to 1:1")
    return rows * FACTOR, columns * FACTOR


def smart_resize(name: str, image: Image.Image, area: int) -> Image.Image:
    """A reference image with its own ratio and an area of approximately `area`, as the authors round its sides."""
    height, width = (max((side + FACTOR // 2) // FACTOR, 1) * FACTOR for side in _sides(area, *image.size))
    if max(height, width) > MAX_SIDE:
        raise ValueError(
            f"{name} has {image.width}x{image.height} pixels, which become {width}x{height}: crop it, so that its "
            f"sides become {MAX_SIDE} pixels at most"
        )
    return image.resize((width, height), Image.Resampling.BICUBIC)


def _sides(area: int, width: int, height: int) -> tuple[int, int]:
    """Height and width in whole pixels of a ratio of width to height."""
    ratio = width / height
    down = int((area / ratio) ** 0.5)
    return down, int(down * ratio)


class Emu35Prompts:
    """Token ids of prompts and negative prompts, which end with the header of an image: its size in tokens. The
    tokenizer is None if prompts are given as token ids, which are below `vocab_size`; `token_ids` are those of
    `token_ids_of`."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast | None, token_ids: dict[str, int], vocab_size: int):
        self.tokenizer, self.token_ids, self.vocab_size = tokenizer, token_ids, vocab_size

    def text_ids(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise ValueError("this pipeline has no tokenizer: give input_ids, not a prompt")
        return tokenize(self.tokenizer.encode, text, add_special_tokens=False)

    def header(self, rows: int, columns: int) -> list[int]:
        """What precedes the codes of an image."""
        ids = self.token_ids
        return [ids["begin_of_image"], *self.text_ids(f"{rows}*{columns}"), ids["begin_of_codes"]]

    def image_ids(self, codes: torch.LongTensor) -> list[int]:
        """The ids of a reference image, from its codes [h, w]. No row end follows the last row."""
        first, rows = self.token_ids["first_code"], codes.tolist()
        ids = [token for row in rows for token in (*(code + first for code in row), self.token_ids["row_end"])]
        return [*self.header(len(rows), len(rows[0])), *ids[:-1], self.token_ids["end_of_image"]]

    def encode(
        self, texts: list[str], size: tuple[int, int], images: list[list[int]] | None = None, negative: bool = False
    ) -> Ids:
        """Token ids [B, P] of texts, or of negative ones, with the ids of their reference images (`images`, one list
        for every text) and the header of an image of `size` (height, width), padded on the left, and their mask."""
        task = "" if negative else " for t2i task" if images is None else " for x2i task"
        begin, ids = f"You are a helpful assistant{task}. USER: ", self.token_ids
        header = self.header(size[0] // FACTOR, size[1] // FACTOR)
        rows = []
        for i, text in enumerate(texts):
            end = f"{text} ASSISTANT: "
            # Text before and after images is split into tokens apart.
            said = (
                self.text_ids(begin + end)
                if images is None
                else [*self.text_ids(begin), *images[i], *self.text_ids(end)]
            )
            rows.append([ids["bos"], *said, ids["begin_of_answer"], *header])
        return pad_left(rows, ids["bos"])

    def check_ids(self, name: str, ids: torch.LongTensor, mask: torch.Tensor | None, size: tuple[int, int]) -> Ids:
        """See `check_given_ids`."""
        header = None if self.tokenizer is None else self.header(size[0] // FACTOR, size[1] // FACTOR)[:-1]
        return check_given_ids(name, ids, mask, self.token_ids["begin_of_codes"], self.vocab_size, header, size)
