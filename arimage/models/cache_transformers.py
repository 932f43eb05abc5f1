"""The key/value cache of a language model that generates images, in the form that decoders of transformers call."""

import inspect
from typing import Self

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Cache

from .cache import PlacedCache, place, taken


def cache_argument(decoder: nn.Module) -> str:
    """The name of the cache among the arguments of a decoder, "cache" or, in earlier versions of transformers,
    "past_key_values"."""
    # What torch.compile makes has a forward of its own.
    module = getattr(decoder, "_orig_mod", decoder)
    return "cache" if "cache" in inspect.signature(type(module).forward).parameters else "past_key_values"


class LanguageCache(PlacedCache, Cache):
    """A `KeyValueCache` of the prompts, the image, its row ends and a tree, on the device and in the dtype of each layer's first
    keys.

    A row end belongs to the slot of the token before it: to the last image slot of each row but the bottom one, or to a scratch
    slot. It is part of the cache while the token in that slot ends a row.

    Args:
        rows, length: how many different prompts are prefilled, and how many tokens they have.
        places: how many tokens there is room for before the row ends, at the end of which the prompts lie.

    Attributes:
        row_ends: bool [B, slots + scratch + 1], whether the token in a slot ends a row; always False in the last, thrown away.
    """

    def __init__(
        self,
        rows: int,
        length: int,
        *,
        places: int,
        batch_size: int,
        layout,
        scratch: int,
        groups: int,
        has_row_ends: bool,
        device: torch.device,
    ):
        Cache.__init__(self, layers=[])
        columns, count = layout.columns, layout.num_tokens
        self.groups = groups
        self._inner_ends = torch.arange(columns - 1, count - 1, columns, device=device)[: None if has_row_ends else 0]
        in_scratch = torch.arange(count, count + scratch if has_row_ends else count, device=device)
        self.lay_out(places, count, scratch, torch.cat([self._inner_ends, in_scratch]))
        # Where the row end of each slot lies; nowhere without one.
        self._row_end_of = torch.full_like(self.places, self.first - 1)
        self._row_end_of[self.owners] = self.prefix + torch.arange(len(self.owners), device=device)
        self.row_ends = torch.zeros(batch_size, len(self.places), dtype=torch.bool, device=device)
        self.row_ends[:, self._inner_ends] = True
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        prompt = torch.arange(self.prefix - length, self.prefix, device=device)
        self.write_next_at(prompt.expand(rows, -1), self.prefix)

    def row_end_index(self, slots: torch.LongTensor) -> torch.LongTensor:
        """Indices [rows, Q] of the row ends that belong to slots [B, Q], -1 = nowhere."""
        return self._row_end_of[slots].repeat(self.groups, 1)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if layer == len(self.keys):
            shape = (*keys.shape[:2], self.size, keys.shape[3])
            self.keys.append(keys.new_zeros(shape))
            self.values.append(values.new_zeros(shape))
        return super().write(layer, keys, values)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs):
        """`write`, as transformers' attention calls it."""
        return self.write(layer_idx, key_states, value_states)

    def move(self, source: torch.LongTensor, target: torch.LongTensor) -> None:
        """Copy the slots `source` [B, M], with their row ends, to the image slots `target` [B, M]; -1 copies nowhere."""
        super().move(source, target)
        source, target = self.row_end_index(source), self.row_end_index(target)
        for layer in (*self.keys, *self.values):
            place(layer, target.to(layer.device), taken(layer, source.to(layer.device)))

    def reset_rows(self, images: torch.LongTensor) -> None:
        super().reset_rows(images)
        self.row_ends.index_fill_(0, images, False)
        self.row_ends[images[:, None], self._inner_ends] = True

    def expand(self, images: torch.LongTensor) -> None:
        self.take_rows(self.rows(images))
        self.row_ends = self.row_ends[images]

    def take_rows(self, rows: torch.LongTensor) -> None:
        self.keys, self.values = (
            [layer[rows.to(layer.device)] for layer in layers] for layers in (self.keys, self.values)
        )

    def put(self, images: torch.LongTensor, other: Self) -> None:
        """Let `images` [M] be those of `other`, a cache of M images with as many slots. Prompts end together: the shorter ones
        are padded on the left."""
        more, limit = other.first - self.first, self.limit
        if more > 0:
            self.keys, self.values = (
                [F.pad(layer, (0, 0, more, 0)) for layer in layers] for layers in (self.keys, self.values)
            )
            self.lay_out(other.prompt, self.slots, self.scratch, self.owners)
            self.limit = limit
            self._row_end_of += more
        super().put(images, other)
        self.row_ends.index_copy_(0, images, other.row_ends)
