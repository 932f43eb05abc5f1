"""A Llama decoder over continuous tokens in raster order with a head that denoises the next token, like SphereAR
(https://arxiv.org/abs/2509.24335) and NextStep-1 (https://arxiv.org/abs/2508.10711)."""

import functools
from typing import ClassVar, Literal

import torch
from diffusers import ConfigMixin
from diffusers.configuration_utils import register_to_config
from torch import nn

from ...models.bound import PrefixModel
from ...models.cache import SlotCache
from ...models.conditions import check_raster, spread
from ...models.denoising_head import DenoisingHead, diffusion_tables
from ...models.layers import Linear, additive, check_heads, heads_per_key, init_normal
from ...models.llama_blocks import Block, ClassOrTextCondition, rotary_table
from ...models.mixin import ModelMixin, TransformerMixin
from ...models.step import StepPlaces, begins_step
from ...models.velocity import VelocityModel, VelocitySteps
from ...settings.schema import Classes, Count, Epsilon, Layers, Positive, Share, Side, Width, checked


class LatentLlamaTransformer(TransformerMixin, ModelMixin, ConfigMixin, ClassOrTextCondition):
    """A next-token transformer for continuous tokens with its denoising head, conditioned on a class or on text.

    The head predicts the velocity sqrt(a) noise - sqrt(1 - a) token, where a is the remaining share of the token's
    variance. The standard deviations of the denoising steps are fixed. `from_pretrained` keeps the head in float32.

    Args:
        conditioning (`str`): "class" or "text".
        grid_size (`int`): tokens along each side of the image.
        patch_size (`int`): latent pixels of the image tokenizer along each side of a token.
        token_dim (`int`): D, the width of a token: channels of the image tokenizer times the area of a patch.
        hidden_size, intermediate_size, num_layers, num_attention_heads (`int`): the Llama decoder's shape. The width
            of a head must be a multiple of 4.
        num_key_value_heads (`int`, *optional*): fewer than `num_attention_heads` for grouped-query attention.
        head_hidden_size, num_head_layers (`int`): the denoising head's shape.
        num_train_timesteps (`int`): the diffusion steps of training.
        num_classes (`int`): number of classes; one more embedding stands for "no class".
        num_condition_tokens (`int`): length of the prefix: 1 for classes and for models that read only the state of
            the last text token.
        caption_dim (`int`): width of the text embeddings.
        dropout (`float`): of residual branches, in training.
    """

    _keep_in_fp32_modules = ["denoising_head"]

    @register_to_config
    @checked
    def __init__(
        self,
        conditioning: Literal["class", "text"] = "class",
        grid_size: Side = 16,
        patch_size: Side = 1,
        token_dim: Width = 16,
        hidden_size: Width = 768,
        intermediate_size: Width = 2048,
        num_layers: Layers = 12,
        num_attention_heads: Count = 12,
        num_key_value_heads: Count | None = None,
        head_hidden_size: Width = 1024,
        num_head_layers: Layers = 6,
        num_train_timesteps: Width = 1000,
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
        self.input_projection = Linear(token_dim, hidden_size)
        self.input_norm = nn.RMSNorm(hidden_size, norm_eps)
        self.blocks = nn.ModuleList(Block(self.config) for _ in range(num_layers))
        self.norm = nn.RMSNorm(hidden_size, norm_eps)
        self.denoising_head = DenoisingHead(
            token_dim=token_dim,
            condition_dim=hidden_size,
            hidden_size=head_hidden_size,
            num_layers=num_head_layers,
            num_train_timesteps=num_train_timesteps,
            learned_variance=False,
        )

    def init_weights(self) -> None:
        """Initialise for training: N(0, 0.02), and zeros in the head's modulations and output projection."""
        init_normal(self)
        head = self.denoising_head
        for layer in (*(block.modulation for block in head.blocks), head.output_modulation, head.output_projection):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(
        self,
        tokens: torch.Tensor | None = None,
        *,
        rotary: torch.Tensor,
        mask: torch.BoolTensor,
        condition: dict[str, torch.Tensor] | None = None,
        cache: SlotCache | None = None,
        first_query: int = 0,
    ) -> torch.Tensor:
        """One forward pass over a prefix, tokens, or both: conditions of the denoising head
        [B, T - first_query, hidden_size] for the token after each position.

        Args:
            tokens: [B, Q, token_dim].
            rotary, mask, condition, cache, first_query: see `LlamaGenTransformer.forward`.
        """
        parts = [] if condition is None else [self.embed_condition(**condition)]
        if tokens is not None:
            parts.append(self._embed(tokens))
        hidden = torch.cat(parts, dim=1)
        scores = additive(mask, hidden.dtype, heads_per_key(self.config))
        for layer, block in enumerate(self.blocks):
            hidden = block(hidden, rotary, scores, cache, layer)
        return self.norm(hidden[:, first_query:])

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.input_norm(self.input_projection(tokens.to(self.dtype)))

    @property
    def step_parts(self) -> list[nn.Module]:
        """See `runs_step`."""
        return [*self.blocks, self.norm]

    def step(self, tokens: torch.Tensor, cache: SlotCache, at: StepPlaces) -> torch.Tensor:
        """`forward` over tokens [rows, Q, token_dim] by the kernels of `arimage.kernels.step`, where `runs_step`
        allows it: conditions [rows, Q, hidden_size]."""
        hidden = self._embed(tokens).flatten(0, 1)
        for layer, block in enumerate(self.blocks):
            hidden = block.step(hidden, at, *cache.of_layer(layer))
        return self.norm(hidden).unflatten(0, tokens.shape[:2])

    def predict(self, tokens: torch.Tensor, **condition) -> torch.Tensor:
        """Teacher-forced conditions of the denoising head [B, N, hidden_size] for tokens [B, N, token_dim] in raster
        order. Each sees the condition (arguments of `embed_condition`) and the tokens before it. Differentiable, for
        training."""
        prefix_mask = self.prefix_mask(**condition)
        table, mask = self.teacher_forcing(prefix_mask, tokens.shape[1] - 1)
        rotary, first_query = table[None, : mask.shape[1]], prefix_mask.shape[1] - 1
        return self(tokens[:, :-1], rotary=rotary, mask=mask, condition=condition, first_query=first_query)


def velocity(tokens: torch.Tensor, noise: torch.Tensor, kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy tokens that keep the share `kept` of the variance of `tokens`, and the velocity that the head should
    predict."""
    return kept.sqrt() * tokens + (1 - kept).sqrt() * noise, kept.sqrt() * noise - (1 - kept).sqrt() * tokens


class LatentLlamaModel(VelocityModel, PrefixModel):
    """A `LatentLlamaTransformer` with the conditions of one call, as a `CausalLatentModel` (see
    `arimage.decoding.contract.models`).

    Args:
        transformer, condition, layout, settings: see `PrefixModel`. The layout is (rows, columns) in raster order.
        drafter: a `LatentLlamaModel` of a smaller transformer with the same conditions.

    Raises:
        ValueError: if the layout has three dimensions, or an order.
    """

    kind: ClassVar[Literal["causal_latents"]] = "causal_latents"
    companions = ("drafter",)
    noisy = True

    def __init__(
        self,
        transformer: nn.Module,
        condition: dict[str, torch.Tensor],
        layout,
        *,
        drafter: "LatentLlamaModel | None" = None,
        **settings,
    ):
        check_raster(layout, "this model")
        super().__init__(transformer, condition, layout, **settings)
        self.drafter, self.dim = drafter, transformer.config.token_dim
        theta = transformer.config.rope_theta
        self._rotary = rotary_table(
            transformer.head_dim, layout.shape, self.conditions.prefix_length, theta, self.device
        )

    def prefill(self, batch_size: int, scratch: int = 0) -> tuple[SlotCache, torch.Tensor]:
        """A cache with the condition in it, and the conditions [G, B, C] of position 0; see
        `CausalLatentModel.prefill`."""
        length = self.conditions.prefix_length
        cache, condition, copies = self.open_prefill(SlotCache, batch_size, scratch=scratch)
        conditions = self.transformer(
            rotary=self._rotary[None, :length],
            mask=self.write_prefix(cache, condition),
            condition=condition,
            cache=cache,
            first_query=length - 1,
        )
        (conditions,) = spread(cache, copies, conditions)
        return cache, conditions.squeeze(1).unflatten(0, (self.branches, -1))

    def forward(self, tokens: torch.FloatTensor, positions: torch.LongTensor, cache: SlotCache) -> torch.Tensor:
        """Conditions [G, B, Q, C] of the positions after `positions`; see `CausalLatentModel.forward`."""
        table = self._rotary[self.conditions.prefix_length :]
        if begins_step(cache, self.transformer):
            at = StepPlaces.of(cache, table, self.conditions.seen, positions, positions)
            conditions = self.transformer.step(tokens.repeat(self.branches, 1, 1), cache, at)
            return conditions.unflatten(0, (self.branches, -1))
        slots = cache.slots_of(positions, None)
        cache.write_slots(slots)
        conditions = self.transformer(
            tokens.repeat(self.branches, 1, 1),
            # Padding is rotated as the last position.
            rotary=table[positions].repeat(self.branches, 1, 1, 1),
            mask=self.conditions.visible_keys(cache.prefix_end, cache.seen(slots, None)),
            cache=cache,
        )
        return conditions.unflatten(0, (self.branches, -1))

    @property
    def denoising_head(self) -> nn.Module:
        """See `VelocityModel`."""
        return self.transformer.denoising_head

    def velocity_steps(self, num_diffusion_steps: int | tuple[int, ...]) -> VelocitySteps:
        return _velocity_steps(num_diffusion_steps, self.transformer.config.num_train_timesteps)


@functools.lru_cache(maxsize=256)
def _velocity_steps(num_diffusion_steps: int | tuple[int, ...], num_train_timesteps: int) -> VelocitySteps:
    tables = diffusion_tables(num_diffusion_steps, num_train_timesteps)
    steps = []
    for step, time in enumerate(tables.timesteps):
        kept, clean = tables.alphas_cumprod[step], tables.mean_of_clean[step]
        of_token = clean * kept**0.5 + tables.mean_of_noisy[step]
        steps.append((time, of_token, -clean * (1 - kept) ** 0.5, tables.middle_std(step)))
    return VelocitySteps(*zip(*steps, strict=True))
