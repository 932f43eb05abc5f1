"""The prompts of Emu3 (https://arxiv.org/abs/2409.18869): the names of its tokens, the sizes of its images and its
token ids."""

from typing import Any

from transformers import PreTrainedTokenizerFast

from ..text.checks import MAX_PROMPT_CHARACTERS, as_texts
from ..text.token_prompts import Ids, check_given_ids, check_negatives, encode_left, given_size, parse_ratio


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


def first_code_of(vocabulary: dict[str, int], count: int) -> int:
    """The id of image token 0 in a vocabulary with `count` image tokens."""
    codes: list[Any] = [vocabulary.get(CODE.format(code)) for code in range(count)]
    special = [vocabulary.get(name) for name in (BEGIN_OF_TEXT, BEGIN_OF_IMAGE, BEGIN_OF_CODES, END_OF_ROW)]
    if None in special or None in codes or codes != [codes[0] + code for code in range(count)]:
        raise ValueError(
            f"the model's vocabulary_map does not name {END_OF_ROW} and the other special tokens, and {count} image "
            "tokens in a row: convert the checkpoint again"
        )
    return codes[0]


def image_size(
    area: int, factor: int, height: int | None = None, width: int | None = None, ratio: str | None = None
) -> tuple[int, int]:
    """Height and width of an image in pixels: the given ones, or those of a ratio (by default "1:1") with an area of
    approximately `area`."""
    if height is None and width is None:
        across, down = parse_ratio(ratio)
        unit = (area / (across * down)) ** 0.5 / factor
        return factor * max(round(down * unit), 1), factor * max(round(across * unit), 1)
    return given_size(height, width, ratio, factor)


class Emu3Prompts:
    """Token ids of prompts and negative prompts, which end with the header of an image: its size in tokens. The
    tokenizer is None if prompts are given as token ids, which are below `vocab_size`."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast | None,
        vocabulary: dict[str, int],
        vocab_size: int,
        scale_factor: int,
    ):
        self.tokenizer, self.vocabulary = tokenizer, vocabulary
        self.vocab_size, self.scale_factor = vocab_size, scale_factor

    def encode(self, texts: list[str], size: tuple[int, int]) -> Ids:
        """Token ids [B, P] of texts, each with the header of an image of `size` (height, width), padded on the left,
        and their mask."""
        if self.tokenizer is None:
            raise ValueError("this pipeline has no tokenizer: give token ids")
        rows, columns = (side // self.scale_factor for side in size)
        texts = [f"{BEGIN_OF_TEXT}{text}{BEGIN_OF_IMAGE}{rows}*{columns}{BEGIN_OF_CODES}" for text in texts]
        return encode_left(self.tokenizer, texts)

    def ids(self, name: str, texts, ids, mask, size: tuple[int, int], suffix: str = "") -> Ids:
        """Checked token ids [B, P] of the argument `name` and their mask, from texts, to which `suffix` is added, or
        from ids."""
        ids_name = name.replace("prompt", "input_ids")
        if texts is not None:
            if self.tokenizer is None:
                raise ValueError(f"this pipeline has no tokenizer: give {ids_name}, not {name}")
            return self.encode([text + suffix for text in as_texts(texts, name, MAX_PROMPT_CHARACTERS)], size)
        header = None if self.tokenizer is None else self.encode([""], size)[0][0, 1:-1].tolist()
        return check_given_ids(ids_name, ids, mask, self.vocabulary[BEGIN_OF_CODES], self.vocab_size, header, size)

    def negative_ids(self, texts, ids, mask, size: tuple[int, int], count: int) -> Ids:
        """Checked token ids [1 or `count`, P] of the negative prompts, by default the authors', and their mask."""
        name = "negative_prompt" if ids is None else "negative_input_ids"
        if texts is None and ids is None:
            if self.tokenizer is None:
                raise ValueError("this pipeline has no tokenizer: give negative_input_ids, or guidance_scale=1")
            texts = NEGATIVE_PROMPT
        negative = self.ids("negative_prompt", texts, ids, mask, size)
        check_negatives(name, len(negative[0]), count)
        return negative
