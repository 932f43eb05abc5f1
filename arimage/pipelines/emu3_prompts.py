"""The prompts of Emu3 (https://arxiv.org/abs/2409.18869): the names of its tokens, the sizes of its images and its
token ids."""

import numbers
import re
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedTokenizerFast

from .checks import MAX_PROMPT_CHARACTERS, MAX_SIDE, as_texts, check_token_ids
from .tokenizing import tokenize


# The names of the special tokens around image tokens, the same in every checkpoint.
BEGIN_OF_TEXT = "<|extra_203|>"
BEGIN_OF_IMAGE = "<|image start|>"
BEGIN_OF_CODES = "<|image token|>"
END_OF_ROW = "<|extra_200|>"
CODE = "<|visual token {:06d}|>"
# The authors' suffix of every prompt, and their negative prompt.
PROMPT_SUFFIX = " masterpiece, film grained, best quality."
NEGATIVE_PROMPT = (
    "lowres, bad anatomy, bad hands, text, error, missing fingers, extra digit, fewer digits, cropped, worst quality, "
    "low quality, normal quality, jpeg artifacts, signature, watermark, username, blurry."
)

# Ratios of the trained sizes, the default first.
RATIOS = ("1:1", "4:3", "3:4", "3:2", "2:3", "16:9", "9:16")

Ids = tuple[torch.LongTensor, torch.LongTensor]


def first_code_of(vocabulary: dict[str, int], count: int) -> int:
    """The id of image token 0 in a vocabulary with `count` image tokens.

    Raises:
        ValueError: if the vocabulary does not name all tokens of an image, or image tokens do not have consecutive
            ids.
    """
    codes: list[Any] = [vocabulary.get(CODE.format(code)) for code in range(count)]
    special = [vocabulary.get(name) for name in (BEGIN_OF_TEXT, BEGIN_OF_IMAGE, BEGIN_OF_CODES, END_OF_ROW)]
    if None in special or None in codes or codes != [codes[0] + code for code in range(count)]:
        raise ValueError(
            f"the model's vocabulary_map does not name {END_OF_ROW} and the like, and {count} visual tokens in a row: "
            "convert the checkpoint again"
        )
    return codes[0]


def image_size(
    area: int, factor: int, height: int | None = None, width: int | None = None, ratio: str | None = None
) -> tuple[int, int]:
    """Height and width of an image in pixels: the given ones, or those of a ratio (by default "1:1") with an area of
    approximately `area`.

    Raises:
        ValueError: see `parse_ratio` and `check_sides`.
    """
    if height is None and width is None:
        across, down = parse_ratio(ratio)
        unit = (area / (across * down)) ** 0.5 / factor
        return factor * max(round(down * unit), 1), factor * max(round(across * unit), 1)
    return check_sides(height, width, ratio, factor)


def parse_ratio(ratio: str | None) -> tuple[int, int]:
    """Width and height of a ratio, by default "1:1".

    Raises:
        ValueError: if it is not a ratio.
    """
    sides = re.fullmatch(r"([0-9]{1,4}):([0-9]{1,4})", str(ratio or "1:1"))
    across, down = map(int, sides.groups()) if sides else (0, 0)
    if not across * down:
        raise ValueError(f'ratio is {ratio!r}: give width and height of up to four digits, as in "16:9"')
    return across, down


def check_sides(
    height: int | None, width: int | None, ratio: str | None, factor: int, most: int = MAX_SIDE
) -> tuple[int, int]:
    """Height and width as they are given.

    Raises:
        ValueError: if they are not multiples of `factor` up to `most`, only one is given, or they are given with a
            ratio.
    """
    if ratio is not None or height is None or width is None:
        raise ValueError("the size is either height and width, both, or a ratio: give one of the two")
    if not all(
        isinstance(side, numbers.Integral) and 0 < side <= most and side % factor == 0 for side in (height, width)
    ):
        raise ValueError(f"height and width are {height} and {width}: give multiples of {factor} up to {most}")
    return height, width


def check_given_ids(
    name: str,
    ids: torch.LongTensor,
    mask: torch.Tensor | None,
    begin_of_codes: int,
    header: list[int] | None,
    size: tuple[int, int],
) -> Ids:
    """Token ids [B, P] of prompts and their mask, which is ones by default.

    Args:
        begin_of_codes: the last token of a prompt.
        header: the tokens before it, which hold the size of an image; None to check only the last one.
        size: height and width of that image.

    Raises:
        ValueError: if they are not token ids, are padded on the right, or do not end with the header.
    """
    check_token_ids(name, ids, mask, last=begin_of_codes)
    if header is not None:
        expected = torch.tensor([*header, begin_of_codes])
        if ids.shape[1] < len(expected) or (ids[:, -len(expected) :].cpu() != expected).any():
            raise ValueError(
                f"{name} announce an image of another size than {size[0]}x{size[1]}: give height and width"
            )
    return ids, torch.ones_like(ids) if mask is None else mask.long()


def check_negatives(name: str, negatives: int, prompts: int) -> None:
    """Refuse negative prompts that are neither one for all prompts nor one for each."""
    if negatives not in (1, prompts):
        raise ValueError(f"{name} holds {negatives} for {prompts} prompts: give one for all, or one for each")


class Emu3Prompts:
    """Token ids of prompts and negative prompts, which end with the header of an image: its size in tokens.

    Args:
        tokenizer: the text tokenizer; None if prompts are given as token ids.
        vocabulary: the model's `vocabulary_map`.
        scale_factor: pixels per token along each side.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast | None, vocabulary: dict[str, int], scale_factor: int):
        self.tokenizer, self.vocabulary, self.scale_factor = tokenizer, vocabulary, scale_factor

    def encode(self, texts: list[str], size: tuple[int, int]) -> Ids:
        """Token ids [B, P] of texts, each with the header of an image of `size` (height, width), padded on the left,
        and their mask."""
        if self.tokenizer is None:
            raise ValueError("this pipeline has no tokenizer: give token ids")
        rows, columns = (side // self.scale_factor for side in size)
        texts = [f"{BEGIN_OF_TEXT}{text}{BEGIN_OF_IMAGE}{rows}*{columns}{BEGIN_OF_CODES}" for text in texts]
        encoded = tokenize(
            self.tokenizer, texts, add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt"
        )
        return encoded.input_ids, encoded.attention_mask

    def ids(self, name: str, texts, ids, mask, size: tuple[int, int], suffix: str = "") -> Ids:
        """Checked token ids [B, P] of the argument `name` and their mask, from texts, to which `suffix` is added, or
        from ids.

        Raises:
            ValueError: if they are not valid prompts, or their header is for an image of another size.
        """
        ids_name = name.replace("prompt", "input_ids")
        if texts is not None:
            if self.tokenizer is None:
                raise ValueError(f"this pipeline has no tokenizer: give {ids_name}, not {name}")
            return self.encode([text + suffix for text in as_texts(texts, name, MAX_PROMPT_CHARACTERS)], size)
        header = None if self.tokenizer is None else self.encode([""], size)[0][0, 1:-1].tolist()
        return check_given_ids(ids_name, ids, mask, self.vocabulary[BEGIN_OF_CODES], header, size)

    def negative_ids(self, texts, ids, mask, size: tuple[int, int], count: int) -> Ids:
        """Checked token ids [1 or `count`, P] of the negative prompts, by default the authors', and their mask.

        Raises:
            ValueError: if they are not valid prompts, or their number is neither 1 nor `count`.
        """
        name = "negative_prompt" if ids is None else "negative_input_ids"
        if texts is None and ids is None:
            if self.tokenizer is None:
                raise ValueError("this pipeline has no tokenizer: give negative_input_ids, or guidance_scale=1")
            texts = NEGATIVE_PROMPT
        negative = self.ids("negative_prompt", texts, ids, mask, size)
        check_negatives(name, len(negative[0]), count)
        return negative


def stack(groups: list[Ids], padding: int, device: torch.device) -> Ids:
    """The ids of several groups and their masks, padded on the left to the same length, [groups * B, P]. B is the size
    of the first group; a group of one prompt is repeated."""
    length, count = max(ids.shape[1] for ids, _ in groups), len(groups[0][0])
    ids, masks = (
        torch.cat(
            [
                F.pad(group[i].to(device), (length - group[i].shape[1], 0), value=value).expand(count, -1)
                for group in groups
            ]
        )
        for i, value in enumerate((padding, 0))
    )
    return ids, masks
