"""The key/value cache of a language model that generates images, as decoders of transformers call it."""

import inspect
from typing import Self

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Cache

from .cache import SlottedCache


def cache_argument(decoder: nn.Module) -> str:
    """The name of the cache among the arguments of a decoder, "cache" or, in earlier versions of transformers,
    "past_key_values"."""
    # What torch.compile makes has a forward of its own.
    module = getattr(decoder, "_orig_mod", decoder)
    return "cache" if "cache" in inspect.signature(type(module).forward).parameters else "past_key_values"


class LanguageCache(SlottedCache, Cache):
    """A cache of the prompts, the image, its row ends and a tree. It is allocated with the first keys: all layers with
    their device and dtype, or layer by layer.

    A row end belongs to the slot of the token before it: to the last image slot of each row but the bottom one, or to
    a scratch slot. It is seen while the token in that slot ends a row.

    Args:
        rows, length: how many different prompts are prefilled, and how many tokens they have.
        places: how many places there are for a prompt. Shorter prompts lie at their end.
        slots: how many slots the image has, whole rows; by default one for each token.
        compact: allocate no image slots yet.
        together: how many layers are allocated at once: all if they have one shape and device, else 1.

    Attributes:
        end_index_of: int64 [slots + scratch + 1], where the row end of each slot lies; nowhere if it has none.
        row_ends: bool [B, slots + scratch + 1], whether the token in a slot ends a row; always False in the last,
            nowhere.
    """

    def __init__(
        self,
        rows: int,
        length: int,
        *,
        places: int,
        batch_size: int,
        layout,
        slots: int | None = None,
        scratch: int,
        branches: int,
        has_row_ends: bool,
        compact: bool,
        together: int,
        device: torch.device,
    ):
        Cache.__init__(self, layers=[])
        columns, slots = layout.columns, slots or layout.num_tokens
        inner = min(slots, layout.num_tokens - 1)
        self.branches = branches
        inner_ends = torch.arange(columns - 1, inner, columns, device=device)[: None if has_row_ends else 0]
        in_scratch = torch.arange(slots, slots + scratch if has_row_ends else slots, device=device)
        self.lay_out(places, slots, scratch, torch.cat([inner_ends, in_scratch]))
        self.end_index_of = torch.full_like(self.index_of, self.first - 1)
        self.end_index_of[self.owners] = self.prefix_end + torch.arange(len(self.owners), device=device)
        self.row_ends = torch.zeros(batch_size, len(self.index_of), dtype=torch.bool, device=device)
        self.row_ends[:, inner_ends] = True
        self._together = together
        self._width = self.first if compact else self.size
        self._set_stacks()
        self.write_prompts(rows, length)

    def row_end_index(self, slots: torch.LongTensor) -> torch.LongTensor:
        """Indices [rows, Q] of the row ends that belong to slots [B, Q]; -1 is nowhere."""
        return self.end_index_of[slots].repeat(self.branches, 1)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if layer == len(self.keys):
            shape = (self._together, *keys.shape[:2], self._width, keys.shape[3])
            self._set_stacks(*self.stacks, keys.new_zeros(shape), values.new_zeros(shape))
        return super().write(layer, keys, values)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs):
        """`write`, as transformers' attention calls it."""
        return self.write(layer_idx, key_states, value_states)

    def entries(self, slots: torch.LongTensor) -> torch.LongTensor:
        """Those of slots [B, M] and of their row ends, [B, 2 M]. A row end moves with its token."""
        return torch.cat([self.index_of[slots], self.end_index_of[slots]], dim=1)

    def expand(self, images: torch.LongTensor) -> None:
        super().expand(images)
        self.row_ends = self.row_ends[images]

    def put(self, images: torch.LongTensor, other: Self) -> None:
        """Replace `images` [M] by those of `other`, a cache of M images with as many slots. Prompts end together:
        shorter ones are padded on the left."""
        more, attended_slots = other.first - self.first, self.attended_slots
        if more > 0:
            self._set_stacks(*(F.pad(stack, (0, 0, more, 0)) for stack in self.stacks))
            self.lay_out(other.prompt, self.slots, self.scratch, self.owners)
            self.attended_slots = attended_slots
            self.end_index_of += more
        super().put(images, other)
        self.row_ends.index_copy_(0, images, other.row_ends)
