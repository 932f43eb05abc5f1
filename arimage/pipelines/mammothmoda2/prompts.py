"""The prompts of MammothModa2: its template, its token ids, and the header that announces the grid of an image."""

import numbers
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerFast

from ..text.checks import MAX_PROMPT_CHARACTERS, as_texts, check_token_ids
from ..text.token_prompts import encode_left
from ..text.tokenizing import check_special


IM_START = "<|im_start|>"
BEGIN_OF_CODES = "<|image token|>"
END_OF_IMAGE = "<|image end|>"
END_OF_ROW = "<|endofline|>"
SYSTEM = "You are a helpful image generator."
# The authors' negative prompt, word by word.
NEGATIVE_PROMPT = (
    "deformed, blurry, over saturation, bad anatomy, disfigured, poorly drawn face, mutation, mutated, extra_limb, "
    "ugly, poorly drawn hands, fused fingers, messy drawing, broken legs censor, censored, censor_bar Create an image "
    "from the instruction."
)
# For a tokenizer without the published template.
CHAT_TEMPLATE = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\n" + SYSTEM + "<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% for part in message.content %}{{ part.text }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if t2i_generate %}<|image start|>{{ ar_width }}*{{ ar_height }}<|image token|>{% endif %}{% endif %}"
)
# Tokens of the header of a grid with two digits a side, from <|im_start|> to <|image token|>.
HEADER = 10
MAX_GRID = 99

Grid = tuple[int, int]


@dataclass(frozen=True)
class MammothModa2Prompt:
    """What the decoder reads about an image besides its tokens.

    Attributes:
        ids: int64 [P], the prompt without padding.
        header: how many tokens at its end announce the image.
        negative: int64 [N], the negative prompt; None without one.
    """

    ids: torch.LongTensor
    header: int
    negative: torch.LongTensor | None


class MammothModa2Prompts:
    """Token ids of prompts and negative prompts.

    Args:
        tokenizer: the text tokenizer; None if prompts are given as token ids.
        trained: the trained grid (rows, columns) of tokens. Headers of others have as many digits.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast | None, trained: Grid):
        self.tokenizer, self.trained = tokenizer, trained

    def check_grid(self, grid: Grid | None) -> Grid:
        """Rows and columns of tokens of an image, by default the trained ones.

        Raises:
            ValueError: if the header cannot name this size.
        """
        if grid is None:
            return self.trained
        fits = (
            isinstance(grid, tuple | list)
            and len(grid) == 2
            and all(
                isinstance(side, numbers.Integral) and not isinstance(side, bool) and 1 <= side <= MAX_GRID
                for side in grid
            )
        )
        digits = [len(str(side)) for side in self.trained]
        if not fits or (self.tokenizer is not None and [len(str(side)) for side in grid] != digits):
            least, most = (1, MAX_GRID) if self.tokenizer is None else (10 ** (digits[0] - 1), 10 ** digits[0] - 1)
            raise ValueError(f"token_grid is {grid!r}: give rows and columns from {least} to {most}")
        return int(grid[0]), int(grid[1])

    def encode(self, texts: list[str], grid: Grid) -> tuple[torch.LongTensor, torch.LongTensor]:
        """Token ids [B, P] of texts with the header of a grid, padded on the left, and their mask.

        Raises:
            ValueError: if there is no tokenizer, a text contains a special token, or the tokenizer's template has no
                header.
        """
        return self._encode([[{"role": "user", "text": text}] for text in texts], grid)

    def header(self, grid: Grid) -> torch.LongTensor | None:
        """The token ids at the end of prompts that announce an image; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        ids = self.encode([""], grid)[0][0]
        start = self.tokenizer.convert_tokens_to_ids(IM_START)
        return ids[int((ids == start).nonzero()[-1]) :]

    def header_length(self, grid: Grid) -> int:
        header = self.header(grid)
        return HEADER if header is None else len(header)

    def ids(self, texts, ids, mask, grid: Grid) -> tuple[torch.LongTensor, torch.LongTensor]:
        """Checked token ids [B, P] of prompts, from texts or from ids, and their mask.

        Raises:
            ValueError: if they are not valid prompts, or their header is that of another grid.
        """
        if ids is None:
            if self.tokenizer is None:
                raise ValueError("this pipeline has no tokenizer: give input_ids, not prompt")
            return self.encode(as_texts(texts, limit=MAX_PROMPT_CHARACTERS), grid)
        check_token_ids("input_ids", ids, mask)
        header, length = self.header(grid), self.header_length(grid)
        check_token_ids("input_ids", ids, mask, last=int(ids[0, -1] if header is None else header[-1]))
        if ids.shape[1] < length:
            raise ValueError(
                f"input_ids have {ids.shape[1]} tokens: give prompts that end with the header of an image"
            )
        if header is not None and (ids[:, -length:] != header.to(ids.device)).any():
            raise ValueError(f"input_ids announce another grid than {grid[0]}x{grid[1]}: give token_grid")
        return ids, torch.ones_like(ids) if mask is None else mask.long()

    def negative_ids(self, texts, ids, mask, count: int) -> list[torch.LongTensor | None]:
        """The token ids [N] of the negative prompt of each of `count` prompts, by default the authors'; None where
        there are neither ids nor a tokenizer.

        Raises:
            ValueError: if they are not valid prompts, or their number is neither 1 nor `count`.
        """
        if texts is not None and ids is not None:
            raise ValueError("give either a negative_prompt or negative_input_ids")
        if texts is None and ids is None and self.tokenizer is None:
            return [None] * count
        if ids is None:
            texts = as_texts(NEGATIVE_PROMPT if texts is None else texts, "negative_prompt", MAX_PROMPT_CHARACTERS)
            system = {"role": "system", "text": SYSTEM}
            ids, mask = self._encode([[system, {"role": "user", "text": text}] for text in texts], None)
        else:
            check_token_ids("negative_input_ids", ids, mask)
        if len(ids) not in (1, count):
            raise ValueError(f"there are {len(ids)} negative prompts for {count} prompts: give one, or one for each")
        found = list(ids) if mask is None else unpadded(ids, mask)
        return found * count if len(found) < count else found

    def _encode(self, conversations: list[list[dict]], grid: Grid | None):
        """Token ids [B, P] of conversations, padded on the left, and their mask; with the header of a grid, if any."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise ValueError("this pipeline has no tokenizer: give token ids")
        settings, rendered = {}, []
        if grid is not None:
            settings = {"t2i_generate": True, "ar_height": grid[0], "ar_width": grid[1]}
        for messages in conversations:
            for message in messages:
                check_special(tokenizer, message["text"])
            content = [
                {"role": message["role"], "content": [{"type": "text", "text": message["text"]}]}
                for message in messages
            ]
            rendered.append(
                tokenizer.apply_chat_template(
                    content,
                    chat_template=tokenizer.chat_template or CHAT_TEMPLATE,
                    tokenize=False,
                    add_generation_prompt=grid is not None,
                    **settings,
                )
            )
            if grid is not None and not rendered[-1].endswith(BEGIN_OF_CODES):
                raise ValueError(
                    f"the tokenizer's chat_template does not end with {BEGIN_OF_CODES}: take the published one"
                )
        return encode_left(tokenizer, rendered)


def unpadded(ids: torch.LongTensor, mask: torch.Tensor) -> list[torch.LongTensor]:
    """The tokens [P] of each row of `ids` [B, P] that `mask` [B, P] shows."""
    return [row[seen.bool()] for row, seen in zip(ids, mask.to(ids.device), strict=True)]
