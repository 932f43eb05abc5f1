"""What the models of one call have in common, whatever their family."""

import copy
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import nn


def with_unconditional(condition: dict[str, torch.Tensor], kept: Sequence[str] = ()) -> dict[str, torch.Tensor]:
    """The condition of B images, each value [B, ...], as that of 2 B rows: the images with their condition, then the same
    images with `unconditional` set, a bool [2 B], and nothing else of theirs but the values `kept`. Classifier-free guidance
    computes both."""
    doubled = {
        name: torch.cat([value, value if name in kept else torch.ones_like(value)])
        for name, value in condition.items()
    }
    first = next(iter(condition.values()))
    doubled["unconditional"] = torch.arange(2 * len(first), device=first.device) >= len(first)
    return doubled


def distinct(values: Sequence[Hashable]) -> tuple[list[int], list[int]]:
    """Where each of the different `values` is first, and which of these each value equals."""
    first: dict[Hashable, int] = {}
    for i, value in enumerate(values):
        first.setdefault(value, i)
    numbers = {value: number for number, value in enumerate(first)}
    return list(first.values()), [numbers[value] for value in values]


def distinct_rows(*tensors: torch.Tensor) -> tuple[list[int], list[int]]:
    """`distinct` of the rows of tensors [R, ...], bit by bit. Reads the device."""
    count = len(tensors[0])
    bits = [tensor.reshape(count, -1).contiguous().view(torch.uint8).cpu().numpy() for tensor in tensors]
    return distinct([b"".join(part[row].tobytes() for part in bits) for row in range(count)])


def rows_of(images: torch.LongTensor, groups: int, count: int) -> torch.LongTensor:
    """The rows [groups * M] of `images` [M] among those of `count` images."""
    return torch.cat([images + group * count for group in range(groups)])


class PrefixModel:
    """Base of the `TokenModel`s of transformers that read a condition as a prefix of their tokens.

    Args:
        transformer: the transformer, or what `torch.compile` made of it. Every forward pass calls it.
        condition: arguments of its `embed_condition`, one row per image.
        layout: the `Layout` of the image tokens.
        guided: also compute the logits without the condition.
        codebook: the vectors of the tokens in the image tokenizer [V, D], for `TokenModel.codebook`.
    """

    predicts_groups: ClassVar[bool] = False

    drafter = None
    denoises = False
    block = 1

    def __init__(
        self,
        transformer: nn.Module,
        condition: dict[str, torch.Tensor],
        layout,
        *,
        guided: bool = False,
        codebook: torch.Tensor | None = None,
    ):
        condition = with_unconditional(condition, kept=("prompt_attention_mask",)) if guided else condition
        self.transformer, self.layout, self.groups = transformer, layout, 2 if guided else 1
        self.num_tokens = layout.num_tokens
        self.network = transformer
        self._prefix_mask = transformer.prefix_mask(**condition)
        # The conditions, and which of them each row has.
        self._conditions, self._rows = condition, list(range(len(self._prefix_mask)))
        self.device = self._prefix_mask.device
        # The tokenizer may be offloaded.
        self.codebook = None if codebook is None else codebook.to(self.device)

    @property
    def vocab_size(self) -> int:
        return self.transformer.config.vocab_size

    def take(self, images: torch.LongTensor) -> Self:
        """See `TokenModel.take`."""
        other, rows = copy.copy(self), rows_of(images, self.groups, len(self._prefix_mask) // self.groups)
        other._prefix_mask, other._rows = self._prefix_mask[rows], [self._rows[row] for row in rows.tolist()]
        other.layout = self.layout.take(images)
        return other

    def merge_prompts(self) -> None:
        """Prefill equal conditions once. Reads the device."""
        first, numbers = distinct_rows(*self._conditions.values())
        self._rows = [numbers[row] for row in self._rows]
        self._conditions = {name: value[first] for name, value in self._conditions.items()}

    @property
    def condition(self) -> dict[str, torch.Tensor]:
        """Arguments of the transformer's `embed_condition` of every row."""
        return {name: value[self._rows] for name, value in self._conditions.items()}

    def put(self, images: torch.LongTensor, other: Self) -> bool:
        """See `TokenModel.put`."""
        rows = rows_of(images, self.groups, len(self._prefix_mask) // self.groups)
        self._prefix_mask.index_copy_(0, rows, other._prefix_mask)
        self.layout.put(images, other.layout)
        return False

    def open_prefill(
        self, kind: type, batch_size: int, layers: int, heads: int, scratch: int
    ) -> tuple[Any, dict[str, torch.Tensor], list[int]]:
        """An empty cache of this kind for the different prompts of `batch_size` images, their conditions, and which of them each
        row has.

        Raises:
            ValueError: if the model is bound to another number of images.
        """
        rows, length = self._prefix_mask.shape
        if rows != batch_size * self.groups:
            raise ValueError(f"batch_size is {batch_size}, but the model is bound to {rows // self.groups} images")
        first, copies = distinct(self._rows)
        condition = {name: value[[self._rows[row] for row in first]] for name, value in self._conditions.items()}
        cache = kind(
            layers,
            len(first),
            heads,
            self.transformer.head_dim,
            prefix=length,
            slots=self.num_tokens,
            scratch=scratch,
            groups=self.groups,
            dtype=self.transformer.dtype,
            device=self.device,
        )
        return cache, condition, copies

    def write_prefix(self, cache, condition: dict[str, torch.Tensor]) -> torch.BoolTensor:
        """Let the next forward pass write the prefixes, and return which keys of the cache each of their positions sees, [R, P, K]:
        those before it, and itself, so that what is masked does not become NaN."""
        mask = self.transformer.prefix_mask(**condition)
        length = mask.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=self.device).tril()
        own = torch.eye(length, dtype=torch.bool, device=self.device)
        padding = cache.prefix - length
        cache.write_next_at(
            torch.arange(padding, cache.prefix, device=self.device).expand(len(mask), -1), cache.prefix
        )
        return F.pad((causal & mask[:, None]) | own, (padding, 0))

    def prefix(self, cache, queries: int) -> torch.BoolTensor:
        """Which keys before the slots each of so many queries sees, [rows, queries, K]."""
        padding = cache.prefix - self._prefix_mask.shape[1]
        return F.pad(self._prefix_mask, (padding, 0))[:, None].expand(-1, queries, -1)


def check_image(layout, family: str) -> None:
    """Refuse a `Layout` that is not an image.

    Raises:
        ValueError: if the layout has three dimensions.
    """
    if len(layout.shape) != 2:
        raise ValueError(f"layout has shape {layout.shape}: {family} generates images, give (rows, columns)")


def check_raster(layout, family: str) -> None:
    """Refuse a `Layout` that is not an image in raster order.

    Raises:
        ValueError: if the layout has three dimensions, or an order.
    """
    check_image(layout, family)
    if layout.order is not None:
        raise ValueError(f"layout has an order: {family} generates in raster order only, give none")
