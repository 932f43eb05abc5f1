"""The transformer of LlamaGen (https://arxiv.org/abs/2406.06525): a Llama decoder over image tokens in raster order,
after a prefix of one class embedding or of projected text embeddings."""

from typing import Any, ClassVar, Literal

import torch
from diffusers import ConfigMixin
from diffusers.configuration_utils import register_to_config
from torch import nn

from ...kernels.step import has_many_rows
from ...models.bound import PrefixModel
from ...models.cache import SlotCache
from ...models.conditions import check_raster, spread
from ...models.layers import (
    Linear,
    RMSNorm,
    additive,
    check_heads,
    embed_known,
    heads_per_key,
    init_normal,
)
from ...models.llama_blocks import Block, ClassOrTextCondition, rotary_table
from ...models.mixin import ModelMixin, TransformerMixin
from ...models.original_names import LLAMAGEN_NAMES
from ...models.step import begins_step, embed, product
from ...settings.schema import Classes, Count, Epsilon, Layers, Positive, Share, Side, Width, checked


class LlamaGenTransformer(TransformerMixin, ModelMixin, ConfigMixin, ClassOrTextCondition):
    """The next-token transformer of LlamaGen, conditioned on a class or on text. The defaults are the published GPT-B.

    Args:
        conditioning (`str`): "class" or "text".
        grid_size (`int`): tokens along each side of the images that the weights were trained on.
        hidden_size, intermediate_size, num_layers, num_attention_heads (`int`): the Llama decoder's shape. The width
            of a head must be a multiple of 4.
        num_key_value_heads (`int`, *optional*): fewer than `num_attention_heads` for grouped-query attention.
        vocab_size (`int`): image tokens.
        num_classes (`int`): number of classes; one more embedding stands for "no class".
        num_condition_tokens (`int`): length of the prefix: 120 in the published text models, 1 for classes and for
            models that read only the state of the last text token.
        caption_dim (`int`): width of the text embeddings.
        dropout (`float`): of embeddings and residual branches, in training.
    """

    original_names = LLAMAGEN_NAMES

    @register_to_config
    @checked
    def __init__(
        self,
        conditioning: Literal["class", "text"] = "class",
        grid_size: Side = 16,
        hidden_size: Width = 768,
        intermediate_size: Width = 2048,
        num_layers: Layers = 12,
        num_attention_heads: Count = 12,
        num_key_value_heads: Count | None = None,
        vocab_size: Count = 16384,
        num_classes: Classes = 1000,
        num_condition_tokens: Count = 1,
        caption_dim: Width = 2048,
        rope_theta: Positive = 10000.0,
        norm_eps: Epsilon = 1e-5,
        dropout: Share = 0.0,
    ):
        super().__init__()
        check_heads(hidden_size, num_attention_heads, 4)
        self.add_condition()
        self.token_embedding = nn.Embedding(vocab_size, hidden_size)
        self.embedding_dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(self.config) for _ in range(num_layers))
        self.norm = RMSNorm(hidden_size, norm_eps)
        self.head = Linear(hidden_size, vocab_size, bias=False)

    def init_weights(self) -> None:
        """Initialise for training: N(0, 0.02), and a head of zeros."""
        init_normal(self)
        nn.init.zeros_(self.head.weight)

    def forward(
        self,
        tokens: torch.LongTensor | None = None,
        *,
        rotary: torch.Tensor,
        mask: torch.BoolTensor,
        condition: dict[str, torch.Tensor] | None = None,
        cache: SlotCache | None = None,
        first_query: int = 0,
        return_features: bool = False,
        denoiser: nn.Module | None = None,
        vectors: torch.FloatTensor | None = None,
        noise: torch.FloatTensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """One forward pass over a prefix, tokens, or both: logits [B, T - first_query, vocab_size].

        Args:
            tokens: image tokens [B, Q]; -1 is a token that is not known yet.
            rotary: rows of `rotary_table` for the T fed positions, [B or 1, T, head_dim / 2, 2].
            mask: bool [B, T, K], which keys each query sees: those of the T fed positions, or the first K of `cache`.
            condition: arguments of `embed_condition`; the prefix comes before `tokens`.
            cache: the keys and values of the T fed positions are written to it, see `SlotCache.write_next_at`.
            first_query: leave out the logits of the positions before it.
            return_features: also return the head's inputs [B, T - first_query, hidden_size].
            denoiser: a `LlamaGenDenoiser`. Where `noise` [B, Q] is not 0, it embeds `vectors` [B, Q, D] in place of
                `tokens` and adapts the blocks. Not together with a prefix.
        """
        parts = [] if condition is None else [self.embed_condition(**condition)]
        if tokens is not None:
            parts.append(embed_known(self.token_embedding, tokens))
        hidden, noisy = torch.cat(parts, dim=1), None
        if denoiser is not None and noise is not None:
            noisy = (noise > 0)[..., None]
            hidden = torch.where(noisy, denoiser.embed(vectors, noise), hidden)
        hidden = self.embedding_dropout(hidden)
        scores = additive(mask, hidden.dtype, heads_per_key(self.config))
        for layer, block in enumerate(self.blocks):
            before, hidden = hidden, block(hidden, rotary, scores, cache, layer)
            if denoiser is not None:
                hidden = torch.where(noisy, hidden + denoiser.adapters[layer](before), hidden)
        features = self.norm(hidden[:, first_query:])
        logits = self.head(features)
        return (logits, features) if return_features else logits

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
        table: torch.FloatTensor,
        seen: torch.BoolTensor,
        slots: torch.LongTensor | None = None,
        visible: torch.BoolTensor | None = None,
        return_features: bool = False,
        denoiser: nn.Module | None = None,
        vectors: torch.FloatTensor | None = None,
        noise: torch.FloatTensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`forward` over tokens [B, Q] by the kernels of `arimage.kernels.step`, where `runs_step` allows it: the
        logits and, with `return_features`, the features, [rows * Q, ...] each.

        Args:
            positions, slots, visible: [B, Q, ...], see `TokenModel.forward`. Slots for trees need `visible`.
            cache: has the rows of all branches.
            table: the `rotary_table` of the image.
            seen: bool [rows, P], which tokens of the prompt a row sees.
            denoiser, vectors, noise: see `forward`, of all rows.
        """
        hidden, at = embed(self.token_embedding, tokens, positions, cache, table, seen, slots, visible)
        noisy = None
        if denoiser is not None and noise is not None:
            noisy = (noise > 0).flatten()[:, None]
            hidden = torch.where(noisy, denoiser.embed(vectors, noise).flatten(0, 1), hidden)
        for layer, block in enumerate(self.blocks):
            before = hidden.clone() if denoiser is not None and has_many_rows(hidden) else hidden
            hidden = block.step(hidden, at, *cache.of_layer(layer))
            if denoiser is not None:
                hidden = torch.where(noisy, hidden + denoiser.adapters[layer](before), hidden)
        if return_features:
            features = self.norm(hidden)
            return product(self.head, features), features
        return product(self.head, hidden, self.norm), None

    def predict(
        self, tokens: torch.LongTensor, *, return_features: bool = False, cache: Any = None, **condition
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Teacher-forced logits [B, N, vocab_size] in float32 of tokens [B, N] in raster order on the trained grid.
        The logits of position j see the condition (arguments of `embed_condition`) and the tokens before j.
        Differentiable, for training. `return_features` and `cache` are those of `forward`."""
        prefix_mask = self.prefix_mask(**condition)
        table, mask = self.teacher_forcing(prefix_mask, tokens.shape[1] - 1)
        outputs = self(
            tokens[:, :-1],
            rotary=table[None, : mask.shape[1]],
            mask=mask,
            condition=condition,
            cache=cache,
            first_query=prefix_mask.shape[1] - 1,
            return_features=return_features,
        )
        return (outputs[0].float(), outputs[1]) if return_features else outputs.float()


class LlamaGenTokenModel(PrefixModel):
    """A `LlamaGenTransformer` with the conditions of one call, as a `TokenModel` (see
    `arimage.decoding.contract.models`).

    Args:
        transformer, condition, layout, settings: see `PrefixModel`. The layout is (rows, columns) in raster order.
        drafter, denoiser: a `LlamaGenDrafter` and a `LlamaGenDenoiser` of this transformer.
        neighbours: a `NeighbourModel` of its tokens.

    Raises:
        ValueError: if the layout has three dimensions, or an order.
    """

    kind: ClassVar[Literal["tokens"]] = "tokens"

    def __init__(
        self,
        transformer: nn.Module,
        condition: dict[str, torch.Tensor],
        layout,
        *,
        drafter: nn.Module | None = None,
        denoiser: nn.Module | None = None,
        neighbours: Any = None,
        **settings,
    ):
        check_raster(layout, "LlamaGen")
        super().__init__(transformer, condition, layout, **settings)
        self.drafter, self.denoiser, self.neighbours = drafter, denoiser, neighbours
        self.denoises = denoiser is not None and self.codebook is not None
        theta = transformer.config.rope_theta
        self._rotary = rotary_table(
            transformer.head_dim, layout.shape, self.conditions.prefix_length, theta, self.device
        )

    def prefill(
        self, batch_size: int, scratch: int = 0, *, slots: int | None = None, return_features: bool = False
    ) -> tuple:
        """A cache with the condition in it, and the logits [G, B, V] of position 0; see `TokenModel.prefill`."""
        length = self.conditions.prefix_length
        cache, condition, copies = self.open_prefill(SlotCache, batch_size, slots=slots, scratch=scratch)
        outputs = self.transformer(
            rotary=self._rotary[None, :length],
            mask=self.write_prefix(cache, condition),
            condition=condition,
            cache=cache,
            first_query=length - 1,
            return_features=True,
        )
        outputs = spread(cache, copies, *outputs)
        logits, features = (output.squeeze(1).unflatten(0, (self.branches, -1)) for output in outputs)
        return (cache, logits, features) if return_features else (cache, logits)

    def forward(
        self,
        tokens: torch.LongTensor,
        positions: torch.LongTensor,
        cache: SlotCache,
        *,
        visible: torch.BoolTensor | None = None,
        slots: torch.LongTensor | None = None,
        return_features: bool = False,
        vectors: torch.FloatTensor | None = None,
        noise: torch.FloatTensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Logits [G, B, Q, V] of the positions after `positions`; see `TokenModel.forward` and
        `DenoisingModel.forward`."""
        noisy = {}
        if vectors is not None and noise is not None:
            noisy["vectors"], noisy["noise"] = vectors.repeat(self.branches, 1, 1), noise.repeat(self.branches, 1)
            noisy["denoiser"] = self.denoiser
        table, seen = self._rotary[self.conditions.prefix_length :], self.conditions.seen
        if begins_step(cache, self.transformer, slots=slots, visible=visible):
            options = {"slots": slots, "visible": visible, "return_features": return_features}
            outputs = self.transformer.step(tokens, positions, cache, table=table, seen=seen, **options, **noisy)
            shape = self.branches, *tokens.shape, -1
            logits, features = (output if output is None else output.view(shape) for output in outputs)
            return (logits, features) if return_features else logits
        at_slots = cache.slots_of(positions, slots)
        cache.write_slots(at_slots)
        outputs = self.transformer(
            tokens.repeat(self.branches, 1),
            # Padding is rotated as the last position.
            rotary=table[positions].repeat(self.branches, 1, 1, 1),
            mask=self.conditions.visible_keys(cache.prefix_end, cache.seen(at_slots, visible)),
            cache=cache,
            return_features=True,
            **noisy,
        )
        logits = outputs[0].unflatten(0, (self.branches, -1))
        return (logits, outputs[1].unflatten(0, (self.branches, -1))) if return_features else logits
