"""Next-scale transformers, and with the conditions of one call as `ScaleModel`s."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import nn

from ..kernels.step import has_many_rows
from ..kernels.step.modulations import modulations
from .bound import BoundNetwork
from .cache import GrowingCache, ScaleCache
from .conditions import Conditions, spread
from .modulated_blocks import Sum, block_causal_mask, layer_norm, levels_of, modulated_by
from .pruning import Pruning, fed_cells, only, pruning_of
from .step import runs_kernels


class ScaleTransformer:
    """The forward pass of next-scale transformers with `blocks` (`modulated_blocks.Block`), a `level_embedding`, an
    `input_projection` and a `head`. A family adds `read_condition`."""

    # Whether the hidden states between layers are in float32, whatever the dtype of the weights.
    in_float32: ClassVar[bool] = False

    config: Any
    dtype: torch.dtype
    training: bool
    blocks: nn.ModuleList
    level_embedding: nn.Module
    input_projection: nn.Module
    # None in blocks that each make their own modulation of the condition.
    shared_modulation: nn.Module | None
    head_modulation: nn.Module
    head: nn.Module
    __call__: Callable[..., torch.FloatTensor]

    @property
    def step_parts(self) -> list[nn.Module]:
        """See `runs_kernels`."""
        return [*self.blocks, self.head]

    def read_condition(self, **condition) -> tuple[torch.Tensor, torch.Tensor | None, list[tuple[torch.Tensor, ...]]]:
        """The hidden states [B, n, hidden_size] that the first map starts from, those of a prefix [B, P, hidden_size]
        or None, and what the layers need, computed once per image: what each block takes, then a scale and a shift
        [B, 1, hidden_size] before the head, and which tokens of a text all blocks see, bool [B, P], if they do."""
        raise NotImplementedError

    def modulations(self, vector: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        """The modulations [B, 1, hidden_size] by the condition [B, hidden_size]: two gates, two scales and two shifts
        per block, then a scale and a shift before the head. The layers output a scale's difference from 1."""
        width, condition = self.config.hidden_size, F.silu(vector)
        before_head = self.head_modulation(condition).unflatten(-1, (2, 1, width))
        layers, steps = [block.modulation for block in self.blocks], runs_kernels(self, len(condition))
        if self.shared_modulation is not None:
            condition = self.shared_modulation(condition)
        if not steps:
            rows = torch.stack([layer(condition) for layer in layers], dim=1)
        elif self.shared_modulation is not None:
            rows = condition[:, None] + torch.stack([layer.bias for layer in layers])
        else:
            scales = [layer.scale for layer in layers if layer.scale is not None]
            weights = [layer.weight for layer in layers], [layer.bias for layer in layers]
            rows = modulations(condition, *weights, scales)
        rows = rows.view(len(rows), len(layers), 6, 1, width)
        rows[:, :, 2:4].add_(1)
        before_head[:, 0].add_(1)
        return [*(each.unbind(1) for each in rows.unbind(1)), before_head.unbind(1)]

    def embed_places(self, levels: torch.LongTensor, first: int) -> torch.Tensor:
        """What is added for the maps of cells (`levels` [T]) and for their places, from `first` on."""
        return self.level_embedding(levels).float()

    def prefix_mask(self, **condition) -> torch.BoolTensor | None:
        """Which positions of the prefix are visible, bool [B, P]; None without one."""
        return None

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
            assert cache is not None and inputs is not None
            conditions = [tuple(part[: len(inputs)] for part in layer) for layer in cache.conditions]
        if inputs is not None:
            parts.append(self.input_projection(inputs))
        hidden = (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)) + self.embed_places(levels, first)
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
        steps = cache is not None and cache.keeps_all_or_none and self.config.get("qk_norm", True)
        steps = steps and runs_kernels(self)
        dtype, rows = self.dtype if self.in_float32 else hidden.dtype, hidden.flatten(0, 1)
        *blocks, (scale, shift, *texts) = conditions
        if cache is not None and steps and not has_many_rows(rows):
            # Of one map, which sees all of the image before it.
            if mask is None:
                mask = hidden.new_empty(len(hidden), 0, dtype=torch.bool)
            elif mask.shape[2] == 1:
                mask = mask[:, 0, 0, : cache.prefix_end].contiguous()
            else:
                mask = mask.to(dtype).log()
        else:
            # Once for all blocks: attention adds them to its scores.
            mask = None if mask is None else mask.to(dtype).log()
            texts = [seen.to(self.dtype).log()[:, None, None] for seen in texts]
        last, before = len(self.blocks) - 1, Sum(rows, modulated_by(*blocks[0][2:5:2]))
        for layer, block in enumerate(self.blocks):
            given = mask, cache, layer, table
            if steps:
                after, mixes = (*blocks, (None, None, scale, None, shift))[layer + 1][2:5:2], mix and layer == mix[0]
                apart = layer == last or mixes
                before = block.step(before, (*blocks[layer], *texts), modulated_by(*after), apart, *given)
                hidden = before.rows.view_as(hidden)
            else:
                hidden = block(hidden, (*blocks[layer], *texts), *given)
            if mix is not None and layer == mix[0]:
                guided, rest = hidden.chunk(2)
                hidden = torch.lerp(rest, guided, mix[1])
                # No layer after this one reads the rows without a condition.
                count = len(hidden)
                blocks = [tuple(part[:count] for part in each) for each in blocks]
                scale, shift, table = scale[:count], shift[:count], None if table is None else table[:count]
                texts, mask = [part[:count] for part in texts], None if mask is None else mask[:count]
                if steps and layer < last:
                    before = Sum(hidden.flatten(0, 1), modulated_by(*blocks[layer + 1][2:5:2]))
        if pruning is not None:
            hidden = pruning.restore(whole, hidden, cells)
        hidden = hidden[:, first_query - len(levels) :]
        if not steps:
            return self.head(layer_norm(hidden, scale, shift))
        return self.head.step(Sum(hidden.flatten(0, 1), modulated_by(scale, shift))).unflatten(0, hidden.shape[:2])

    def predict_maps(
        self, inputs: torch.Tensor, counts: Sequence[int], rotary: torch.Tensor | None = None, **condition
    ) -> torch.FloatTensor:
        """Teacher-forced logits of the cells of maps with these `counts`, given the condition and the inputs [B, M, D]
        of all maps but the first. The inputs may end after any map."""
        levels = levels_of(counts, inputs.device)[: counts[0] + inputs.shape[1]]
        mask = block_causal_mask(levels, self.prefix_mask(**condition))
        return self(inputs, levels=levels, rotary=rotary, mask=mask, condition=condition)


class BoundScaleModel(BoundNetwork):
    """Base of the next-scale models. Unless one says otherwise, it generates images bit by bit, its scales cost as
    much as they have tokens, and `Sampling` guides it.

    Args:
        transformer: runs the forward passes: a network, or what `torch.compile` made of it.
        conditions, codebook: see `BoundNetwork`.
        scales: the shape of each map in cells.
        per_cell: how many tokens a cell of each map has.

    Attributes:
        cells: the number of cells of each map.
    """

    kind: ClassVar[Literal["scales"]] = "scales"
    prunes: ClassVar[bool] = True
    guidance_schedule: ClassVar[Literal["linear", "constant"]] = "constant"
    last_clip = 0
    # A bit is a token.
    vocab_size = 2
    refiner: Any = None

    def __init__(self, transformer: Any, conditions: Conditions, scales, per_cell: Sequence[int], codebook=None):
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

    def prune(self, cache: ScaleCache, pruned: Mapping[int, float] | None, dtype: torch.dtype) -> None:
        """Let the forward passes of a cache leave out these shares of cells; see `ScaleModel.prefill`. Hidden states
        are of `dtype`."""
        if pruned:
            width = self.transformer.config.hidden_size
            cache.prune(fed_cells(self.cells, pruned), min(pruned) - 1, width, dtype)

    def guide(self, logits, guidance_scale, temperature) -> torch.FloatTensor | None:
        """See `ScaleModel.guide`."""
        return None


class GrowingScaleModel(BoundScaleModel):
    """Base of the models of a `ScaleTransformer`: every scale sees all before it, and several may be fed together.

    Args:
        vq: the image tokenizer, which adds up the maps.
        transformer, conditions, scales, per_cell, codebook: see `BoundScaleModel`.
        rotary: the `rotary_table` of all cells, if the transformer takes one.
    """

    # Whether the last scale, which no other one reads, is kept.
    keeps_last: ClassVar[bool] = True

    def __init__(self, vq: nn.Module, *settings, rotary: torch.Tensor | None = None, **more):
        super().__init__(*settings, **more)
        self.vq, self._levels, self._rotary = vq, levels_of(self.cells, self.device), rotary

    def mix(self, scale: int, branches: int) -> tuple[int, float | torch.Tensor] | None:
        """See `ScaleTransformer.forward`."""
        return None

    def _inputs(self, scale: int, latents: torch.Tensor, branches: int) -> torch.Tensor:
        return self.vq.scale_input(self.scales[scale], latents).repeat(branches, 1, 1)

    def _at(self, first: int, stop: int) -> dict[str, Any]:
        """What the transformer takes for these cells of an image."""
        rotary = None if self._rotary is None else self._rotary[first:stop]
        return {"levels": self._levels[first:stop], "rotary": rotary}

    def prefill(
        self, batch_size: int, latents: Sequence[torch.Tensor] = (), *, pruned: Mapping[int, float] | None = None
    ) -> tuple[GrowingCache, torch.FloatTensor]:
        """A cache with the condition and the scales 0 .. len(latents) in it, and the logits [G, B, n, V] of the last
        of them; see `ScaleModel.prefill`."""
        transformer, mix = self.transformer, self.mix(len(latents), self.branches)
        first, stop = (sum(self.cells[:end]) for end in (len(latents), len(latents) + 1))
        # With latents, images of equal conditions differ; so do the halves of rows that are mixed.
        shared, fed = not latents and mix is None, fed_cells(self.cells, pruned)
        slots = sum(fed if self.keeps_last else fed[:-1])
        cache, condition, copies = self.open_prefill(GrowingCache, batch_size, slots=slots, filled=stop, shared=shared)
        maps = [self._inputs(scale, latent, self.branches) for scale, latent in enumerate(latents, 1)]
        prefix_mask, mask = transformer.prefix_mask(**condition), None
        if maps or prefix_mask is not None:
            mask = block_causal_mask(self._levels[:stop], prefix_mask)
        inputs, settings = torch.cat(maps, dim=1) if maps else None, {"first_query": first, "mix": mix}
        logits = transformer(inputs, mask=mask, condition=condition, cache=cache, **self._at(0, stop), **settings)
        if shared:
            (logits,) = spread(cache, copies, logits)
        self.prune(cache, pruned, torch.float32 if transformer.in_float32 else transformer.dtype)
        return cache, logits.flatten(1, -2).unflatten(0, (-1, batch_size))

    def forward(
        self, scale: int, latents: torch.Tensor, cache: GrowingCache, *, guided: bool = True
    ) -> torch.FloatTensor:
        """Logits [G, B, n, V] of `scale`; see `ScaleModel.forward`."""
        first, stop = (sum(self.cells[:end]) for end in (scale, scale + 1))
        branches, mask = self.branches if guided else 1, None
        inputs, pruning = self._inputs(scale, latents, branches), pruning_of(scale, cache, self.scales)
        if self.conditions.prefix_length:
            keys = stop if pruning is None else pruning.stop
            mask = F.pad(self.conditions.seen[: len(inputs)], (0, keys), value=True)[:, None, None]
        settings = {"first": first, "mix": self.mix(scale, branches), "pruning": pruning}
        logits = self.transformer(inputs, mask=mask, cache=cache, **self._at(first, stop), **settings)
        return logits.flatten(1, -2).unflatten(0, (-1, len(latents)))
