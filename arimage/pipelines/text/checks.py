"""Checks of texts, token ids, dtypes and decodings."""

import numbers
from collections.abc import Hashable
from typing import Any

import torch

from ...decoding import Decoding, decoding_from_text
from ...settings.schema import check_encodable


# The time for tokenizing grows with the square of the length of the longest word.
MAX_PROMPT_CHARACTERS = 10_000
# The tokens that text encoders were trained to read, and the most that a call may ask for; pixels along a side.
TEXT_TOKENS, MAX_TEXT_TOKENS = 512, 4096
MAX_SIDE = 4096
# Characters of a value that an error message shows.
LONGEST_SHOWN = 100


def as_texts(texts: str | list[str], name: str = "prompt", limit: int | None = None) -> list[str]:
    """One text or several as a list. Refuses what is no text, or cannot be encoded as UTF-8."""
    listed = [texts] if isinstance(texts, str) else texts
    if not isinstance(listed, list) or not listed or not all(isinstance(text, str) for text in listed):
        raise ValueError(f"{name} is {texts!r}: give a string or a list of strings")
    longest = max(map(len, listed))
    if limit is not None and longest > limit:
        raise ValueError(f"{name} has {longest} characters: give at most {limit}")
    for text in listed:
        check_encodable(name, text)
    return listed


def as_text(text: str, name: str) -> str:
    """One text; refuses what is none."""
    if not isinstance(text, str):
        raise ValueError(f"{name} is {text!r}: give a string")
    check_encodable(name, text)
    return text


def prompt_names(prompt: str | list[str] | None, given: int, count: int) -> list[Hashable]:
    """Names of the embeddings of `count` prompts, see `Conditions.merge`: their texts, or the places of the `given`
    embeddings. One for all is repeated."""
    names = range(given) if prompt is None else as_texts(prompt)
    return [names[i % len(names)] for i in range(count)]


def text_length(max_sequence_length: int | None, default: int) -> int:
    """How many tokens of a text are read. Refuses what cannot be their number."""
    if max_sequence_length is None:
        return default
    whole = isinstance(max_sequence_length, numbers.Integral) and max_sequence_length is not True
    if not whole or not 1 <= max_sequence_length <= MAX_TEXT_TOKENS:
        raise ValueError(
            f"max_sequence_length is {max_sequence_length!r}: give a whole number from 1 to {MAX_TEXT_TOKENS}"
        )
    return int(max_sequence_length)


def check_text_encoder_loaded(tokenizer: Any, text_encoder: Any) -> None:
    """Refuse a prompt where no text encoder is loaded."""
    if text_encoder is None or tokenizer is None:
        raise ValueError(
            "this pipeline has no text encoder: give prompt_embeds and prompt_attention_mask, or convert the "
            "checkpoint again with --text-encoder"
        )


def check_embeds(name: str, embeds: Any, mask: Any, width: int, lengths: range, needs_mask: bool = False) -> int:
    """Check embeddings [B, P, width] of texts, of which P is among `lengths`, and their mask [B, P], padded on the
    right, None if all tokens are read; return B. `name` is that of the argument without _embeds."""
    expected = f"a tensor of floats [B, {lengths[0] if len(lengths) == 1 else 'P'}, {width}]"
    if len(lengths) > 1:
        expected += f" of at most {lengths[-1]} tokens"
    shape = tuple(embeds.shape) if isinstance(embeds, torch.Tensor) and embeds.is_floating_point() else ()
    if len(shape) != 3 or shape[2] != width or shape[1] not in lengths or not shape[0]:
        raise ValueError(f"{name}_embeds are {shape or describe(embeds)}: give {expected}")
    if mask is None and not needs_mask:
        return len(embeds)
    if mask is None or not isinstance(mask, torch.Tensor) or mask.shape != shape[:2]:
        raise ValueError(f"{name}_attention_mask must be [B, {shape[1]}], like {name}_embeds")
    if not is_mask(mask) or not mask[:, 0].all() or (mask.int().diff() > 0).any():
        raise ValueError(f"{name}_attention_mask must be ones, at least one per row, and then zeros: pad on the right")
    return len(embeds)


def is_mask(mask: torch.Tensor) -> bool:
    """Whether all numbers are 0 or 1."""
    return bool(((mask == 0) | (mask == 1)).all())


def check_one_of(**given) -> None:
    """Refuse two alternative arguments unless exactly one of them is given."""
    names = list(given)
    if [value is None for value in given.values()].count(False) != 1:
        raise ValueError(f"give either a {names[0]} or {names[1]}")


def check_sides(size: tuple[Any, Any], factor: int, most: int = MAX_SIDE) -> tuple[int, int]:
    """Height and width in pixels. Refuses all but multiples of `factor` up to `most`."""
    for name, side in zip(("height", "width"), size, strict=True):
        whole = isinstance(side, numbers.Integral) and not isinstance(side, bool)
        if not whole or side % factor or side not in range(1, most + 1):
            raise ValueError(f"{name} is {side!r}: give a multiple of {factor} up to {most}")
    return int(size[0]), int(size[1])


def check_token_ids(
    name: str,
    ids: torch.LongTensor,
    mask: torch.Tensor | None,
    last: int | None = None,
    vocab_size: int | None = None,
) -> int:
    """Check token ids [B, P], of a vocabulary of this size, and their mask, and that the ids end in `last`; return B.

    With `last`, rows must be padded on the left.
    """
    whole = isinstance(ids, torch.Tensor) and ids.dtype in (torch.int64, torch.int32)
    if not whole or ids.ndim != 2 or not ids.numel():
        raise ValueError(f"{name} is {describe(ids)}: give token ids [B, P]")
    if vocab_size is not None and (ids.min() < 0 or ids.max() >= vocab_size):
        unknown = int(ids[(ids < 0) | (ids >= vocab_size)][0])
        raise ValueError(f"{name} have the token id {unknown}: give ids from 0 to {vocab_size - 1}")
    if last is not None and (ids[:, -1] != last).any():
        raise ValueError(
            f"{name} must end with the header of an image, its last token {last}, and be padded on the left"
        )
    if mask is None:
        return len(ids)
    mask_name = name.replace("input_ids", "attention_mask")
    if not isinstance(mask, torch.Tensor) or mask.shape != ids.shape:
        raise ValueError(f"{mask_name} is {describe(mask)}: give one of {tuple(ids.shape)}, like {name}")
    if not is_mask(mask) or not mask.any(1).all():
        raise ValueError(f"{mask_name} must be zeros and ones, at least one per row")
    if last is not None and (not mask[:, -1].all() or (mask.int().diff() < 0).any()):
        raise ValueError(f"{mask_name} must be zeros and then ones: pad on the left")
    return len(ids)


def as_decoding(decoding: Decoding | str, own: Decoding | None = None) -> Decoding:
    """A decoding, or the one that a text such as "sjd" or "sjd-coupled:window=16" describes. The name of a
    checkpoint's `own` decoding stands for its settings, see `decoding_from_text`."""
    if isinstance(decoding, str):
        return decoding_from_text(decoding, own)
    if isinstance(decoding, type) or not (hasattr(decoding, "start") and hasattr(decoding, "step")):
        raise ValueError(
            f"decoding is {decoding!r}: give a decoding object such as AutoregressiveDecoding(), or a name"
        )
    try:
        # Compiled steps are kept by their decoding.
        hash(decoding)
    except TypeError as error:
        raise ValueError(
            f"decoding is {decoding!r}, which is not hashable: make its class a frozen dataclass, with tuples in the "
            "place of lists"
        ) from error
    return decoding


def with_dtype(options: dict[str, Any]) -> dict[str, Any]:
    """Add a dtype to keyword arguments of `from_pretrained`: float32 by default, or a dictionary of dtypes by
    component. Names of dtypes are accepted too."""
    given = {name: _as_dtype(options[name]) for name in ("dtype", "torch_dtype") if options.get(name) is not None}
    return options | (given or {"dtype": torch.float32})


def _as_dtype(dtype: Any) -> Any:
    if isinstance(dtype, dict):
        return {component: _as_dtype(one) for component, one in dtype.items()}
    found: Any = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f'dtype is {dtype!r}: give a torch.dtype such as torch.bfloat16, or its name, "bfloat16"')
    return found


def describe(value: Any) -> str:
    """A value in an error message; of a tensor or an array its dtype and shape."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype} {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."
