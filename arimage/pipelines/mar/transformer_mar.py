"""The transformer of MAR (https://arxiv.org/abs/2406.11838): masked generation of continuous tokens in any order,
conditioned on a class."""

from collections.abc import Hashable
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from diffusers import ConfigMixin
from diffusers.configuration_utils import register_to_config
from diffusers.loaders.peft import PeftAdapterMixin
from torch import nn

from ...models.bound import BoundNetwork
from ...models.conditions import Conditions
from ...models.denoising_head import diffusion_tables
from ...models.layers import Linear, additive, attend_heads, check_heads
from ...models.mixin import ModelMixin
from ...schema import Classes, Count, Layers, Positive, Side, Width, checked


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

    def forward(self, hidden, mask=None):
        query, key, value = self.qkv_proj(self.norm1(hidden)).unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        hidden = hidden + self.out_proj(attend_heads(query, key, value, mask))
        return hidden + self.fc2(F.gelu(self.fc1(self.norm2(hidden))))


class MARTransformer(ModelMixin, ConfigMixin, PeftAdapterMixin):
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

    _no_split_modules = ["Block"]
    _repeated_blocks = ["Block"]

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
    ) -> torch.Tensor:
        """One forward pass: conditions of the denoising head [B, N, decoder_hidden_size], one per token.

        Args:
            tokens: [B, N, token_dim]; invisible ones may have any finite values.
            visible: bool [B, N], which tokens are known.
            count: the largest number of visible tokens in an image.
            class_labels: int64 [B].
            padded: whether some images have fewer visible tokens than `count`.
        """
        # Visible tokens first, row by row.
        places = torch.argsort((~visible).to(torch.uint8), dim=1, stable=True)[:, :count]
        hidden = self._encode(tokens, places, visible.gather(1, places) if padded else None, class_labels)
        buffers, hidden = hidden.split([self.config.num_buffers, count], dim=1)
        every = self.mask_token.expand(*visible.shape, -1).to(hidden.dtype)
        where = places[..., None].expand(-1, -1, hidden.shape[-1])
        if padded:
            seen = visible.gather(1, places)[..., None]
            hidden = torch.where(seen, hidden, self.mask_token)
        hidden = torch.cat([buffers, every.scatter(1, where, hidden)], dim=1) + self.decoder_position
        for block in self.decoder_blocks:
            hidden = block(hidden)
        return self.decoder_norm(hidden)[:, self.config.num_buffers :] + self.output_position

    def _encode(self, tokens, places, seen, class_labels):
        """The encoded buffers and tokens at `places` [B, L]: [B, buffers + L, decoder_hidden_size]. `seen` [B, L] is
        False for padding."""
        config = self.config
        none = (class_labels == config.num_classes)[:, None]
        vector = torch.where(
            none, self.null_vector, self.class_embedding(class_labels.clamp(max=config.num_classes - 1))
        )
        known = tokens.gather(1, places[..., None].expand(-1, -1, config.token_dim))
        positions = self.encoder_position[0, config.num_buffers :][places]
        buffers = vector[:, None] + self.encoder_position[:, : config.num_buffers]
        hidden = torch.cat([buffers, self.input_projection(known.to(self.dtype)) + positions], dim=1)
        hidden, mask = self.input_norm(hidden), None
        if seen is not None:
            mask = additive(F.pad(seen, (config.num_buffers, 0), value=True)[:, None], hidden.dtype)
        for block in self.encoder_blocks:
            hidden = block(hidden, mask)
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

    @property
    def put_key(self) -> Hashable:
        """See `LatentModel.put`."""
        return super().put_key, self.head

    def forward(
        self, tokens: torch.FloatTensor, visible: torch.BoolTensor, count: int, *, padded: bool = False
    ) -> torch.Tensor:
        """Conditions [G, B, N, C]; see `MaskedLatentModel.forward`."""
        tokens, visible = tokens.repeat(self.branches, 1, 1), visible.repeat(self.branches, 1)
        conditions = self.transformer(tokens, visible, count, padded=padded, **self.conditions.values)
        return conditions.unflatten(0, (self.branches, -1))

    def denoise(
        self,
        step: int,
        tokens: torch.FloatTensor,
        conditions: torch.Tensor,
        guidance: torch.FloatTensor,
        num_diffusion_steps: int | tuple[int, ...],
    ) -> tuple[torch.FloatTensor, torch.FloatTensor]:
        """See `LatentModel.denoise`."""
        tables = diffusion_tables(num_diffusion_steps, self.head.config.num_train_timesteps)
        timesteps = torch.full((1,), tables.timesteps[step], device=tokens.device, dtype=torch.float32)
        predicted = self.head(tokens.expand(self.branches, -1, -1, -1), timesteps, conditions)
        noise, place = predicted.chunk(2, dim=-1)
        guided = noise[0] if self.branches == 1 else noise[1] + guidance * (noise[0] - noise[1])
        return tables.transition(step, tokens, guided, place[0])
