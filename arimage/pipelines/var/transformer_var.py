"""The transformer of VAR (https://arxiv.org/abs/2404.02905): next-scale prediction with adaptive layer norms,
conditioned on a class or, as an extension, on text."""

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from diffusers import ConfigMixin
from diffusers.configuration_utils import register_to_config
from torch import nn

from ...models import modulated_blocks
from ...models.conditions import Conditions, with_unconditional
from ...models.layers import Linear, check_heads
from ...models.mixin import ModelMixin, TransformerMixin
from ...models.modulated_blocks import (
    Attention,
    CastingLinear,
    FeedForward,
    Float32Linear,
    Offset,
    init_modulated,
)
from ...models.scale_model import GrowingScaleModel, ScaleTransformer
from ...settings.schema import Classes, Count, Flag, Layers, Positive, Scales, Share, Whole, Width, checked


class Block(modulated_blocks.Block):
    def __init__(self, config):
        super().__init__()
        size = config.hidden_size
        self.attention = Attention(size, config.num_attention_heads, config.qk_norm, config.dropout)
        self.feed_forward = FeedForward(size, round(size * config.mlp_ratio), config.dropout)
        self.modulation = Offset(6 * size) if config.shared_adaln else Linear(size, 6 * size)


class CaptionProjection(nn.Module):
    """Projects text embeddings [B, P, D] to a prefix [B, P, C], and their mean to a vector [B, C] of the whole text,
    which is replaced by a learned one where there is no text."""

    def __init__(self, caption_dim: int, hidden_size: int):
        super().__init__()
        self.fc1 = nn.Linear(caption_dim, hidden_size)
        self.fc2 = nn.Linear(hidden_size, hidden_size)
        self.pool = nn.Linear(hidden_size, hidden_size)
        self.null_vector = nn.Parameter(torch.zeros(hidden_size))

    def forward(self, prompt_embeds, prompt_attention_mask, unconditional):
        mask = prompt_attention_mask[..., None].to(prompt_embeds.dtype)
        # Padding may hold any values.
        embeds = prompt_embeds.masked_fill(mask == 0, 0)
        prefix = self.fc2(F.gelu(self.fc1(embeds), approximate="tanh"))
        vector = self.pool((prefix * mask).sum(1) / mask.sum(1))
        if unconditional is not None:
            vector = torch.where(unconditional[:, None], self.null_vector, vector)
        return vector, prefix


class VARTransformer(ScaleTransformer, TransformerMixin, ModelMixin, ConfigMixin):
    """The next-scale transformer of VAR. The defaults are the published VAR-d16 of 256 pixels.

    An image is K maps of tokens, from coarse to fine. All tokens of a map are predicted in one forward pass from the
    sum of the maps before it. With `conditioning="text"` the mean of the projected caption takes the place of the
    class, and the caption's tokens are a prefix that every image token sees.

    Args:
        conditioning (`str`): "class" or "text".
        num_classes (`int`): number of classes; one more embedding stands for "no class".
        caption_dim (`int`, *optional*): width of the text embeddings.
        num_condition_tokens (`int`): length of the text embeddings: 0 for classes, 1 for models that read only the
            state of the last text token.
        vocab_size, codebook_dim (`int`): image tokens, and the width of their vectors in the codebook.
        scales (`tuple[int]`): tokens along each side of the K maps.
        hidden_size, num_layers, num_attention_heads (`int`), mlp_ratio (`float`): the transformer's shape.
        shared_adaln (`bool`): one layer computes the modulations of all blocks, as in the published VAR-d36 of 512
            pixels.
        qk_norm (`bool`): normalise queries and keys, with a learned scale per head, as in all published models.
        dropout (`float`): of embeddings and residual branches, in training.
    """

    @register_to_config
    @checked
    def __init__(
        self,
        conditioning: Literal["class", "text"] = "class",
        num_classes: Classes = 1000,
        caption_dim: Width | None = None,
        num_condition_tokens: Whole = 0,
        vocab_size: Count = 4096,
        codebook_dim: Width = 32,
        scales: Scales = (1, 2, 3, 4, 5, 6, 8, 10, 13, 16),
        hidden_size: Width = 1024,
        num_layers: Layers = 16,
        num_attention_heads: Count = 16,
        mlp_ratio: Positive = 4.0,
        shared_adaln: Flag = False,
        qk_norm: Flag = True,
        dropout: Share = 0.0,
    ):
        super().__init__()
        check_heads(hidden_size, num_attention_heads)
        if conditioning == "class":
            self.class_embedding = nn.Embedding(num_classes + 1, hidden_size)
        elif caption_dim is None:
            raise ValueError("caption_dim is missing: give the width of the text embeddings")
        else:
            self.caption_projection = CaptionProjection(caption_dim, hidden_size)
        self.start_position = nn.Parameter(torch.zeros(1, scales[0] ** 2, hidden_size))
        self.input_projection = CastingLinear(codebook_dim, hidden_size)
        self.level_embedding = nn.Embedding(len(scales), hidden_size)
        self.position_embedding = nn.Parameter(torch.zeros(1, sum(side**2 for side in scales), hidden_size))
        self.shared_modulation = Linear(hidden_size, 6 * hidden_size) if shared_adaln else None
        self.blocks = nn.ModuleList(Block(self.config) for _ in range(num_layers))
        self.head_modulation = Linear(hidden_size, 2 * hidden_size)
        self.head = Float32Linear(hidden_size, vocab_size)

    def init_weights(self) -> None:
        """Initialise for training: see `init_modulated`; caption projections keep magnitudes."""
        init_modulated(self, self.start_position, self.position_embedding)
        if self.config.conditioning == "text":
            # Captions differ little at first, and modulations see only their projected mean.
            for linear in (self.caption_projection.fc1, self.caption_projection.fc2, self.caption_projection.pool):
                nn.init.normal_(linear.weight, std=linear.in_features**-0.5)

    def embed_condition(
        self,
        class_labels: torch.LongTensor | None = None,
        prompt_embeds: torch.Tensor | None = None,
        prompt_attention_mask: torch.Tensor | None = None,
        unconditional: torch.BoolTensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The vector of the condition [B, hidden_size], and the prefix [B, P, hidden_size] or None.

        Args:
            class_labels: [B], for "class".
            prompt_embeds: [B, P, caption_dim], right-padded, for "text", with `prompt_attention_mask` [B, P].
            unconditional: bool [B], which images get the learned "no condition" in place of theirs.
        """
        if self.config.conditioning == "class":
            if unconditional is not None:
                class_labels = torch.where(unconditional, self.config.num_classes, class_labels)
            return self.class_embedding(class_labels), None
        assert prompt_embeds is not None
        return self.caption_projection(prompt_embeds.to(self.dtype), prompt_attention_mask, unconditional)

    def prefix_mask(self, prompt_attention_mask=None, unconditional=None, **_) -> torch.BoolTensor | None:
        """Which prefix positions are visible, bool [B, P]: none of rows without text. None for classes, which have no
        prefix."""
        if prompt_attention_mask is None:
            return None
        mask = prompt_attention_mask.bool()
        return mask if unconditional is None else mask & ~unconditional[:, None]

    def read_condition(self, **condition):
        vector, prefix = self.embed_condition(**condition)
        return vector[:, None] + self.start_position, prefix, self.modulations(vector)

    def embed_places(self, levels: torch.LongTensor, first: int) -> torch.Tensor:
        return self.position_embedding[:, first : first + len(levels)] + self.level_embedding(levels)

    def predict(self, inputs: torch.Tensor, **condition) -> torch.FloatTensor:
        """Teacher-forced logits [B, M + n, vocab_size] in float32 of all tokens, coarse to fine, given the condition
        (arguments of `embed_condition`) and the transformer's inputs [B, M, codebook_dim] for the scales after the
        first, which has n tokens. The inputs may end after any scale. Differentiable, for training."""
        return self.predict_maps(inputs, [side**2 for side in self.config.scales], **condition)


class VARScaleModel(GrowingScaleModel):
    """A `VARTransformer` with the conditions of one call, as a `ScaleModel` (see `arimage.decoding.contract.models`).

    Args:
        transformer: the `VARTransformer`, or what `torch.compile` made of it. Every forward pass calls it.
        vq: the `VARVQModel` that adds up the maps.
        condition: arguments of `VARTransformer.embed_condition`, one row per image.
        guided: also compute the logits without the condition.
        refiner: a smaller model with the same conditions, for `ScaleModel.refiner`.
    """

    guidance_schedule: ClassVar[Literal["linear", "constant"]] = "linear"
    companions = ("refiner",)

    def __init__(
        self,
        transformer: nn.Module,
        vq: nn.Module,
        condition: dict[str, torch.Tensor],
        *,
        guided: bool = False,
        refiner: "VARScaleModel | None" = None,
    ):
        condition = with_unconditional(condition) if guided else condition
        conditions = Conditions(condition, 1 + guided, transformer.prefix_mask(**condition), alike=True)
        sides = transformer.config.scales
        super().__init__(
            vq, transformer, conditions, [(side, side) for side in sides], [1] * len(sides), vq.code_vectors().float()
        )
        self.vocab_size, self.refiner = transformer.config.vocab_size, refiner

    def vectors(self, scale: int, tokens: torch.LongTensor) -> torch.Tensor:
        """See `ScaleModel.vectors`."""
        return self.codebook[tokens].transpose(1, 2).unflatten(2, self.scales[scale])

    def accumulate(self, scale: int, latents: torch.Tensor | None, added: torch.Tensor) -> torch.Tensor:
        """See `ScaleModel.accumulate`."""
        if latents is None:
            latents = added.new_zeros(*added.shape[:2], *self.scales[-1])
        return self.vq.accumulate(scale, latents, added)
