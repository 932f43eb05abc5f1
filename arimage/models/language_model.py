"""Language models that generate images: any decoder of transformers with the prompts of one call."""

from collections.abc import Callable, Hashable
from typing import Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from ..kernels.operation import DEVICES
from ..kernels.step import DTYPES
from ..kernels.step.rows import open_rows
from .attention_transformers import FOLDED, fold_heads
from .bound import BoundTokenModel
from .cache_transformers import LanguageCache, cache_argument
from .conditions import Conditions, check_raster, rows_of, spread
from .language_heads import HeadLayers, head_layers, step_head
from .layer_in_torch import run_layers, run_perceptron
from .layers import additive, causal_mask
from .quantized import pack_weights
from .step import StepPlaces, has_weights_like
from .step_language import misfit, misfit_in_torch, parts_of, turn_table
from .step_layer import StepLayer, attend_layer, feed_layer, norm_of


# Prompts are padded on the left to a multiple of this length, so that a compiled step serves prompts of about one
# length.
PROMPT_MULTIPLE = 32
# Longer prompts, such as those with reference images, are prefilled in parts of this length: the mask of a whole one
# grows with the square of its length.
PREFILL_TOKENS = 1024


class LanguageTokenModel(BoundTokenModel):
    """A decoder of transformers with the prompts of one call, as a `TokenModel` (see
    `arimage.decoding.contract.models`).

    Prompts of different length are padded on the left. Each row counts its RoPE positions from its own first token, so
    the unconditional rows may be shorter than the conditional ones: after a prompt of T tokens, image token p has
    position T + p, or T + p + p // columns if a token ends each row. Models with other positions, or with several
    axes of them, give `prompt_positions` and `token_positions`.

    A row end costs no forward pass of its own: it is fed in the same pass as the token that completes the row, right
    after it, and its logits are those of the next position. The row end of the last row is never fed. On the CPU a
    forward pass is longer by the row ends in it. On an accelerator, where counting them would wait for the device, and
    in a compiled step, whose shapes are fixed, it is longer by the largest number possible.

    Unknown tokens (-1) are embedded as zeros. If one ends a row, only its row-end token is visible.

    Args:
        decoder: a base model such as `ChameleonModel`, `LlamaModel` or `Emu3TextModel` with "sdpa" or "eager"
            attention. It is called with `inputs_embeds`, `position_ids`, a 4-D additive `attention_mask` and a cache.
            Its layers may lie on several devices. If heads share keys and values, its attention becomes
            `fold_heads`'s.
        embed: maps image tokens int64 [...] in 0 .. V - 1 to the decoder's inputs [..., D].
        head: maps the decoder's last hidden states [..., D] to logits [..., V] of the image tokens alone, see
            `CodeHead`.
        layout: the `Layout` of the image, (rows, columns) in raster order, perhaps with grids before it.
        input_ids, inputs_embeds: the prompts, int64 [branches * B', P] or [branches * B', P, D], up to the last token
            before the first image token, with size and begin-of-image tokens. Give one of the two. The conditional
            rows of all B' prompts come first, then those of each other branch in the same order.
        attention_mask: [branches * B', P], 0 for padding, which is never seen; None without padding.
        prompt_positions, token_positions: the RoPE positions of models that count them in their own way, int64
            [branches * B', axes, P] and [axes, N]: image token p has the position after that of the last prompt token,
            on each axis, plus `token_positions[:, p]`. Then `position_ids` are [axes, rows, Q].
        row_end: id of the token that ends a row; None if there is none.
        codebook: the vectors of the tokens in the image tokenizer [V, D'], for `TokenModel.codebook`.
        branches: rows per image: 1, 2 under guidance, or more where a part of the condition is guided too.
        network: for `TokenModel.network`, the decoder by default.
        neighbours: a `NeighbourModel` of its tokens.

    Raises:
        ValueError: if the layout has three dimensions or an order, the attention takes no masks, not exactly one of
            `input_ids` and `inputs_embeds` is given, the rows are not `branches` of equal size, a prompt is padded on
            the right, only one of the two kinds of positions is given or has the wrong shape, a token ends each row of
            a layout with several grids or with given positions, or `neighbours` have another number of tokens.
    """

    kind: ClassVar[Literal["tokens"]] = "tokens"

    def __init__(
        self,
        decoder: PreTrainedModel,
        *,
        embed: Callable[[torch.LongTensor], torch.Tensor],
        head: Callable[[torch.Tensor], torch.Tensor],
        layout,
        input_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        prompt_positions: torch.LongTensor | None = None,
        token_positions: torch.LongTensor | None = None,
        row_end: int | None = None,
        codebook: torch.Tensor | None = None,
        branches: int = 1,
        network: nn.Module | None = None,
        neighbours: Any = None,
    ):
        if not layout.before:
            check_raster(layout, "a language model")
        if row_end is not None and (layout.before or token_positions is not None):
            raise ValueError("row ends are for one grid, and have positions of their own: give no row_end")
        attention = decoder.config._attn_implementation
        if attention not in ("sdpa", FOLDED, "eager"):
            raise ValueError(
                f"the decoder has {attention!r} attention, which takes no mask per query: load it with "
                'attn_implementation="sdpa"'
            )
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("a prompt is either input_ids or inputs_embeds: give one of the two")
        prompt = decoder.get_input_embeddings()(input_ids) if inputs_embeds is None else inputs_embeds
        rows, length = prompt.shape[:2]
        if branches < 1 or rows % branches:
            raise ValueError(
                f"{rows} prompts are not {branches} branches: give one per image, and two per image under guidance"
            )
        if attention_mask is not None and not attention_mask[:, -1].all():
            raise ValueError("attention_mask hides the last token of a prompt: pad prompts on the left")
        mask = torch.ones(rows, length, device=prompt.device) if attention_mask is None else attention_mask
        mask = mask.to(prompt.device).bool()
        seen = F.pad(mask, (-length % PROMPT_MULTIPLE, 0))
        values = {"prompt": prompt, "mask": mask}
        # The position of the first image token of each row, and how far the others are from it where they are given.
        self._first, self._offsets = mask.sum(1), None
        if prompt_positions is not None or token_positions is not None:
            positions = _check_positions(prompt_positions, token_positions, rows, length, layout.num_tokens)
            values["positions"], self._offsets = (given.to(prompt.device) for given in positions)
            self._first = values["positions"][..., -1].T + 1
        conditions = Conditions(values, branches, seen, input_ids)
        super().__init__(decoder if network is None else network, conditions, layout, codebook)
        self._decoder, self._embed, self._head = decoder, embed, head
        self._cache_argument = cache_argument(decoder)
        self._dtype = prompt.dtype
        self._heads_per_key = fold_heads(decoder.config)
        self._row_end = None
        if row_end is not None:
            token = torch.tensor(row_end, device=prompt.device)
            self._row_end = decoder.get_input_embeddings()(token).to(prompt)
        self.vocab_size = head(prompt[:1, 0]).shape[-1] if codebook is None else len(codebook)
        if neighbours is not None and neighbours.config.vocab_size != self.vocab_size:
            raise ValueError(
                f"neighbours have {neighbours.config.vocab_size} tokens, and the model {self.vocab_size}: fit them to "
                "tokens of the model"
            )
        self.neighbours = neighbours
        self._set_turns(prompt)
        self._layers_on_cpu: list[StepLayer] | None = None
        self._head_on_cpu: HeadLayers | None = None

    @torch.no_grad()
    def prefill(
        self, batch_size: int, scratch: int = 0, *, slots: int | None = None
    ) -> tuple[LanguageCache, torch.Tensor]:
        """A cache with the prompts in it, and the logits [G, B, V] of position 0; see `TokenModel.prefill`."""
        condition, copies = self.conditions.to_prefill(batch_size)
        mask = condition["mask"]
        self._read_layers(condition["prompt"])
        cache = LanguageCache(
            *mask.shape,
            places=self.conditions.prefix_length,
            batch_size=batch_size,
            layout=self.layout,
            slots=slots,
            scratch=scratch,
            branches=self.branches,
            has_row_ends=self._row_end is not None,
            compact=self.compact,
            together=self._decoder.config.num_hidden_layers if self._on_one_device else 1,
            device=self.device,
        )
        if self._offsets is None:
            positions = (mask.long().cumsum(1) - 1).clamp(min=0)
        else:
            positions = condition["positions"].transpose(0, 1)
        rows, length = mask.shape
        for start in range(0, length, PREFILL_TOKENS):
            stop = min(start + PREFILL_TOKENS, length)
            cache.write_prompts(rows, length, start, stop)
            visible = F.pad(causal_mask(mask[:, :stop], 0, start), (cache.prefix_end - length, 0))
            hidden = self._run(condition["prompt"][:, start:stop], positions[..., start:stop], visible, cache)[:, -1]
        (hidden,) = spread(cache, copies, hidden)
        return cache, self._logits(hidden)

    @torch.no_grad()
    def forward(
        self,
        tokens: torch.LongTensor,
        positions: torch.LongTensor,
        cache: LanguageCache,
        *,
        visible: torch.BoolTensor | None = None,
        slots: torch.LongTensor | None = None,
    ) -> torch.Tensor:
        """Logits [G, B, Q, V] of the positions after `positions`; see `TokenModel.forward`."""
        cache.allocate()
        embedded = self._embed(tokens.clamp(min=0)).to(self.device, self._dtype)
        if self._begins_step(cache, slots, visible):
            return self._step(embedded, tokens, positions, cache, slots, visible)
        at_slots = cache.slots_of(positions, slots)
        seen = cache.seen(at_slots, visible)
        at, index = positions.clamp(min=0), cache.index(at_slots)
        embedded = embedded.masked_fill((tokens < 0)[..., None], 0)
        last = None
        if self._row_end is not None:
            count, room = tokens.shape[1], self._room_for_row_ends(positions, slots is not None)
            ends, after, end_slots, seen = self._row_ends(cache, seen, tokens, positions, at_slots, room)
            at = at + at // self.layout.columns
            at = torch.cat([at, at.gather(1, after) + 1], dim=1)
            index = torch.cat([index, cache.row_end_index(end_slots)], dim=1)
            embedded = torch.cat([embedded, self._row_end.expand(len(tokens), room, -1)], dim=1)
            rank = count + ends.long().cumsum(1) - 1
            last = torch.where(ends, rank, torch.arange(count, device=self.device)).repeat(self.branches, 1)[..., None]
        at = at.repeat(self.branches, 1)
        cache.write_next_at(index)
        hidden = self._run(
            embedded.repeat(self.branches, 1, 1),
            (at if self._offsets is None else self._offsets[:, at]) + self._first[..., None],
            self.conditions.visible_keys(cache.prefix_end, seen),
            cache,
        )
        if last is not None:
            hidden = hidden.gather(1, last.to(hidden.device).expand(-1, -1, hidden.shape[2]))
        return self._logits(hidden)

    def _set_turns(self, prompt: torch.Tensor) -> None:
        """Compute what the layers of a step rotate by: of every position, or of every token of every row."""
        self._turns: torch.Tensor | None = None
        if parts_of(self._decoder) is None:
            return
        if self._offsets is None:
            # As many as any prompt needs that may take the place of these, see `put_key`.
            width = PROMPT_MULTIPLE << (self.conditions.prefix_length // PROMPT_MULTIPLE).bit_length()
            positions = torch.arange(width + self.num_tokens + self.layout.rows, device=prompt.device)[None]
            self._starts = self._first
        else:
            positions = self._offsets[:, None] + self._first[..., None]
            self._starts = torch.arange(positions.shape[1], device=prompt.device) * self.num_tokens
        self._turns = turn_table(self._decoder, prompt, positions)

    @property
    def slow_layers(self) -> str:
        """Why its layers run in torch on a device that has the kernels of a step, or by transformers' modules on a
        CPU; "" if they do not."""
        reason = None
        # That float32 has no kernels says nothing about this model.
        if self.device.type in DEVICES and self._dtype in DTYPES:
            reason = misfit(self._decoder)
        elif self.device.type == "cpu":
            reason = misfit_in_torch(self._decoder)
        where = "in torch" if self.device.type in DEVICES else "by transformers"
        return reason and f"layers {where}: {reason}" or ""

    def _begins_step(
        self, cache: LanguageCache, slots: torch.LongTensor | None = None, visible: torch.BoolTensor | None = None
    ) -> bool:
        """Whether the next forward pass takes the kernels of a step."""
        # Slots of a tree say nothing about what they see.
        fits = slots is None or visible is not None
        steps = fits and self._turns is not None and misfit(self._decoder) is None
        cache.leave_ends(steps)
        return steps

    def _step(
        self,
        embedded: torch.Tensor,
        tokens: torch.LongTensor | None,
        positions: torch.LongTensor,
        cache: LanguageCache,
        slots: torch.LongTensor | None = None,
        visible: torch.BoolTensor | None = None,
    ) -> torch.Tensor:
        """`forward` by the kernels of `arimage.kernels.step`, of tokens whose embeddings are [B, Q, D]."""
        columns, row_end, ends_of = self.layout.columns, self._row_end, cache.end_index_of
        room = 0 if row_end is None else self._most_row_ends(positions.shape[1], slots is not None)
        if row_end is not None and visible is not None:
            at_slots = cache.slots_of(positions, slots)
            seen = cache.seen(at_slots, visible)
            *_, seen = self._row_ends(cache, seen, tokens, positions, at_slots, room)
            visible = seen.roll(cache.prefix_end - cache.first, dims=2)
        given = embedded.flatten(0, 1), tokens, positions, slots, cache.index_of, self._starts
        hidden, last, index, turns, ends, heads = open_rows(
            *given, columns, self.num_tokens - 1, room, row_end, None if row_end is None else ends_of
        )
        at = StepPlaces(
            table=self._turns,
            positions=turns,
            index=index,
            seen=self.conditions.seen,
            prefix_end=cache.prefix_end,
            first=cache.first,
            slots=last,
            visible=None if visible is None else visible.flatten(0, 1),
            ends=None if row_end is None else ends,
            columns=columns,
            halves=True,
        )
        parts = parts_of(self._decoder)
        assert parts is not None
        for layer, keys, values in zip(self._decoder.layers, cache.keys, cache.values, strict=True):
            read = parts(layer)
            hidden = feed_layer(attend_layer(hidden, read, at, keys, values), read)
        norm, layers, index = norm_of(self._decoder.norm), head_layers(self._head, hidden), None
        if row_end is not None:
            index = heads
        if layers is None:
            hidden = F.rms_norm(hidden, hidden.shape[1:], norm.weight, norm.eps)
            logits = self._head(hidden if index is None else hidden[index]).to(self.device)
        else:
            logits = step_head(hidden, norm, layers, index)
        return logits.view(self.branches, *positions.shape, -1)

    @property
    def trainable(self) -> bool:
        """Whether `predict` knows the positions of the tokens: they follow the prompt in raster order."""
        return self._offsets is None

    def predict(self, tokens: torch.LongTensor, unconditional: torch.BoolTensor | None = None) -> torch.Tensor:
        """Teacher-forced logits [B, N, V] in float32 of tokens [B, N] after the prompts; the images `unconditional`
        [B] have those without a condition, which a model of two branches has. Differentiable, for `trainable`
        models."""
        rows = torch.arange(len(tokens), device=self.device)
        if unconditional is not None:
            rows = rows + len(tokens) * unconditional.to(rows)
        condition = {name: value[rows] for name, value in self.conditions.values.items()}
        embedded, places = self._embed(tokens[:, :-1]), torch.arange(self.num_tokens, device=self.device)
        if self._row_end is not None:
            columns = self.layout.columns
            ends = [
                self._row_end.expand(len(tokens), int(last and place > 0), -1)
                for place, last in enumerate((places % columns == 0).tolist())
            ]
            pieces = zip(ends[1:], embedded.split(1, dim=1), strict=True)
            embedded = torch.cat([part for end, token in pieces for part in (token, end)], dim=1)
            places = places + places // columns
        mask = F.pad(condition["mask"], (0, embedded.shape[1]), value=True)
        hidden = self._decoder(
            inputs_embeds=torch.cat([condition["prompt"], embedded.to(self._dtype)], dim=1),
            position_ids=(mask.long().cumsum(1) - 1).clamp(min=0),
            attention_mask=additive(
                causal_mask(condition["mask"], embedded.shape[1]), self._dtype, self._heads_per_key
            ),
            use_cache=False,
        ).last_hidden_state
        return self._head(hidden[:, condition["mask"].shape[1] - 1 + places]).float()

    def _row_ends(self, cache, seen, tokens, positions, at_slots, room) -> tuple[torch.Tensor, ...]:
        """Which tokens end a row [B, Q], those that a row end follows [B, R] if there is one, the slots that the row
        ends belong to [B, R], and the keys that tokens and row ends see, bool [B, Q + R, K]. Tokens at `at_slots`
        [B, Q] see `seen` [B, Q, K]."""
        ends = self._ending(positions)
        cache.row_ends.scatter_(1, at_slots, ends)
        # The queries that end a row, in order, then as many others as there is room for.
        after = ends.long().argsort(dim=1, descending=True, stable=True)[:, :room]
        end_slots = torch.where(ends.gather(1, after), at_slots.gather(1, after), -1)
        by_end, count = seen.gather(1, after[..., None].expand(-1, -1, seen.shape[2])), len(cache.owners)
        there = cache.row_ends[:, None, cache.owners]
        seen[..., :count] &= there & (cache.owners != at_slots[..., None])
        by_end[..., :count] &= there & (end_slots >= 0)[..., None]
        # An unknown token carries no information, unlike its row end.
        keys = torch.arange(cache.prefix_end, cache.first + cache.attended_slots, device=self.device)
        unknown = torch.where(tokens.gather(1, after) < 0, cache.index_of[end_slots], -1)
        by_end &= keys != unknown[..., None]
        return ends, after, end_slots, torch.cat([seen, by_end], dim=1)

    def _ending(self, positions: torch.LongTensor) -> torch.BoolTensor:
        """Which tokens [B, Q] a row end follows."""
        columns = self.layout.columns
        return (positions % columns == columns - 1) & (positions >= 0) & (positions < self.num_tokens - 1)

    @property
    def put_key(self) -> Hashable:
        steps = None if self._offsets is None else self._offsets.cpu().numpy().tobytes()
        # Prompts of up to twice as many tokens share a width, so that short ones do not attend to that of a long one.
        width = self.conditions.prefix_length // PROMPT_MULTIPLE
        attention = self._decoder.config._attn_implementation
        return (
            self.network,
            self._companion_keys,
            self.layout.grids,
            steps,
            self.branches,
            self._row_end is None,
            width.bit_length(),
            attention,
        )

    def take(self, images: torch.LongTensor) -> Self:
        other = super().take(images)
        rows = rows_of(images, self.branches, self.conditions.images)
        other._first = self._first[..., rows]
        if self._turns is not None:
            other._starts = other._first if self._offsets is None else self._starts[: len(rows)]
            if self._offsets is not None:
                other._turns = self._turns.unflatten(0, (-1, self.num_tokens))[rows].flatten(0, 1)
        return other

    def put(self, images: torch.LongTensor, other: Self) -> bool:
        rows = rows_of(images, self.branches, self.conditions.images)
        self._first.index_copy_(-1, rows, other._first)
        if self._turns is not None and self._offsets is not None:
            mine, theirs = self._turns, other._turns
            assert theirs is not None
            shape = -1, self.num_tokens
            mine.unflatten(0, shape).index_copy_(0, rows, theirs.unflatten(0, shape))
        if self._row_end is not None:
            self._row_end.copy_(other._row_end)
        return super().put(images, other)

    @property
    def _on_one_device(self) -> bool:
        """Whether all weights are where the prompt is: neither on several devices nor offloaded."""
        return all(weight.device == self.device for weight in self._decoder.parameters())

    def _room_for_row_ends(self, positions: torch.LongTensor, given_slots: bool) -> int:
        if positions.device.type == "cpu" and not torch.compiler.is_compiling():
            return int(self._ending(positions).sum(1).max())
        return self._most_row_ends(positions.shape[1], given_slots)

    def _most_row_ends(self, count: int, given_slots: bool) -> int:
        # The ranks of queries without slots lie within as many consecutive ones.
        return count if given_slots else min((count - 1) // self.layout.columns + 1, self.layout.rows - 1)

    def _read_layers(self, like: torch.Tensor) -> None:
        """Read what the forward passes of a call take on a CPU in place of modules, with inputs like `like`."""
        self._layers_on_cpu = self._head_on_cpu = None
        if self.device.type != "cpu" or torch.compiler.is_compiling() or misfit_in_torch(self._decoder):
            return
        parts = parts_of(self._decoder)
        assert parts is not None
        pack_weights(self._decoder.layers, like)
        self._layers_on_cpu = list(map(parts, self._decoder.layers))
        self._head_on_cpu = head_layers(self._head, like, has_weights_like)

    def _run(self, embedded, positions, visible, cache) -> torch.Tensor:
        mask = additive(visible, embedded.dtype, self._heads_per_key)
        layers = self._layers_on_cpu
        if layers is not None and not torch.compiler.is_compiling():
            # Prompts with a channel that says which tokens are text take the modules.
            if embedded.shape[-1] == self._decoder.norm.weight.shape[-1]:
                return run_layers(self._decoder, layers, embedded, positions, mask, cache)
        return self._decoder(
            inputs_embeds=embedded,
            position_ids=positions,
            attention_mask=mask,
            use_cache=True,
            **{self._cache_argument: cache},
        ).last_hidden_state

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        layers = None if torch.compiler.is_compiling() else self._head_on_cpu
        logits = self._head(hidden).to(self.device) if layers is None else run_perceptron(hidden, layers)
        return logits.unflatten(0, (self.branches, -1))


def _check_positions(
    prompts: torch.LongTensor | None, tokens: torch.LongTensor | None, rows: int, length: int, num_tokens: int
) -> tuple[torch.LongTensor, torch.LongTensor]:
    if prompts is None or tokens is None:
        raise ValueError("prompt_positions and token_positions belong together: give both, or none")
    if prompts.shape != (rows, len(tokens), length) or tokens.shape != (len(tokens), num_tokens):
        raise ValueError(
            f"prompt_positions are {tuple(prompts.shape)} and token_positions {tuple(tokens.shape)}: give "
            f"[{rows}, axes, {length}] and [axes, {num_tokens}]"
        )
    return prompts, tokens
