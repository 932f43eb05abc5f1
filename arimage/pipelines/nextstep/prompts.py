"""The prompts of NextStep (https://arxiv.org/abs/2508.10711): a text, and the size of the image in tokens."""

from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from ..text.token_prompts import Ids
from ..text.tokenizing import tokenize


IMAGE_AREA, BEGIN_OF_IMAGE = "<|image_area|>", "<|begin_of_image|>"


class NextStepPrompts:
    """Token ids of prompts, which end with the size of an image and the token that begins it.

    Args:
        tokenizer: the text tokenizer.
        repeats_bos: whether the text of a bos token is put before each prompt, as in NextStep-1.1. It has effect only
            with tokenizers that have one.
    """

    def __init__(self, tokenizer: Any, repeats_bos: bool):
        self.tokenizer, self._repeats_bos = tokenizer, repeats_bos
        self._begin = tokenizer.convert_tokens_to_ids(BEGIN_OF_IMAGE)
        if self._begin is None or self._begin == tokenizer.unk_token_id:
            raise ValueError(f"the tokenizer has no {BEGIN_OF_IMAGE!r}: convert the checkpoint again")

    def encode(self, texts: list[str], grid: tuple[int, int]) -> Ids:
        """Token ids [B, P] of texts for an image of `grid` (rows, columns) tokens, padded on the left, and their
        mask."""
        bos = self.tokenizer.bos_token
        # The authors cut the first token of the size if there is a bos token, whether or not the tokenizer added it.
        size = self._ids(f"{IMAGE_AREA}{grid[0]}*{grid[1]}")[bos is not None :]
        begin = bos if bos is not None and self._repeats_bos else ""
        rows = [torch.tensor([*self._ids(begin + text), *size, self._begin]) for text in texts]
        padding = self.tokenizer.pad_token_id or 0
        padded, mask = (
            pad_sequence(parts, batch_first=True, padding_value=value, padding_side="left")
            for parts, value in ((rows, padding), ([torch.ones_like(row) for row in rows], 0))
        )
        return padded, mask

    def _ids(self, text: str) -> list[int]:
        return tokenize(self.tokenizer, text).input_ids
