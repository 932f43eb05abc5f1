"""The key/value caches of one call: allocated once, never rolled back."""

import torch


class StaticCache:
    """Keys and values [layers, rows, heads, prefix + slots + 1, head_dim]; the last slot takes what is to be thrown away.

    Args:
        prefix: prompt slots, addressed as -prefix .. -1.
        slots: image and scratch slots, addressed as 0 .. slots - 1.
        groups: 1, or 2 when the rows are those of the images once with and once without the condition.
    """

    def __init__(
        self,
        layers: int,
        rows: int,
        heads: int,
        head_dim: int,
        *,
        prefix: int,
        slots: int,
        groups: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        shape = (layers, rows, heads, prefix + slots + 1, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.prefix, self.slots, self.groups = prefix, slots, groups
        self._rows = torch.arange(rows, device=device)[:, None]

    def address(self, slots: torch.Tensor) -> torch.Tensor:
        """Slots [B, Q] of the images, -1 = nowhere, to indices [rows, Q] along the cache's fourth dimension."""
        return torch.where(slots < 0, self.slots, slots).add(self.prefix).repeat(self.groups, 1)

    def write(self, layer: int, index: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put keys and values [rows, heads, Q, head_dim] at `index` [rows, Q]."""
        self.keys[layer][self._rows, :, index] = keys.transpose(1, 2)
        self.values[layer][self._rows, :, index] = values.transpose(1, 2)

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy the slots `source` [B, M] to the slots `target` [B, M]; a target of -1 copies nowhere."""
        source, target = self.address(source), self.address(target)
        for tensors in (self.keys, self.values):
            for layer in tensors:
                layer[self._rows, :, target] = layer[self._rows, :, source]


class ScaleCache:
    """Keys and values [layers, rows, heads, length, head_dim] of one call, filled from the front, a scale at a time.

    Attributes:
        filled: how many tokens are in it.
        modulations: what the condition gives to every pass; None before the first.
    """

    def __init__(
        self,
        layers: int,
        rows: int,
        heads: int,
        head_dim: int,
        length: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ):
        shape = (layers, rows, heads, length, head_dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.filled = 0
        self.modulations = None

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Put keys and values [rows, heads, Q, head_dim] behind the filled ones; return all up to them. The pass moves
        `filled` when its last layer is done."""
        stop = self.filled + keys.shape[2]
        self.keys[layer, :, :, self.filled : stop] = keys
        self.values[layer, :, :, self.filled : stop] = values
        return self.keys[layer, :, :, :stop], self.values[layer, :, :, :stop]
