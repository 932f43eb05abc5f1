"""What the models of one call have in common, whatever their family."""

import copy
from typing import Self

import torch
from torch import nn


def with_unconditional(condition: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The condition of B images, each value [B, ...], as that of 2 B rows: the images with their condition, then the same
    images with `unconditional` set, a bool [2 B]. Classifier-free guidance computes both."""
    doubled = {name: value.repeat(2, *[1] * (value.ndim - 1)) for name, value in condition.items()}
    first = next(iter(condition.values()))
    doubled["unconditional"] = torch.arange(2 * len(first), device=first.device) >= len(first)
    return doubled


def repeat_images(rows: torch.Tensor, groups: int, count: int) -> torch.Tensor:
    """Rows [groups * P, ...] of P prompts as rows [groups * P * count, ...] of `count` images for each prompt."""
    return rows.unflatten(0, (groups, -1)).repeat_interleave(count, dim=1).flatten(0, 1)


def rows_of(images: torch.LongTensor, groups: int, count: int) -> torch.LongTensor:
    """The rows [groups * M] of `images` [M] among those of `count` images."""
    return torch.cat([images + group * count for group in range(groups)])


class PrefixModel:
    """Base of the `TokenModel`s of transformers that read a condition as a prefix of their tokens.

    Args:
        transformer: the transformer, or what `torch.compile` made of it. Every forward pass calls it.
        condition: arguments of its `embed_condition`, one row per prompt.
        layout: the `Layout` of the image tokens.
        guided: also compute the logits without the condition.
        codebook: the vectors of the tokens in the image tokenizer [V, D], for `TokenModel.codebook`.
        num_images_per_prompt: images of each prompt, which is prefilled once.
    """

    drafter = None

    def __init__(
        self,
        transformer: nn.Module,
        condition: dict[str, torch.Tensor],
        layout,
        *,
        guided: bool = False,
        codebook: torch.Tensor | None = None,
        num_images_per_prompt: int = 1,
    ):
        condition = with_unconditional(condition) if guided else condition
        self.transformer, self.condition, self.layout = transformer, condition, layout
        self.groups, self._repeats = 2 if guided else 1, num_images_per_prompt
        self.num_tokens = layout.num_tokens
        self.vocab_size = transformer.config.vocab_size
        self.network = transformer
        self._prefix_mask = repeat_images(transformer.prefix_mask(**condition), self.groups, num_images_per_prompt)
        self.device = self._prefix_mask.device
        # The tokenizer may be offloaded.
        self.codebook = None if codebook is None else codebook.to(self.device)

    def take(self, images: torch.LongTensor) -> Self:
        """See `TokenModel.take`."""
        other, count = copy.copy(self), len(self._prefix_mask) // self.groups
        prompts = rows_of(images // self._repeats, self.groups, count // self._repeats)
        other.condition = {name: value[prompts] for name, value in self.condition.items()}
        other._prefix_mask, other._repeats = self._prefix_mask[rows_of(images, self.groups, count)], 1
        other.layout = self.layout.take(images)
        return other

    def put(self, images: torch.LongTensor, other: Self) -> bool:
        """See `TokenModel.put`."""
        rows = rows_of(images, self.groups, len(self._prefix_mask) // self.groups)
        self._prefix_mask.index_copy_(0, rows, other._prefix_mask)
        self.layout.put(images, other.layout)
        return False

    def open_cache(self, kind: type, batch_size: int, layers: int, heads: int, scratch: int):
        """A cache of this kind for the prompts of `batch_size` images.

        Raises:
            ValueError: if the model is bound to another number of images.
        """
        rows, length = self._prefix_mask.shape
        if rows != batch_size * self.groups:
            raise ValueError(f"batch_size is {batch_size}, but the model is bound to {rows // self.groups} images")
        return kind(
            layers,
            rows // self._repeats,
            heads,
            self.transformer.head_dim,
            prefix=length,
            slots=self.num_tokens,
            scratch=scratch,
            groups=self.groups,
            dtype=self.transformer.dtype,
            device=self.device,
        )

    def write_prefix(self, cache) -> torch.BoolTensor:
        """Let the next forward pass write the prefix, and return which of its own positions each position sees, [rows, P, P]: it is
        causal. What is masked sees itself, so that it does not become NaN."""
        mask = self.transformer.prefix_mask(**self.condition)
        length = mask.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=self.device).tril()
        own = torch.eye(length, dtype=torch.bool, device=self.device)
        places = torch.arange(cache.prefix - length, cache.prefix, device=self.device)
        cache.write_next_at(places.expand(len(mask), -1), cache.prefix)
        return (causal & mask[:, None]) | own

    def per_image(self, output: torch.Tensor) -> torch.Tensor:
        """What a prefill returned for each prompt, [rows, ...], as [G, B, ...]."""
        return repeat_images(output, self.groups, self._repeats).unflatten(0, (self.groups, -1))

    def expand(self, cache, batch_size: int) -> None:
        """Give every image of a prompt the keys and values of its prefill."""
        if self._repeats > 1:
            prompts = torch.arange(batch_size // self._repeats, device=self.device)
            cache.expand(prompts.repeat_interleave(self._repeats))

    def prefix(self, cache, queries: int) -> torch.BoolTensor:
        """Which keys before the slots each of so many queries sees, [rows, queries, K]."""
        padding = cache.prefix - self._prefix_mask.shape[1]
        return torch.nn.functional.pad(self._prefix_mask, (padding, 0))[:, None].expand(-1, queries, -1)


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
