"""A drafter for LlamaGen like EAGLE (https://arxiv.org/abs/2401.15077): one decoder layer that predicts the
transformer's next features."""

import torch
import torch.nn.functional as F
from diffusers import ConfigMixin
from diffusers.configuration_utils import register_to_config
from torch import nn

from ...models.cache import SlotCache
from ...models.layers import Linear, additive, heads_per_key
from ...models.llama_blocks import Block, rotary_table
from ...models.mixin import ModelMixin
from ...models.step import StepPlaces, begins_step, embed, product
from ...settings.schema import Count, Epsilon, Positive, Share, Width, checked
from .transformer_llamagen import LlamaGenTokenModel, LlamaGenTransformer


class LlamaGenDrafter(ModelMixin, ConfigMixin):
    """Predicts the feature at a token's position from the token and the feature at the position before. The
    transformer's own head then predicts the next token. Embedding, final norm and head belong to the transformer, not
    to this module.

    Args:
        hidden_size, intermediate_size, num_attention_heads (`int`): the layer's shape. `hidden_size` is the
            transformer's.
        num_key_value_heads (`int`, *optional*): fewer than `num_attention_heads` for grouped-query attention.
        dropout (`float`): of residual branches, in training.
    """

    @register_to_config
    @checked
    def __init__(
        self,
        hidden_size: Width = 768,
        intermediate_size: Width = 2048,
        num_attention_heads: Count = 12,
        num_key_value_heads: Count | None = None,
        rope_theta: Positive = 10000.0,
        norm_eps: Epsilon = 1e-5,
        dropout: Share = 0.0,
    ):
        super().__init__()
        self.fc = Linear(2 * hidden_size, hidden_size, bias=False)
        self.block = Block(self.config)

    @classmethod
    def for_transformer(cls, transformer: LlamaGenTransformer) -> "LlamaGenDrafter":
        """A drafter to train. Its layer starts as the transformer's last layer, and its input as the sum of token and
        feature."""
        names = "hidden_size intermediate_size num_attention_heads num_key_value_heads rope_theta norm_eps"
        drafter = cls(**{name: transformer.config[name] for name in names.split()})
        drafter.block.load_state_dict(transformer.blocks[-1].state_dict())
        with torch.no_grad():
            drafter.fc.weight.copy_(torch.eye(drafter.config.hidden_size).repeat(1, 2))
        return drafter

    @property
    def head_dim(self) -> int:
        return self.config.hidden_size // self.config.num_attention_heads

    def forward(
        self,
        embedded: torch.Tensor,
        features: torch.Tensor,
        *,
        rotary: torch.Tensor,
        mask: torch.BoolTensor,
        cache: SlotCache | None = None,
    ) -> torch.Tensor:
        """Hidden states [B, T, hidden_size] before the transformer's final norm.

        Args:
            embedded: embeddings of the tokens [B, T, hidden_size].
            features: the features that these tokens were sampled from [B, T, hidden_size].
            rotary, mask, cache: see `LlamaGenTransformer.forward`.
        """
        hidden = self.fc(torch.cat([embedded, features], dim=-1))
        return self.block(hidden, rotary, additive(mask, hidden.dtype, heads_per_key(self.config)), cache, 0)

    @property
    def step_parts(self) -> list[nn.Module]:
        """See `runs_step`."""
        return [self.fc, self.block]

    def step(self, embedded: torch.Tensor, features: torch.Tensor, cache: SlotCache, at: StepPlaces) -> torch.Tensor:
        """`forward` of rows [R, hidden_size] by the kernels of `arimage.kernels.step`, where `runs_step` allows it."""
        hidden = product(self.fc, torch.cat([embedded, features], dim=-1))
        return self.block.step(hidden, at, *cache.of_layer(0))

    def predict(
        self, transformer: LlamaGenTransformer, tokens: torch.LongTensor, features: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Teacher-forced logits [B, T, V] and features [B, T, hidden_size] of the positions after each of the first T
        tokens [B, T] of an image, from the features that the tokens were sampled from. Differentiable, for
        training."""
        length = tokens.shape[1]
        grid = (transformer.config.grid_size,) * 2
        rotary = rotary_table(self.head_dim, grid, 0, self.config.rope_theta, tokens.device)[None, :length]
        mask = torch.ones(1, length, length, dtype=torch.bool, device=tokens.device).tril()
        hidden = self(transformer.token_embedding(tokens), features, rotary=rotary, mask=mask)
        features = transformer.norm(hidden)
        return transformer.head(features).float(), features

    def bind(self, model: LlamaGenTokenModel) -> "LlamaGenDraftModel":
        """The drafter for the images that `model` is bound to."""
        return LlamaGenDraftModel(self, model)


class LlamaGenDraftModel:
    """A `LlamaGenDrafter` bound to the images of one call, as a `DraftModel` (see
    `arimage.decoding.contract.models`)."""

    def __init__(self, drafter: LlamaGenDrafter, model: LlamaGenTokenModel):
        self.drafter, self.model = drafter, model
        self._rotary = rotary_table(drafter.head_dim, model.layout.shape, 0, drafter.config.rope_theta, model.device)

    def open_cache(self, batch_size: int, scratch: int) -> SlotCache:
        """An empty cache of N + `scratch` slots."""
        config = self.drafter.config
        return SlotCache(
            1,
            batch_size * self.model.branches,
            config.num_key_value_heads or config.num_attention_heads,
            self.drafter.head_dim,
            prefix_length=0,
            slots=self.model.num_tokens,
            scratch=scratch,
            filled=0 if self.model.compact else None,
            branches=self.model.branches,
            dtype=self.drafter.dtype,
            device=self.model.device,
        )

    def forward(
        self,
        tokens: torch.LongTensor,
        features: torch.Tensor,
        positions: torch.LongTensor,
        cache: SlotCache,
        *,
        visible: torch.BoolTensor | None = None,
        slots: torch.LongTensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [G, B, Q, V] and features [G, B, Q, D] of the positions after `positions`; see
        `DraftModel.forward`."""
        branches, transformer = self.model.branches, self.model.transformer
        if begins_step(cache, self.drafter, transformer, slots=slots, visible=visible):
            seen = features.new_empty(len(features) * features.shape[1], 0, dtype=torch.bool)
            layer, table = transformer.token_embedding, self._rotary
            embedded, at = embed(layer, tokens, positions, cache, table, seen, slots, visible)
            hidden = self.drafter.step(embedded, features.flatten(0, 2), cache, at)
            features, shape = transformer.norm(hidden), (branches, *tokens.shape, -1)
            logits = product(transformer.head, features)
            return logits.view(shape), features.view(shape)
        at_slots = cache.slots_of(positions, slots)
        cache.write_slots(at_slots)
        seen = F.pad(cache.seen(at_slots, visible), (cache.prefix_end, 0)).repeat(branches, 1, 1)
        hidden = self.drafter(
            transformer.token_embedding(tokens.clamp(min=0)).repeat(branches, 1, 1),
            features.flatten(0, 1),
            rotary=self._rotary[positions].repeat(branches, 1, 1, 1),
            mask=seen,
            cache=cache,
        )
        features = transformer.norm(hidden)
        logits = transformer.head(features)
        return logits.unflatten(0, (branches, -1)), features.unflatten(0, (branches, -1))
