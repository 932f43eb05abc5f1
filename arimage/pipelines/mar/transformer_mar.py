"""The transformer of MAR (https://arxiv.org/abs/2406.11838): masked generation of continuous tokens in any order,
conditioned on a class."""

from collections.abc import Hashable
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from diffusers import ConfigMixin
from diffusers.configuration_utils import register_to_config
from torch import nn

from ...models.bound import BoundNetwork
from ...models.conditions import Conditions
from ...models.denoising_head import LazyBlocks, diffusion_tables
from ...models.layer_cache import LayerCache
from ...models.layers import Linear, additive, attend_heads, check_heads
from ...models.mixin import ModelMixin, TransformerMixin
from ...settings.schema import Classes, Count, Layers, Positive, Side, Width, checked
from .context import LazyRows, MARContext
from .partial_passes import evaluate_lazily, evaluate_places


class Block(nn.Module):
    def __init__(self, hidden_size: int, num_heads: int, mlp_ratio: float):
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(hidden_size, eps=1e-6)
        self.qkv_proj = Linear(hidden_size, 3 * hidden_size)
        self.out_proj = Linear(hidden_size, hidden_size)
        self.norm2 = nn.LayerNorm(hidden_size, eps=1e-6)
        self.fc1 = Linear(hidden_size, round(hidden_size * mlp_ratio))
        self.fc2 = Linear(round(hidden_size * mlp_ratio), hidden_size)

    def forward(self, hidden, mask=None, cache=None, layer=0):
        return self.feed_forward(self.attention(hidden, mask, cache, layer))

    def attention(self, hidden, mask, cache, layer):
        query, key, value = self.qkv_proj(self.norm1(hidden)).unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        return hidden + self.out_proj(attend_heads(query, key, value, mask, cache, layer))

    def feed_forward(self, hidden):
        return hidden + self.fc2(F.gelu(self.fc1(self.norm2(hidden))))


class MARTransformer(TransformerMixin, ModelMixin, ConfigMixin):
    """The masked transformer of MAR. The defaults are the published MAR-B of 256 pixels.

    The encoder reads the known tokens, and the decoder outputs a condition per token for the denoising head. Both also
    read `num_buffers` tokens that carry the class.

    Args:
        num_classes (`int`): number of classes; the label `num_classes` stands for "no class".
        token_dim (`int`): D, the width of a token: channels of the image tokenizer times the area of a patch.
        patch_size (`int`): latent pixels of the image tokenizer along each side of a token.
        grid_size (`int`): tokens along each side of an image.
        num_buffers (`int`): tokens that carry the class.
        hidden_size, num_layers, num_attention_heads (`int`): the encoder's shape.
        decoder_hidden_size, num_decoder_layers, num_decoder_attention_heads (`int`): the decoder's shape.
        mlp_ratio (`float`): width of the feed-forward layers of both, as a multiple of their hidden size.

    Raises:
        ValueError: if a width is not a multiple of its heads.
    """

    @register_to_config
    @checked
    def __init__(
        self,
        num_classes: Classes = 1000,
        token_dim: Width = 16,
        patch_size: Side = 1,
        grid_size: Side = 16,
        num_buffers: Count = 64,
        hidden_size: Width = 768,
        num_layers: Layers = 12,
        num_attention_heads: Count = 12,
        decoder_hidden_size: Width = 768,
        num_decoder_layers: Layers = 12,
        num_decoder_attention_heads: Count = 12,
        mlp_ratio: Positive = 4.0,
    ):
        super().__init__()
        shapes = ((hidden_size, num_attention_heads), (decoder_hidden_size, num_decoder_attention_heads))
        for width, heads in shapes:
            check_heads(width, heads)
        length = num_buffers + grid_size**2
        self.class_embedding = nn.Embedding(num_classes, hidden_size)
        self.null_vector = nn.Parameter(torch.zeros(1, hidden_size))
        self.input_projection = Linear(token_dim, hidden_size)
        self.encoder_position = nn.Parameter(torch.zeros(1, length, hidden_size))
        self.input_norm = nn.LayerNorm(hidden_size, eps=1e-6)
        self.encoder_blocks = nn.ModuleList(Block(*shapes[0], mlp_ratio) for _ in range(num_layers))
        self.encoder_norm = nn.LayerNorm(hidden_size, eps=1e-6)
        self.decoder_projection = Linear(hidden_size, decoder_hidden_size)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, decoder_hidden_size))
        self.decoder_position = nn.Parameter(torch.zeros(1, length, decoder_hidden_size))
        self.decoder_blocks = nn.ModuleList(Block(*shapes[1], mlp_ratio) for _ in range(num_decoder_layers))
        self.decoder_norm = nn.LayerNorm(decoder_hidden_size, eps=1e-6)
        self.output_position = nn.Parameter(torch.zeros(1, grid_size**2, decoder_hidden_size))

    def forward(
        self,
        tokens: torch.Tensor,
        visible: torch.BoolTensor,
        count: int,
        class_labels: torch.LongTensor,
        *,
        padded: bool = False,
        context: MARContext | None = None,
        places: torch.LongTensor | None = None,
        known: int = 0,
        keep_buffers: bool = False,
        lazy: LazyRows | None = None,
    ) -> torch.Tensor:
        """One forward pass: conditions of the denoising head [B, N or Q, decoder_hidden_size], one per token.

        Args:
            tokens: [B, N, token_dim]; invisible ones may have any finite values.
            visible: bool [B, N], which tokens are known.
            count: the largest number of visible tokens in an image.
            class_labels: int64 [B].
            padded: whether some images have fewer visible tokens than `count`.
            context: keeps what passes over a part of the places need.
            places: int64 [B, Q], the only places to evaluate, visible ones first, N for padding. For all others, the
                keys and values in `context` stand in. None evaluates all.
            known: the largest number of visible tokens among the `places` of an image.
            keep_buffers: evaluate the `places` without the buffers, of which the context also keeps keys and values.
            lazy: evaluate fewer and fewer rows besides those of `places`, which are not visible. If the context has
                differences between the branches of guidance, the conditions without a class follow the others.
        """
        given = tokens, visible, count, class_labels
        if context is None or places is None:
            return self._forward_all(*given, padded, context)
        if lazy is not None:
            return evaluate_lazily(self, *given, context, places, lazy, padded)
        return evaluate_places(self, *given, context, places, known, keep_buffers, padded)

    def _forward_all(self, tokens, visible, count, class_labels, padded, context):
        """`forward` over all places."""
        config, encoder, decoder = self.config, None, None
        if context is not None:
            encoder, decoder = context.encoder, context.decoder
            encoder.write_all()
            decoder.write_all()
            context.known.copy_(visible[: len(context.known)].sum(1))
        # Visible tokens first, row by row.
        places = torch.argsort((~visible).to(torch.uint8), dim=1, stable=True)[:, :count]
        seen = mask = None
        if padded:
            seen = visible.gather(1, places)
            mask = additive(F.pad(seen, (config.num_buffers, 0), value=True)[:, None], self.dtype)
        hidden = self.encode(tokens, places, mask, class_labels, encoder)
        buffers, hidden = hidden.split([config.num_buffers, count], dim=1)
        every = self.mask_token.expand(*visible.shape, -1).to(hidden.dtype)
        where = places[..., None].expand(-1, -1, hidden.shape[-1])
        if seen is not None:
            hidden = torch.where(seen[..., None], hidden, self.mask_token.to(hidden.dtype))
        hidden = torch.cat([buffers, every.scatter(1, where, hidden)], dim=1) + self.decoder_position
        if context is not None and context.inputs is not None:
            context.inputs[:, : context.size] = hidden[: len(context.inputs)].detach()
        for layer, block in enumerate(self.decoder_blocks):
            hidden = block(hidden, None, decoder, layer)
        if context is not None and context.difference is not None:
            conditional, unconditional = hidden.chunk(2)
            context.difference.copy_((unconditional - conditional).detach())
        return self.decoder_norm(hidden)[:, config.num_buffers :] + self.output_position

    def encode(self, tokens, places, mask, class_labels, cache=None, num_buffers=None):
        """The encoded buffers, all or the first `num_buffers`, and tokens at `places` [B, L]: [B, buffers + L,
        decoder_hidden_size]. `mask` is that of `additive`."""
        config = self.config
        none = (class_labels == config.num_classes)[:, None]
        vector = torch.where(
            none, self.null_vector, self.class_embedding(class_labels.clamp(max=config.num_classes - 1))
        )
        known = tokens.gather(1, places[..., None].expand(-1, -1, config.token_dim))
        positions = self.encoder_position[0, config.num_buffers :]
        buffers = vector[:, None] + self.encoder_position[:, : config.num_buffers]
        rows = self.input_projection(known.to(self.dtype)) + positions[places]
        hidden = self.input_norm(torch.cat([buffers[:, :num_buffers], rows], dim=1))
        for layer, block in enumerate(self.encoder_blocks):
            hidden = block(hidden, mask, cache, layer)
        return self.decoder_projection(self.encoder_norm(hidden))


class MARLatentModel(BoundNetwork):
    """A `MARTransformer` and its head with the classes of one call, as a `MaskedLatentModel` (see
    `arimage.decoding.contract.models`).

    Args:
        transformer: the `MARTransformer`, or what `torch.compile` made of it. Every forward pass calls it.
        head: the `DenoisingHead`, or what `torch.compile` made of it.
        class_labels: int64 [B], one per image.
        layout: the `Layout` of the tokens.
        guided: also compute the conditions without a class.
        drafter: a `MARLatentModel` of a smaller transformer with the same classes.
    """

    kind: ClassVar[Literal["masked_latents"]] = "masked_latents"
    companions, reads_values = ("drafter",), True

    def __init__(
        self,
        transformer: nn.Module,
        head: nn.Module,
        class_labels: torch.LongTensor,
        layout,
        *,
        guided: bool = False,
        drafter: "MARLatentModel | None" = None,
    ):
        config = transformer.config
        if guided:
            class_labels = torch.cat([class_labels, torch.full_like(class_labels, config.num_classes)])
        super().__init__(transformer, Conditions({"class_labels": class_labels}, 1 + guided))
        self.transformer, self.head, self.drafter, self.layout = transformer, head, drafter, layout
        self.num_tokens, self.dim = config.grid_size**2, config.token_dim
        self.num_rows, self.num_layers = config.num_buffers + self.num_tokens, config.num_decoder_layers

    @property
    def put_key(self) -> Hashable:
        return super().put_key, self.head

    def open_context(self, batch_size: int, *, lazy: bool = False) -> MARContext:
        """See `MaskedLatentModel.open_context`."""
        network, config, branches = self.network, self.network.config, 1 if lazy else self.branches
        settings = {"dtype": network.dtype, "device": self.device}
        encoder, decoder = (
            LayerCache(
                layers, batch_size * branches, heads, width // heads, self.num_rows, branches=branches, **settings
            )
            for layers, heads, width in (
                (config.num_layers, config.num_attention_heads, config.hidden_size),
                (config.num_decoder_layers, config.num_decoder_attention_heads, config.decoder_hidden_size),
            )
        )
        context = MARContext(encoder, decoder, torch.zeros(batch_size, dtype=torch.long, device=self.device))
        if lazy:
            shape = batch_size, self.num_rows, config.decoder_hidden_size
            context.inputs = F.pad(torch.zeros(shape, **settings), (0, 0, 0, 1))
            context.difference = torch.zeros(shape, **settings) if self.branches > 1 else None
        return context

    def forward(
        self,
        tokens: torch.FloatTensor,
        visible: torch.BoolTensor,
        count: int,
        *,
        padded: bool = False,
        context: MARContext | None = None,
    ) -> torch.Tensor:
        """Conditions [G, B, N, C]; see `MaskedLatentModel.forward`."""
        return self._run(tokens, visible, count, padded=padded, context=context)

    def forward_places(
        self,
        tokens: torch.FloatTensor,
        visible: torch.BoolTensor,
        count: int,
        places: torch.LongTensor,
        known: int,
        context: MARContext,
        *,
        padded: bool = False,
        keep_buffers: bool = False,
    ) -> torch.Tensor:
        """Conditions [G, B, Q, C]; see `MaskedLatentModel.forward_places`."""
        parts = {"context": context, "known": known, "keep_buffers": keep_buffers}
        return self._run(tokens, visible, count, padded=padded, places=places.repeat(self.branches, 1), **parts)

    def forward_lazily(
        self,
        tokens: torch.FloatTensor,
        visible: torch.BoolTensor,
        count: int,
        new: torch.LongTensor,
        places: torch.LongTensor,
        context: MARContext,
        *,
        layer: int,
        rows: torch.LongTensor,
        most: int,
        padded: bool = False,
    ) -> torch.Tensor:
        """Conditions [G, B, Q, C]; see `MaskedLatentModel.forward_lazily`."""
        labels = self.conditions.values["class_labels"][: len(tokens)]
        options = {"padded": padded, "context": context, "places": places, "lazy": LazyRows(new, layer, rows, most)}
        conditions = self.transformer(tokens, visible, count, labels, **options)
        return conditions.unflatten(0, (self.branches, -1))

    def _run(self, tokens, visible, count, **options):
        """A forward pass of the transformer for all branches."""
        tokens, visible = tokens.repeat(self.branches, 1, 1), visible.repeat(self.branches, 1)
        conditions = self.transformer(tokens, visible, count, **options, **self.conditions.values)
        return conditions.unflatten(0, (self.branches, -1))

    def denoise(
        self,
        step: int,
        tokens: torch.FloatTensor,
        conditions: torch.Tensor,
        guidance: torch.FloatTensor,
        num_diffusion_steps: int | tuple[int, ...],
        kept: dict | None = None,
        **lazy: LazyBlocks,
    ) -> tuple[torch.FloatTensor, torch.FloatTensor]:
        """See `LatentModel.denoise`. Of one branch of two, with the difference between both that is `kept`."""
        tables = diffusion_tables(num_diffusion_steps, self.head.config.num_train_timesteps)
        timesteps = torch.full((1,), tables.timesteps[step], device=tokens.device, dtype=torch.float32)
        predicted = self.head(tokens.expand(len(conditions), -1, -1, -1), timesteps, conditions, **lazy)
        noise, place = predicted.chunk(2, dim=-1)
        guided = noise[0]
        if len(conditions) == 2:
            guided = noise[1] + guidance * (noise[0] - noise[1])
            if kept is not None:
                kept["difference"] = noise[0] - noise[1]
        elif kept and self.branches == 2:
            guided = noise[0] + (guidance - 1) * kept["difference"]
        return tables.transition(step, tokens, guided, place[0])

    def denoise_lazily(
        self,
        step: int,
        tokens: torch.FloatTensor,
        conditions: torch.Tensor,
        guidance: torch.FloatTensor,
        num_diffusion_steps: int | tuple[int, ...],
        kept: dict,
        *,
        whole: bool,
        fresh: bool,
    ) -> tuple[torch.FloatTensor, torch.FloatTensor]:
        """See `MaskedLatentModel.denoise_lazily`."""
        if whole:
            kept["blocks"] = LazyBlocks()
        kept["blocks"].whole, kept["blocks"].fresh = whole, fresh
        given = step, tokens, conditions if whole else conditions[:1], guidance, num_diffusion_steps
        return self.denoise(*given, kept, lazy=kept["blocks"])
