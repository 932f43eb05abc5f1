"""What prompts of language models of images have in common: ratios, sizes, and token ids given instead of texts."""

import re

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from .checks import MAX_SIDE, check_sides, check_token_ids
from .tokenizing import tokenize


# Ratios of the trained sizes, the default first.
RATIOS = ("1:1", "4:3", "3:4", "3:2", "2:3", "16:9", "9:16")


Ids = tuple[torch.LongTensor, torch.LongTensor]


def parse_ratio(ratio: str | None) -> tuple[int, int]:
    """Width and height of a ratio, by default "1:1"."""
    sides = re.fullmatch(r"([0-9]{1,4}):([0-9]{1,4})", "1:1" if ratio is None else str(ratio))
    across, down = map(int, sides.groups()) if sides else (0, 0)
    if not across * down:
        raise ValueError(f'ratio is {ratio!r}: give width and height of up to four digits, as in "16:9"')
    return across, down


def given_size(
    height: int | None, width: int | None, ratio: str | None, factor: int, most: int = MAX_SIDE
) -> tuple[int, int]:
    """Height and width as they are given."""
    if ratio is not None or height is None or width is None:
        raise ValueError("the size is either height and width, both, or a ratio: give one of the two")
    return check_sides((height, width), factor, most)


def encode_left(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> Ids:
    """Token ids [B, P] of texts as they are, padded on the left, and their mask."""
    encoded = tokenize(
        tokenizer, texts, add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt"
    )
    return encoded.input_ids, encoded.attention_mask


def pad_left(rows: list[list[int]], padding: int) -> Ids:
    """Token ids [B, P] of rows of different lengths, padded on the left, and their mask."""
    ids = [torch.tensor(row) for row in rows]
    padded, mask = (
        pad_sequence(parts, batch_first=True, padding_value=value, padding_side="left")
        for parts, value in ((ids, padding), ([torch.ones_like(row) for row in ids], 0))
    )
    return padded, mask


def check_given_ids(
    name: str,
    ids: torch.LongTensor,
    mask: torch.Tensor | None,
    begin_of_codes: int,
    vocab_size: int,
    header: list[int] | None,
    size: tuple[int, int],
) -> Ids:
    """Token ids [B, P] of prompts and their mask, which is ones by default. Refuses those that are not in the
    vocabulary, or do not end with `header`, which holds the `size` of an image (None: anything), and
    `begin_of_codes`."""
    check_token_ids(name, ids, mask, last=begin_of_codes, vocab_size=vocab_size)
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


def stack(branches: list[Ids], padding: int, device: torch.device) -> Ids:
    """The ids of several branches and their masks, padded on the left to the same length, [branches * B, P]. B is the
    size of the first branch; a branch of one prompt is repeated."""
    length, count = max(ids.shape[1] for ids, _ in branches), len(branches[0][0])
    ids, masks = (
        torch.cat(
            [
                F.pad(branch[i].to(device), (length - branch[i].shape[1], 0), value=value).expand(count, -1)
                for branch in branches
            ]
        )
        for i, value in enumerate((padding, 0))
    )
    return ids, masks
