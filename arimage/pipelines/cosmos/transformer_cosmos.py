"""The autoregressive transformer of Cosmos-Predict1 (https://arxiv.org/abs/2501.03575): a Llama decoder over the
tokens of a video in raster order, frame after frame, with three-dimensional positions and, for text,
cross-attention."""

import math
from collections.abc import Hashable
from dataclasses import replace
from typing import ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from diffusers import ConfigMixin
from diffusers.configuration_utils import register_to_config
from torch import nn

from ...kernels.rotary import rotate
from ...kernels.step.attention import attention
from ...kernels.step.linear import linear
from ...kernels.step.qkv import queries
from ...models.bound import BoundTokenModel
from ...models.cache import SlotCache
from ...models.conditions import Conditions, spread
from ...models.layers import (
    FeedForward,
    Linear,
    additive,
    attend,
    check_groups,
    embed_known,
    heads_per_key,
    init_normal,
)
from ...models.mixin import ModelMixin, TransformerMixin
from ...models.rotary import frequencies_of, grid_angles, grid_turns
from ...models.step import StepPlaces, begins_step, embed, product
from ...models.step_layer import attend_layer, feed_layer, layer_of
from ...settings.schema import Count, Epsilon, Flag, Layers, Positive, Side, Width, checked


# The authors' YaRN settings: positions are stretched twice, with a ramp between the frequencies that turn 4 times and
# once over the lengths below (frames, rows, columns). The authors use one length for rows and columns.
YARN_SCALE, YARN_FAST, YARN_SLOW = 2, 4, 1
YARN_LENGTHS = (3, 40, 40)


def axis_widths(width: int) -> tuple[int, int, int]:
    """How many dimensions of a vector of `width` encode the position along time, rows and columns."""
    side = width // 6 * 2
    return width - 2 * side, side, side


def positions_in(shape: tuple[int, int, int], like: torch.Tensor) -> list[torch.Tensor]:
    """The positions along each axis of a grid."""
    return [torch.arange(size, device=like.device).to(like) for size in shape]


def rotary_table(
    head_dim: int, shape: tuple[int, int, int], theta: float, yarn: bool, device: torch.device
) -> torch.Tensor:
    """Cosines and sines [T * H * W, head_dim / 2, 2] in float32 for a grid of (frames, rows, columns)."""
    frequencies = []
    for width, length in zip(axis_widths(head_dim), YARN_LENGTHS, strict=True):
        frequency = frequencies_of(width, theta, device)
        if yarn:
            slow, fast = (2 * math.pi * turns / length for turns in (YARN_SLOW, YARN_FAST))
            kept = ((frequency - slow) / (fast - slow)).clamp(0, 1)
            frequency = frequency * (kept + (1 - kept) / YARN_SCALE)
        frequencies.append(frequency)
    return grid_turns(positions_in(shape, frequencies[0]), frequencies)


def position_table(width: int, shape: tuple[int, int, int], device: torch.device) -> torch.Tensor:
    """Absolute positions [T * H * W, width], sines and cosines, for a grid of (frames, rows, columns). The authors
    round them to bfloat16 in every dtype."""
    frequencies = [
        10000 ** (-torch.arange(part // 2, dtype=torch.float64, device=device) / (part // 2))
        for part in axis_widths(width)
    ]
    tables = grid_angles(positions_in(shape, frequencies[0]), frequencies)
    parts = [part for angles in tables for part in (angles.sin(), angles.cos())]
    return torch.cat([part.bfloat16() for part in parts], dim=-1).flatten(0, 2)


def block_mask(length: int, block: int, device: torch.device) -> torch.BoolTensor:
    """Bool [1, length, length], which of `length` tokens each of them sees: those of its own block and of the blocks
    before."""
    number = torch.arange(length, device=device) // block
    return (number <= number[:, None])[None]


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden.float(), hidden.shape[-1:], None, self.eps).to(hidden.dtype) * self.weight


class Attention(nn.Module):
    """Attention to the tokens themselves, or to text embeddings of width `context_dim`."""

    def __init__(self, config, context_dim: int | None = None):
        super().__init__()
        heads, head_dim = config.num_attention_heads, config.head_dim
        check_groups(heads, config.num_key_value_heads)
        inner = config.num_key_value_heads * head_dim
        self.head_dim = head_dim
        self.q_proj = Linear(config.hidden_size, heads * head_dim, bias=False)
        self.k_proj = Linear(context_dim or config.hidden_size, inner, bias=False)
        self.v_proj = Linear(context_dim or config.hidden_size, inner, bias=False)
        self.out_proj = Linear(heads * head_dim, config.hidden_size, bias=False)
        self.q_norm, self.k_norm = (RMSNorm(head_dim, config.norm_eps) for _ in range(2))

    def queries(self, hidden: torch.Tensor) -> torch.Tensor:
        """[B, Q, heads, head_dim]"""
        return self.q_norm(self.q_proj(hidden).unflatten(-1, (-1, self.head_dim)))

    def keys_and_values(self, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, K, key_value_heads, head_dim] each"""
        key, value = (part(source).unflatten(-1, (-1, self.head_dim)) for part in (self.k_proj, self.v_proj))
        return self.k_norm(key), value

    def gather(self, query, key, value, mask=None, causal=False) -> torch.Tensor:
        """The attention output [B, Q, hidden_size] of queries [B, heads, Q, head_dim]."""
        return self.out_proj(attend(query, key, value, mask, causal=causal).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(config)
        if config.context_dim is not None:
            self.cross_attention_norm = RMSNorm(config.hidden_size, config.norm_eps)
            self.cross_attention = Attention(config, config.context_dim)
        self.feed_forward_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.feed_forward = FeedForward(config.hidden_size, config.intermediate_size)

    def forward(self, hidden, rotary, mask, text=None, cache=None, layer=0):
        normed = self.attention_norm(hidden)
        # In the order of `fuse_projections`.
        query, (key, value) = self.attention.queries(normed), self.attention.keys_and_values(normed)
        query, key = (rotate(states, rotary).transpose(1, 2) for states in (query, key))
        value = value.transpose(1, 2)
        if cache is not None:
            cached = cache.write(layer, key, value)
            # Without a mask, queries see only what this pass feeds.
            key, value = (key, value) if mask is None else cached
        hidden = hidden + self.attention.gather(query, key, value, mask, causal=mask is None)
        if text is not None:
            query = self.cross_attention.queries(self.cross_attention_norm(hidden)).transpose(1, 2)
            hidden = hidden + self.cross_attention.gather(query, *text)
        return hidden + self.feed_forward(self.feed_forward_norm(hidden))

    def step(self, hidden: torch.Tensor, at: StepPlaces, text, keys: torch.Tensor, values: torch.Tensor):
        """`forward` of the rows `hidden` [R, hidden_size] by the kernels of a step, in eight launches with a text,
        else in five. `keys` and `values` are all those that the cache has of the layer."""
        own = self.attention
        layer = layer_of(self, own.q_proj, own.k_proj, own.v_proj, head_norms=(own.q_norm, own.k_norm))
        hidden = attend_layer(hidden, layer, at, keys, values)
        if text is not None:
            # All places of the text are a prompt, after which there is nothing.
            cross, norm, (keys, values, seen) = self.cross_attention, self.cross_attention_norm, text
            project = cross.q_proj.weight, None, at.positions, cross.head_dim, cross.q_proj.scale
            query, length = queries(hidden, norm.weight, norm.eps, *project), keys.shape[2]
            options = {"gain": cross.q_norm.weight, "eps": cross.q_norm.eps}
            attended = attention(query, keys, values, seen, length, length, at.slots, **options)
            hidden = linear(attended, cross.out_proj.weight, residual=hidden, scale=cross.out_proj.scale)
        return feed_layer(hidden, layer)


class CosmosTransformer(TransformerMixin, ModelMixin, ConfigMixin):
    """The next-token transformer of Cosmos-Predict1. The defaults are the published 4B.

    RoPE rotates neighbouring pairs of a head's dimensions, where the original rotates its halves: the converter
    reorders the weights.

    Args:
        shape (`tuple[int, int, int]`): frames, rows and columns of the token maps that the weights were trained on.
        hidden_size, intermediate_size, num_layers, num_attention_heads, num_key_value_heads (`int`): the decoder's
            shape.
        head_dim (`int`): width of a head, even.
        vocab_size (`int`): video tokens.
        context_dim (`int`, *optional*): width of the text embeddings; None for models without text. A model with text
            starts a video with a special token and adds absolute positions before every block.
        embeddings (`int`, *optional*): entries of the embedding table. The first `vocab_size` are video tokens;
            by default as many as needed.
        yarn (`bool`): whether RoPE uses YaRN (https://arxiv.org/abs/2309.00071).
        block_tokens (`int`): how many consecutive tokens, such as those of a row, are predicted together, each by the
            token `block_tokens` before it: Next Block Prediction (https://arxiv.org/abs/2502.07737). A token sees its
            whole block and the blocks before. Given those, the tokens of a block are independent. It must divide the
            tokens of a frame; 1 predicts one token after the other.
    """

    @register_to_config
    @checked
    def __init__(
        self,
        shape: tuple[Side, Side, Side] = (5, 40, 64),
        hidden_size: Width = 4096,
        intermediate_size: Width = 14336,
        num_layers: Layers = 16,
        num_attention_heads: Count = 32,
        num_key_value_heads: Count = 8,
        head_dim: Width = 128,
        vocab_size: Count = 64000,
        context_dim: Width | None = None,
        embeddings: Count | None = None,
        yarn: Flag = False,
        rope_theta: Positive = 500000.0,
        norm_eps: Epsilon = 1e-5,
        block_tokens: Count = 1,
    ):
        super().__init__()
        _check_blocks(block_tokens, shape[1:])
        least = vocab_size + (context_dim is not None)
        if head_dim % 2 or (embeddings or least) < least:
            raise ValueError(
                f"head_dim is {head_dim} and embeddings {embeddings}: give an even head_dim, and at least {least} "
                "embeddings"
            )
        self.token_embedding = nn.Embedding(embeddings or least, hidden_size)
        self.blocks = nn.ModuleList(Block(self.config) for _ in range(num_layers))
        self.norm = RMSNorm(hidden_size, norm_eps)
        self.head = Linear(hidden_size, vocab_size, bias=False)

    def init_weights(self) -> None:
        """Initialise for training: N(0, 0.02), and a head of zeros."""
        init_normal(self)
        nn.init.zeros_(self.head.weight)

    @property
    def head_dim(self) -> int:
        return self.config.head_dim

    @property
    def reads_text(self) -> bool:
        return self.config.context_dim is not None

    def read_text(self, prompt_embeds: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The keys and values [B, key_value_heads, S, head_dim] of every block's cross-attention for texts
        [B, S, context_dim]. As in the original, all S places are attended to, with zeros after the end of a prompt."""
        prompt_embeds = prompt_embeds.to(self.dtype)
        texts = []
        for block in self.blocks:
            key, value = block.cross_attention.keys_and_values(prompt_embeds)
            texts.append((key.transpose(1, 2), value.transpose(1, 2)))
        return texts

    def positions(self, shape: tuple[int, int, int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
        """For a grid of (frames, rows, columns): the `rotary_table`, and the absolute positions [P, hidden_size] of a
        model with text, else None. With text, the first `block_tokens` rows belong to the tokens that start a
        video."""
        config, block = self.config, self.config.block_tokens
        rotary = rotary_table(config.head_dim, shape, config.rope_theta, config.yarn, device)
        if not self.reads_text:
            return rotary, None
        # Under torch.autocast with float16, tensors in bfloat16 cannot be concatenated.
        with torch.autocast(device.type, enabled=False):
            absolute = position_table(config.hidden_size, shape, device)
            if block > 1:
                # The tokens that start a video are equal: their positions say which token each predicts.
                return torch.cat([rotary[:block], rotary]), torch.cat([absolute[:block], absolute])
        begin = torch.zeros_like(rotary[:1])
        begin[..., 0] = 1
        return torch.cat([begin, rotary]), F.pad(absolute, (0, 0, 1, 0))

    def forward(
        self,
        tokens: torch.LongTensor,
        *,
        rotary: torch.Tensor,
        absolute: torch.Tensor | None = None,
        mask: torch.BoolTensor | None = None,
        prompt_embeds: torch.Tensor | None = None,
        cache: SlotCache | None = None,
        first_query: int = 0,
    ) -> torch.Tensor:
        """One forward pass: logits [B, Q - first_query, vocab_size] for the tokens `block_tokens` after the
        fed ones.

        Args:
            tokens: [B, Q]; -1 is a token that is not known yet, `vocab_size` the token that starts a video.
            rotary, absolute: rows of `positions` for the fed tokens, [B or 1, Q, ...].
            mask: bool [B, Q, K], which of the first K keys of `cache` each query sees. Without it a query sees the fed
                tokens up to itself.
            prompt_embeds: text embeddings [B, S, context_dim], if their keys and values are not in `cache` yet.
            cache: the keys and values of the fed tokens are written to it, see `SlotCache.write_next_at`, and those of
                `prompt_embeds`.
            first_query: leave out the logits of the tokens before it.
        """
        texts = () if cache is None else cache.conditions
        if prompt_embeds is not None:
            texts = self.read_text(prompt_embeds)
            if cache is not None:
                cache.conditions = [(key.contiguous(), value.contiguous()) for key, value in texts]
        hidden = embed_known(self.token_embedding, tokens)
        scores = None if mask is None else additive(mask, hidden.dtype, heads_per_key(self.config))
        absolute = None if absolute is None else absolute.to(hidden.dtype)
        for layer, block in enumerate(self.blocks):
            if absolute is not None:
                hidden = hidden + absolute
            hidden = block(hidden, rotary, scores, texts[layer] if texts else None, cache, layer)
        return self.head(self.norm(hidden[:, first_query:]))

    @property
    def step_parts(self) -> list[nn.Module]:
        """See `runs_step`."""
        return [self.token_embedding, *self.blocks, self.norm, self.head]

    def step(
        self,
        tokens: torch.LongTensor,
        positions: torch.LongTensor,
        cache: SlotCache,
        *,
        rotary: torch.FloatTensor,
        absolute: torch.Tensor | None,
        seen: torch.BoolTensor,
        slots: torch.LongTensor | None = None,
        visible: torch.BoolTensor | None = None,
    ) -> torch.Tensor:
        """`forward` over tokens [B, Q] by the kernels of `arimage.kernels.step`, where `runs_step` allows it: the
        logits [rows * Q, vocab_size].

        Args:
            positions, slots, visible: [B, Q, ...], see `TokenModel.forward`. Slots for trees need `visible`.
            cache: has the rows of all branches, and the texts.
            rotary, absolute: those of the tokens to generate, see `positions`.
            seen: bool [rows, P], which tokens of the prompt a row sees.
        """
        hidden, at = embed(self.token_embedding, tokens, positions, cache, rotary, seen, slots, visible)
        block = self.config.block_tokens
        if block > 1:
            # A token sees its whole block.
            at = replace(at, slots=at.slots - at.slots % block + (block - 1))
        if absolute is not None:
            absolute = absolute[positions.flatten()].to(hidden.dtype).repeat(cache.branches, 1)
        texts = cache.conditions
        read = torch.ones_like(texts[0][0][:, 0, :, 0], dtype=torch.bool) if texts else None
        for layer, part in enumerate(self.blocks):
            if absolute is not None:
                hidden = hidden + absolute
            text = (*texts[layer], read) if texts else None
            hidden = part.step(hidden, at, text, *cache.of_layer(layer))
        return product(self.head, hidden, self.norm)

    def predict(self, tokens: torch.LongTensor, prompt_embeds: torch.Tensor | None = None) -> torch.Tensor:
        """Teacher-forced logits [B, N, vocab_size] in float32 of videos [B, t, h, w], each token given all tokens
        before it, or before its block. N counts all tokens with text [B, S, context_dim], and all but the first block
        without. Differentiable, for training."""
        block = self.config.block_tokens
        rotary, absolute = self.positions(tuple(tokens.shape[1:]), tokens.device)
        fed = tokens.flatten(1)
        if self.reads_text:
            fed = F.pad(fed, (block, 0), value=self.config.vocab_size)
        length = fed.shape[1] - block
        return self(
            fed[:, :length],
            rotary=rotary[None, :length],
            absolute=None if absolute is None else absolute[None, :length],
            mask=None if block == 1 else block_mask(length, block, fed.device),
            prompt_embeds=prompt_embeds,
        ).float()


def _check_blocks(block: int, shape: tuple[int, int]) -> None:
    """Refuse blocks that do not divide a frame of (rows, columns) tokens."""
    if math.prod(shape) % block:
        raise ValueError(
            f"block_tokens is {block}: give a number that divides the {math.prod(shape)} tokens of a frame"
        )


class CosmosTokenModel(BoundTokenModel):
    """A `CosmosTransformer` with the conditions of one call, as a `TokenModel` (see
    `arimage.decoding.contract.models`).

    The given token maps are the prefix, so that they cost one prefill and no step.

    Args:
        transformer: the `CosmosTransformer`, or what `torch.compile` made of it. Every forward pass calls it.
        layout: the `Layout` of the tokens to generate, (frames, rows, columns) in raster order.
        given: the tokens of the maps before them, [B, t, rows, columns], one row per video; t may be 0 only with text.
        prompt_embeds: text embeddings [B, S, context_dim], for a model with text.
        guided: also compute the logits without the text, which are those of zero embeddings.
        codebook: the vectors of the tokens in the tokenizer [V, D], for `TokenModel.codebook`.

    Raises:
        ValueError: if there are neither given maps nor a text, or `guided` is asked of a model without text.
    """

    kind: ClassVar[Literal["tokens"]] = "tokens"

    def __init__(
        self,
        transformer: nn.Module,
        layout,
        given: torch.LongTensor,
        prompt_embeds: torch.Tensor | None = None,
        *,
        guided: bool = False,
        codebook: torch.Tensor | None = None,
    ):
        self.block = transformer.config.block_tokens
        _check_blocks(self.block, layout.shape[1:])
        prefix = given.flatten(1)
        if transformer.reads_text:
            prefix = F.pad(prefix, (self.block, 0), value=transformer.config.vocab_size)
        if not prefix.shape[1]:
            raise ValueError("given holds no map, and a model without text cannot predict the first token: give a map")
        if guided:
            if prompt_embeds is None:
                raise ValueError("guided needs a model with text: give guided=False")
            prefix, prompt_embeds = prefix.repeat(2, 1), torch.cat([prompt_embeds, torch.zeros_like(prompt_embeds)])
        condition = {"tokens": prefix} if prompt_embeds is None else {"tokens": prefix, "prompt_embeds": prompt_embeds}
        seen = torch.ones_like(prefix, dtype=torch.bool)
        super().__init__(transformer, Conditions(condition, 1 + guided, seen, alike=True), layout, codebook)
        self.transformer, self.vocab_size = transformer, transformer.config.vocab_size
        shape = (given.shape[1] + layout.shape[0], *layout.shape[1:])
        self._rotary, self._absolute = transformer.positions(shape, self.device)
        self.context = given[:, -1].flatten(1).clone() if given.shape[1] else None

    @property
    def put_key(self) -> Hashable:
        return super().put_key, self.layout.shape, self.context is None

    def take(self, images: torch.LongTensor) -> Self:
        other = super().take(images)
        other.context = None if self.context is None else self.context[images]
        return other

    def put(self, images: torch.LongTensor, other: Self) -> bool:
        if self.context is not None:
            self.context.index_copy_(0, images, other.context)
        return super().put(images, other)

    def prefill(
        self, batch_size: int, scratch: int = 0, *, slots: int | None = None
    ) -> tuple[SlotCache, torch.Tensor]:
        """A cache with the given maps in it, and the logits of the first position or block; see
        `TokenModel.prefill`."""
        block = self.block
        cache, condition, copies = self.open_prefill(SlotCache, batch_size, slots=slots, scratch=scratch)
        prompts, length = condition["tokens"].shape
        cache.write_prompts(prompts, length)
        logits = self.transformer(
            condition["tokens"],
            rotary=self._rotary[None, :length],
            absolute=None if self._absolute is None else self._absolute[None, :length],
            mask=None if block == 1 else F.pad(block_mask(length, block, self.device), (cache.prefix_end - length, 0)),
            prompt_embeds=condition.get("prompt_embeds"),
            cache=cache,
            first_query=length - block,
        )
        (logits,) = spread(cache, copies, logits[:, 0] if block == 1 else logits)
        return cache, logits.unflatten(0, (self.branches, -1))

    def forward(
        self,
        tokens: torch.LongTensor,
        positions: torch.LongTensor,
        cache: SlotCache,
        *,
        visible: torch.BoolTensor | None = None,
        slots: torch.LongTensor | None = None,
    ) -> torch.Tensor:
        """Logits [G, B, Q, V] of the positions `block` after `positions`; see `TokenModel.forward`."""
        length = self.conditions.prefix_length
        if begins_step(cache, self.transformer, slots=slots, visible=visible):
            rotary, absolute = (each if each is None else each[length:] for each in (self._rotary, self._absolute))
            given = {"rotary": rotary, "absolute": absolute, "seen": self.conditions.seen}
            logits = self.transformer.step(tokens, positions, cache, **given, slots=slots, visible=visible)
            return logits.view(self.branches, *tokens.shape, -1)
        at_slots = cache.slots_of(positions, slots)
        cache.write_slots(at_slots)
        # A token sees its whole block.
        last = at_slots if self.block == 1 else at_slots - at_slots % self.block + (self.block - 1)
        positions = positions.repeat(self.branches, 1)
        logits = self.transformer(
            tokens.repeat(self.branches, 1),
            # Padding is rotated as the last position.
            rotary=self._rotary[length:][positions],
            absolute=None if self._absolute is None else self._absolute[length:][positions],
            mask=self.conditions.visible_keys(cache.prefix_end, cache.seen(last, visible)),
            cache=cache,
        )
        return logits.unflatten(0, (self.branches, -1))
