"""Tokenizing text in several threads."""

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
