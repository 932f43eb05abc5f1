"""Text tokenizers that are published as a table of byte sequences and their ranks, as tiktoken reads it."""

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path

from tokenizers import Tokenizer, normalizers
from transformers import (
    PreTrainedTokenizerFast,
)
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from .paths import CheckpointError


def read_lines(path: Path) -> list[str]:
    """The lines of a file that are not empty.

    Raises:
        CheckpointError: if the file does not exist.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is not a file: give a folder with the authors' text tokenizer")
    return [line.strip() for line in path.read_text().splitlines() if line.strip()]


class _Converter(TikTokenConverter):
    def __init__(self, path: Path, special: Mapping[str, int] | list[str]):
        super().__init__(path, pattern=PRETOKENIZE_REGEX, extra_special_tokens=list(special))
        self.path, self.special = path, special

    # transformers' own needs the package tiktoken to read a table.
    @staticmethod
    def load_tiktoken_bpe(tiktoken_url: str | Path) -> dict[bytes, int]:
        return _read_ranks(Path(tiktoken_url))

    def extract_vocab_merges_from_model(self, tiktoken_url: str):
        vocabulary, merges = super().extract_vocab_merges_from_model(tiktoken_url)
        if isinstance(self.special, Mapping):
            special = dict(self.special)
        else:
            special = {name: len(vocabulary) + i for i, name in enumerate(self.special)}
        if set(special.values()) & set(vocabulary.values()):
            raise CheckpointError(
                f"{self.path} has {len(vocabulary)} tokens, too many for the special tokens after them: give the "
                "authors' file"
            )
        return vocabulary | special, merges


def qwen_tokenizer(path: Path, special: Mapping[str, int] | list[str]) -> Tokenizer:
    """The tokenizer of a table, which splits texts as Qwen does.

    Args:
        special: the special tokens in order, whose ids follow those of the table, or their ids.

    Raises:
        CheckpointError: if the file is missing, is not a table, or has a token with the id of a special one.
    """
    tokenizer = _Converter(path, special).converted()
    tokenizer.normalizer = normalizers.NFC()  # pyright: ignore[reportAttributeAccessIssue] a property of the extension
    return tokenizer


def _read_ranks(path: Path) -> dict[bytes, int]:
    try:
        pairs = (line.split() for line in read_lines(path))
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except (binascii.Error, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is not a table of base64 tokens and ranks: download it again") from error
    if not ranks:
        raise CheckpointError(f"{path} is empty: download it again")
    return ranks


# The authors' special tokens in order, before those of images.
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205)))


def tokenizer_from_ranks(path: Path, special: list[str], **settings) -> PreTrainedTokenizerFast:
    """The tokenizer of a table of ranks, with `special` tokens after those of the table.

    Raises:
        CheckpointError: if the file is missing or damaged.
    """
    return PreTrainedTokenizerFast(
        tokenizer_object=qwen_tokenizer(path, special),
        bos_token="<|extra_203|>",
        eos_token="<|extra_204|>",
        pad_token="<|endoftext|>",
        padding_side="left",
        **settings,
    )
