"""Next-scale transformers, and with the conditions of one call as `ScaleModel`s."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import nn

from .bound import BoundNetwork
from .cache import GrowingCache, ScaleCache
from .conditions import Conditions, spread
from .modulated_blocks import block_causal_mask, layer_norm, levels_of
from .pruning import Pruning, fed_cells, only, pruning_of
from .step import runs_kernels


class ScaleTransformer:
    """The forward pass of next-scale transformers with `blocks` (`modulated_blocks.Block`) and a `head`. A family adds
    `read_condition`, `embed_inputs` and `embed_places`."""

    # Whether the hidden states between layers are in float32, whatever the dtype of the weights.
    in_float32: ClassVar[bool] = False

    config: Any
    dtype: torch.dtype
    training: bool
    blocks: nn.ModuleList
    head: nn.Module

    @property
    def head_dim(self) -> int:
        """The channels of an attention head."""
        return self.config.hidden_size // self.config.num_attention_heads

    @property
    def step_parts(self) -> nn.ModuleList:
        """See `runs_kernels`."""
        return self.blocks

    @property
    def has_steps(self) -> bool:
        """Whether the kernels of a step compute its attention."""
        return self.config.get("qk_norm", True)

    def read_condition(self, **condition) -> tuple[torch.Tensor, torch.Tensor | None, list[tuple[torch.Tensor, ...]]]:
        """The hidden states [B, n, hidden_size] that the first map starts from, those of a prefix [B, P, hidden_size]
        or None, and what the layers need, computed once per image: what each block takes, then a scale and a shift
        [B, 1, hidden_size] before the head, and what all blocks take besides."""
        raise NotImplementedError

    def embed_inputs(self, inputs: torch.Tensor) -> torch.Tensor:
        """The hidden states [B, T, hidden_size] of inputs."""
        raise NotImplementedError

    def embed_places(self, levels: torch.LongTensor, first: int) -> torch.Tensor:
        """What is added for the maps of cells (`levels` [T]) and their places, from `first` on."""
        raise NotImplementedError

    def forward(
        self,
        inputs: torch.Tensor | None = None,
        *,
        levels: torch.LongTensor,
        rotary: torch.Tensor | None = None,
        mask: torch.BoolTensor | None = None,
        condition: dict[str, torch.Tensor] | None = None,
        cache: GrowingCache | None = None,
        first: int = 0,
        first_query: int = 0,
        mix: tuple[int, float | torch.Tensor] | None = None,
        pruning: Pruning | None = None,
    ) -> torch.FloatTensor:
        """One forward pass over T cells: logits [B, T - first_query, vocab_size] in float32, or of bits
        [B, T - first_query, bits, 2].

        Args:
            inputs: the latents so far at the resolution of each cell's map, [B, T, D]; those of the first map, which
                starts from the condition alone, are left out.
            levels: which map each cell belongs to, [T].
            rotary: the rows of a `rotary_table` of these cells, [T, head_dim / 2, 2].
            mask: bool [B or 1, 1, Q, K], what the fed cells see, prefix included; None = everything so far.
            condition: arguments of `embed_condition`, in the forward pass over the first map.
            cache: keys, values and the condition are kept in it; afterwards `condition` is left out.
            first: the place of the first fed cell in the image's sequence of maps.
            first_query: leave out the logits of the cells before it.
            mix: a layer, and the guidance scale s that mixes the hidden states c and u of the two halves of the rows
                after it, to u + s (c - u). The logits are then those of the first half only.
            pruning: which of the cells pass through the layers, if not all do; those of one map, with a cache.
        """
        parts, prefix = [], None
        if condition is not None:
            start, prefix, conditions = self.read_condition(**condition)
            parts.append(start)
        else:
            assert cache is not None and cache.conditions is not None and inputs is not None
            conditions = [tuple(part[: len(inputs)] for part in layer) for layer in cache.conditions]
        if inputs is not None:
            parts.append(self.embed_inputs(inputs))
        hidden = torch.cat(parts, dim=1) + self.embed_places(levels, first)
        if prefix is not None:
            hidden = torch.cat([prefix, hidden], dim=1)
        whole, cells, table = hidden, None, None if rotary is None else rotary[None]
        if pruning is not None:
            first, cells = pruning.first, pruning.choose(hidden)
            hidden = only(hidden, cells)
            if rotary is not None and cells is not None:
                table = rotary[cells]
        if cache is not None:
            # The prefix comes with the condition.
            cache.write_next_at(0 if condition is not None else cache.prefix_end + first, hidden.shape[1])
            if condition is not None:
                cache.conditions = conditions
        if self.training:
            hidden = F.dropout(hidden, self.config.get("dropout", 0.0))
        *blocks, (scale, shift, *shared) = conditions
        if mask is not None:
            # Once for all blocks: attention adds it to its scores.
            mask = mask.to(self.dtype if self.in_float32 else hidden.dtype).log()
        steps = cache is not None and cache.keeps_all_or_none and self.has_steps and runs_kernels(self)
        if steps:
            shared = [part.to(self.dtype) for part in shared]
        for layer, block in enumerate(self.blocks):
            run = block.step if steps else block
            hidden = run(hidden, (*blocks[layer], *shared), mask, cache, layer, table)
            if mix is not None and layer == mix[0]:
                guided, rest = hidden.chunk(2)
                hidden = torch.lerp(rest, guided, mix[1])
                # No layer after this one reads the rows without a condition.
                count = len(hidden)
                blocks = [tuple(part[:count] for part in each) for each in blocks]
                shared, table = [part[:count] for part in shared], None if table is None else table[:count]
        if pruning is not None:
            hidden = pruning.restore(whole, hidden, cells)
        hidden, count = hidden[:, first_query - len(levels) :], len(hidden)
        return self.head(layer_norm(hidden, scale[:count], shift[:count]))


class BoundScaleModel(BoundNetwork):
    """Base of the next-scale models. Unless one says otherwise, it generates images bit by bit, its scales cost as
    much as they have tokens, and `Sampling` guides it. A family adds `inputs` and `settings`.

    Args:
        transformer: runs the forward passes: a network, or what `torch.compile` made of it. Its logits are
            [rows, cells, vocab_size], or [rows, cells, tokens of a cell, vocab_size].
        conditions: the `Conditions` of the images.
        scales: the shape of each map in cells.
        per_cell: how many tokens a cell of each map has.
        codebook: see `BoundNetwork`.

    Attributes:
        cells: the number of cells of each map.
    """

    kind: ClassVar[Literal["scales"]] = "scales"
    prunes: ClassVar[bool] = True
    # See `ScaleTransformer`.
    in_float32: ClassVar[bool] = False
    guidance_schedule: ClassVar[Literal["linear", "constant"]] = "constant"
    last_clip = 0
    # A bit is a token.
    vocab_size = 2
    refiner: Any = None

    def __init__(
        self,
        transformer: Any,
        conditions: Conditions,
        scales: Sequence[tuple[int, ...]],
        per_cell: Sequence[int],
        codebook: torch.Tensor | None = None,
    ):
        super().__init__(transformer, conditions, codebook)
        self.transformer = transformer
        self.scales: tuple[tuple[int, ...], ...] = tuple(scales)
        self.cells = tuple(math.prod(shape) for shape in self.scales)
        self.scale_sizes: tuple[int, ...] = tuple(n * tokens for n, tokens in zip(self.cells, per_cell, strict=True))
        self.num_tokens = sum(self.scale_sizes)

    @property
    def costs(self) -> tuple[float, ...]:
        """See `ScaleModel`."""
        return self.scale_sizes

    def inputs(self, scale: int, latents: torch.Tensor) -> torch.Tensor:
        """What the transformer takes for the cells of `scale`, [B, cells, D]."""
        raise NotImplementedError

    def settings(self, scale: int, branches: int, cache: Any, pruning: Pruning | None) -> dict[str, Any]:
        """What else the transformer takes for `scale`, of which so many branches are fed."""
        raise NotImplementedError

    def prune(self, cache: ScaleCache, pruned: Mapping[int, float] | None) -> None:
        """Let the passes of a cache feed all but these shares of cells; see `ScaleModel.prefill`."""
        if pruned:
            width, dtype = self.transformer.config.hidden_size, self.transformer.dtype
            dtype = torch.float32 if self.in_float32 else dtype
            cache.prune(fed_cells(self.cells, pruned), min(pruned) - 1, width, dtype)

    def forward(self, scale: int, latents: torch.Tensor, cache: Any, *, guided: bool = True) -> torch.FloatTensor:
        """Logits [G, B, n, V] of `scale`; see `ScaleModel.forward`."""
        branches = self.branches if guided else 1
        pruning = pruning_of(scale, cache, self.scales)
        settings = self.settings(scale, branches, cache, pruning)
        inputs = self.inputs(scale, latents).repeat(branches, 1, 1)
        logits = self.transformer(inputs, cache=cache, pruning=pruning, **settings)
        return logits.flatten(1, -2).unflatten(0, (-1, len(latents)))

    def guide(self, logits, guidance_scale, temperature) -> torch.FloatTensor | None:
        """See `ScaleModel.guide`."""
        return None


class GrowingScaleModel(BoundScaleModel):
    """Base of the models of a `ScaleTransformer`: several scales may be fed by one forward pass, and later ones see
    all of them.

    Args:
        vq: the image tokenizer, which adds up the maps.
        transformer, conditions, scales, per_cell, codebook: see `BoundScaleModel`.
    """

    # Whether the last scale, which no other one reads, is kept.
    keeps_last: ClassVar[bool] = True

    def __init__(self, vq: nn.Module, transformer: Any, conditions: Conditions, scales, per_cell, codebook=None):
        super().__init__(transformer, conditions, scales, per_cell, codebook)
        self.vq, self._levels = vq, levels_of(self.cells, self.device)

    def prefix_mask(self, condition: dict[str, torch.Tensor]) -> torch.BoolTensor | None:
        """Which positions of the prefix are visible, bool [rows, P]; None without one."""
        return None

    def mix(self, scale: int, branches: int) -> tuple[int, float | torch.Tensor] | None:
        """See `ScaleTransformer.forward`."""
        return None

    def at_cells(self, cells: slice) -> dict[str, Any]:
        """What the transformer takes for these cells of an image."""
        return {"levels": self._levels[cells]}

    def prefill(
        self, batch_size: int, latents: Sequence[torch.Tensor] = (), *, pruned: Mapping[int, float] | None = None
    ) -> tuple[GrowingCache, torch.FloatTensor]:
        """A cache with the condition and the scales 0 .. len(latents) in it, and the logits [G, B, n, V] of the last
        of them; see `ScaleModel.prefill`."""
        config, first_query = self.transformer.config, sum(self.cells[: len(latents)])
        stop = first_query + self.cells[len(latents)]
        mix = self.mix(len(latents), self.branches)
        # With latents, images of equal conditions differ; so do the halves of rows that are mixed.
        shared = not latents and mix is None
        fed = fed_cells(self.cells, pruned)
        cache, condition, copies = self.open_prefill(
            GrowingCache,
            batch_size,
            config.num_layers,
            config.num_attention_heads,
            slots=sum(fed if self.keeps_last else fed[:-1]),
            filled=stop,
            shared=shared,
        )
        inputs = None
        if latents:
            maps = [self.inputs(scale, latent) for scale, latent in enumerate(latents, 1)]
            inputs = torch.cat(maps, dim=1).repeat(self.branches, 1, 1)
        at, prefix_mask = self.at_cells(slice(0, stop)), self.prefix_mask(condition)
        # The first map sees all of itself.
        alone = prefix_mask is None and not latents
        mask = None if alone else block_causal_mask(at["levels"], prefix_mask)
        logits = self.transformer(
            inputs, mask=mask, condition=condition, cache=cache, first_query=first_query, mix=mix, **at
        )
        if shared:
            (logits,) = spread(cache, copies, logits)
        self.prune(cache, pruned)
        return cache, logits.flatten(1, -2).unflatten(0, (-1, batch_size))

    def settings(self, scale: int, branches: int, cache: GrowingCache, pruning: Pruning | None) -> dict[str, Any]:
        first = sum(self.cells[:scale])
        stop, mask = first + self.cells[scale], None
        if self.conditions.prefix_length:
            keys = stop if pruning is None else pruning.stop
            seen = self.conditions.seen[: branches * self.conditions.images]
            mask = F.pad(seen, (0, keys), value=True)[:, None, None]
        return {"mask": mask, "first": first, "mix": self.mix(scale, branches), **self.at_cells(slice(first, stop))}
