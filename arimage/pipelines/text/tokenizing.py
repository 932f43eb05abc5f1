"""Tokenizing texts, in several threads, and texts with special tokens."""

from collections.abc import Callable
from threading import RLock
from typing import Any


_TOKENIZING = RLock()


def tokenize(tokenizer: Callable[..., Any], *texts: Any, **options: Any) -> Any:
    """`tokenizer(*texts, **options)`, for a tokenizer of transformers or a method of one, one thread at a time.

    Padding and truncation are settings of the tokenizer, which each call sets: without the lock, a call could pad as
    another thread asks for.
    """
    with _TOKENIZING:
        return tokenizer(*texts, **options)


def check_special(tokenizer: Any, text: str) -> None:
    """Refuse a text with a special token in it."""
    for number in tokenize(tokenizer, text, add_special_tokens=False).input_ids:
        if number in tokenizer.added_tokens_decoder:
            token = tokenizer.convert_ids_to_tokens(number)
            raise ValueError(f"a prompt contains {token!r}, a special token of the model: leave it out")
