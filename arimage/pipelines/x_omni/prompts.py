"""The prompts of X-Omni: a text, and a header that announces the grid of an image."""

import torch
from transformers import PreTrainedTokenizerBase

from ..text.checks import MAX_PROMPT_CHARACTERS, as_texts, check_token_ids
from ..text.token_prompts import Ids, pad_left
from ..text.tokenizing import check_special, tokenize
from .transformer_x_omni import BEGIN, SIZE_END, XOmniConfig


Grid = tuple[int, int]


class XOmniPrompts:
    """Token ids of prompts.

    Args:
        tokenizer: the text tokenizer; None if prompts are given as token ids.
        config: the configuration of the language model.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, config: XOmniConfig):
        self.tokenizer, self.config = tokenizer, config

    def encode(self, name: str, texts: str | list[str], grid: Grid) -> Ids:
        """Token ids [B, P] of texts with the header of a grid, padded on the left, and their mask.

        Raises:
            ValueError: if there is no tokenizer, or a text is none or contains a special token.
        """
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise ValueError(f"this pipeline has no text_tokenizer: give input_ids, not {name}")

        def ids(text: str) -> list[int]:
            return tokenize(tokenizer, [text], add_special_tokens=False).input_ids[0]

        texts = as_texts(texts, name, MAX_PROMPT_CHARACTERS)
        for text in texts:
            check_special(tokenizer, text)
        size = ids(f"{grid[0]} {grid[1]}")
        header = [self.config.special_id(BEGIN), *size, self.config.special_id(SIZE_END)]
        return pad_left([[*ids(text), *header] for text in texts], 0)

    def checked(self, name: str, ids: torch.LongTensor, mask: torch.Tensor | None) -> Ids:
        """Given token ids [B, P] and their mask.

        Raises:
            ValueError: if they are not prompts of the model, padded on the left.
        """
        check_token_ids(name, ids, mask, last=self.config.special_id(SIZE_END))
        seen = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.to(ids.device, torch.bool)
        unknown = ((ids < 0) | (ids >= self.config.vocab_size + self.config.gen_vocab_size)) & seen
        if unknown.any():
            raise ValueError(f"{name} have the token id {int(ids[unknown][0])}, which the model does not have")
        begins = ((ids == self.config.special_id(BEGIN)) & seen).sum(1)
        if (begins != 1).any():
            raise ValueError(f"{name} have {int(begins.max())} times {BEGIN} in a prompt: give one header")
        # Padding may have any id.
        return torch.where(seen, ids, 0), seen.long()

    def headers(self, ids: torch.LongTensor, mask: torch.Tensor) -> Ids:
        """Of prompts [B, P] their headers alone, what the unconditional logits read."""
        begin = (ids == self.config.special_id(BEGIN)).long().cumsum(1)
        return torch.where(begin > 0, ids, 0), mask * (begin > 0)
