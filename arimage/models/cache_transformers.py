"""The key/value cache of a language model that generates images, in the form that decoders of transformers call."""

import torch
import torch.nn.functional as F
from transformers import Cache

from .cache import RowCache, place, taken


class LanguageCache(RowCache, Cache):
    """A `KeyValueCache` of the prompts, the image and scratch slots, the row ends and one index for what is thrown away, on the
    device and in the dtype of each layer's first keys.

    A row end belongs to the slot of the token before it: to the last image slot of each row but the bottom one, or to a scratch
    slot. It is part of the cache while the token in that slot ends a row.

    Attributes:
        prefix, slots: how many slots the prompt has, and the image and scratch tokens together.
        owners: int64 [E], the slot that each row end belongs to.
        row_ends: bool [B, slots + 1], whether the token in a slot ends a row; always False in the last, thrown away.
    """

    def __init__(self, mask: torch.BoolTensor, layout, scratch: int, groups: int, has_row_ends: bool):
        Cache.__init__(self, layers=[])
        columns, count, device = layout.columns, layout.num_tokens, mask.device
        self.prefix, self.slots, self.groups = mask.shape[1], count + scratch, groups
        self._inner_ends = torch.arange(columns - 1, count - 1, columns, device=device)[: None if has_row_ends else 0]
        in_scratch = torch.arange(count, self.slots if has_row_ends else count, device=device)
        self.owners = torch.cat([self._inner_ends, in_scratch])
        self._size = self.prefix + self.slots + len(self.owners) + 1
        # Where the row end of each slot lies; nowhere without one.
        self._row_end_of = torch.full((self.slots + 1,), self._size - 1, device=device)
        self._row_end_of[self.owners] = self.prefix + self.slots + torch.arange(len(self.owners), device=device)
        self.row_ends = torch.zeros(len(mask) // groups, self.slots + 1, dtype=torch.bool, device=device)
        self.row_ends[:, self._inner_ends] = True
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self._index = torch.arange(self.prefix, device=device).expand(len(mask), -1)
        self.length = self.prefix

    @property
    def size(self) -> int:
        return self._size

    def row_end_index(self, slots: torch.LongTensor) -> torch.LongTensor:
        """Indices [rows, Q] of the row ends that belong to slots [B, Q], -1 = nowhere."""
        return self._row_end_of[slots].repeat(self.groups, 1)

    def write_next_at(self, index: torch.LongTensor) -> None:
        """Let the next forward pass write at `index` [rows, T], and see everything."""
        self._index, self.length = index, self._size

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if layer == len(self.keys):
            shape = (*keys.shape[:2], self._size, keys.shape[3])
            self.keys.append(keys.new_zeros(shape))
            self.values.append(values.new_zeros(shape))
        index = self._index.to(keys.device)
        place(self.keys[layer], index, keys)
        place(self.values[layer], index, values)
        return self.keys[layer][:, :, : self.length], self.values[layer][:, :, : self.length]

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
        rows = self.rows(images)
        self.keys, self.values = (
            [layer[rows.to(layer.device)] for layer in layers] for layers in (self.keys, self.values)
        )
        self.row_ends = self.row_ends[images]

    def put(self, images: torch.LongTensor, other: "LanguageCache") -> None:
        """`RowCache.put`. Prompts end together: the shorter ones are padded on the left."""
        more = max(other.prefix - self.prefix, 0)
        if more:
            self.keys, self.values = (
                [F.pad(layer, (0, 0, more, 0)) for layer in layers] for layers in (self.keys, self.values)
            )
            self.prefix, self._size = self.prefix + more, self._size + more
            self._row_end_of += more
        super().put(images, other)
        self.row_ends.index_copy_(0, images, other.row_ends)
