"""The student of VAR in Distilled Decoding (https://arxiv.org/abs/2412.17153): all token maps from noise in one
forward pass."""

import torch
import torch.nn.functional as F
from diffusers import ConfigMixin
from diffusers.configuration_utils import register_to_config
from torch import nn

from ...models import modulated_blocks
from ...models.layers import Linear, additive, check_heads
from ...models.mixin import ModelMixin, TransformerMixin
from ...models.modulated_blocks import Attention, FeedForward, Float32Linear, layer_norm, levels_of
from ...settings.schema import Classes, Count, Flag, Layers, Positive, Scales, Share, Whole, Width, checked
from ..var.transformer_var import VARTransformer
from .vector_model import VectorHead, known_flags


class Block(modulated_blocks.Block):
    """A block of VAR that adds an embedding which says whether a vector is given."""

    def __init__(self, config):
        super().__init__()
        size = config.hidden_size
        self.attention = Attention(size, config.num_attention_heads, config.qk_norm, config.dropout)
        self.feed_forward = FeedForward(size, round(size * config.mlp_ratio), config.dropout)
        self.modulation = Linear(size, 6 * size)
        self.known_projection = Linear(size, size)

    def between(self, hidden, known):
        return hidden + self.known_projection(known)

    def forward(self, hidden, condition, known, mask):
        gate1, gate2, scale1, scale2, *shifts = self.modulation(condition)[:, None].chunk(6, dim=-1)
        return super().forward(hidden, (gate1, gate2, scale1 + 1, scale2 + 1, *shifts, known), mask)


# What a student has of its teacher's shape.
SHARED = (
    "num_classes", "vocab_size", "codebook_dim", "scales", "hidden_size", "num_layers", "num_attention_heads",
    "mlp_ratio", "qk_norm", "dropout",
)  # fmt: skip


class VARDDTransformer(TransformerMixin, ModelMixin, ConfigMixin):
    """The transformer of VAR, fed with vectors instead of sums of maps: the vectors of known maps, then noise. One
    forward pass turns the noise at each position into the vector of its token. A vector sees the class, the coarser
    maps and itself, but not the rest of its own map. The defaults are the published VAR-DD-d16.

    Args:
        num_classes (`int`): number of classes.
        vocab_size, codebook_dim (`int`): image tokens, and the width of their vectors in the codebook.
        scales (`tuple[int]`): tokens along each side of the maps.
        hidden_size, num_layers, num_attention_heads (`int`), mlp_ratio (`float`): the transformer's shape.
        qk_norm (`bool`): normalise queries and keys, with a learned scale per head, as in all published models.
        codes_until (`int`, *optional*): how many of the first maps the checkpoint takes from its code head; the rest
            are vectors. For `FewStepDecoding`.
        dropout (`float`): of embeddings and residual branches, in training.
    """

    @register_to_config
    @checked
    def __init__(
        self,
        num_classes: Classes = 1000,
        vocab_size: Count = 4096,
        codebook_dim: Width = 32,
        scales: Scales = (1, 2, 3, 4, 5, 6, 8, 10, 13, 16),
        hidden_size: Width = 1024,
        num_layers: Layers = 16,
        num_attention_heads: Count = 16,
        mlp_ratio: Positive = 4.0,
        qk_norm: Flag = True,
        codes_until: Whole | None = 5,
        dropout: Share = 0.0,
    ):
        super().__init__()
        check_heads(hidden_size, num_attention_heads)
        # One more than there are classes, as in the teacher.
        self.class_embedding = nn.Embedding(num_classes + 1, hidden_size)
        self.start_position = nn.Parameter(torch.zeros(1, 1, hidden_size))
        self.input_projection = Linear(codebook_dim, hidden_size)
        # The class is a level of its own.
        self.level_embedding = nn.Embedding(1 + len(scales), hidden_size)
        self.position_embedding = nn.Parameter(torch.zeros(1, 1 + sum(side**2 for side in scales), hidden_size))
        self.known_embedding = nn.Embedding(2, hidden_size)
        self.embedding_dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(self.config) for _ in range(num_layers))
        self.known_projection = Linear(hidden_size, hidden_size)
        self.head_modulation = Linear(hidden_size, 2 * hidden_size)
        self.head = Float32Linear(hidden_size, vocab_size)
        self.vector_head = VectorHead(hidden_size, codebook_dim)

    @classmethod
    def for_teacher(cls, teacher: VARTransformer) -> "VARDDTransformer":
        """A student to train, in float32, with the weights of its teacher, which is one of classes. What it says of
        known vectors is 0 at first, and its class has the level and the place of the coarsest map."""
        config = teacher.config
        student = cls(**{name: config[name] for name in SHARED}, codes_until=len(config.scales))
        theirs = {name: value.float() for name, value in teacher.state_dict().items()}
        theirs["start_position"] = theirs["start_position"][:, :1]
        theirs["level_embedding.weight"] = F.pad(theirs["level_embedding.weight"][None], (0, 0, 1, 0), "replicate")[0]
        theirs["position_embedding"] = F.pad(theirs["position_embedding"], (0, 0, 1, 0), "replicate")
        for layer in range(config.num_layers if config.shared_adaln else 0):
            modulation = f"blocks.{layer}.modulation."
            theirs[modulation + "weight"] = theirs["shared_modulation.weight"]
            theirs[modulation + "bias"] = theirs[modulation + "bias"] + theirs["shared_modulation.bias"]
        own = student.state_dict()
        student.load_state_dict({**own, **{name: value for name, value in theirs.items() if name in own}})
        for part in (student.known_embedding, student.known_projection, *student.blocks):
            known = part.known_projection if isinstance(part, Block) else part
            for weight in known.parameters():
                nn.init.zeros_(weight)
        return student

    def forward(
        self, vectors: torch.Tensor, *, class_labels: torch.LongTensor, start: int
    ) -> tuple[torch.FloatTensor, torch.FloatTensor]:
        """One forward pass: the vectors [B, N, codebook_dim] of all tokens and the logits [B, N, vocab_size] of their
        codes, in float32.

        Args:
            vectors: [B, N, codebook_dim] of all maps from coarse to fine: known tokens before `start`, noise from
                there on.
            class_labels: ids of classes [B].
            start: how many tokens are known.
        """
        condition = self.class_embedding(class_labels)
        # The class is level 0.
        levels = levels_of([1, *(side**2 for side in self.config.scales)], vectors.device)
        projected = self.input_projection(vectors.to(self.dtype))
        hidden = torch.cat([condition[:, None] + self.start_position, projected], dim=1)
        known = self.known_embedding(known_flags(start, vectors.shape[1], vectors.device))
        hidden = self.embedding_dropout(hidden + self.position_embedding + self.level_embedding(levels) + known)
        visible = (levels[:, None] > levels) | torch.eye(len(levels), dtype=torch.bool, device=vectors.device)
        mask, activated = additive(visible[None], hidden.dtype), F.silu(condition)
        for block in self.blocks:
            hidden = block(hidden, activated, known, mask)
        hidden = (hidden + self.known_projection(known))[:, 1:]
        scale, shift = self.head_modulation(activated)[:, None].chunk(2, dim=-1)
        logits = self.head(layer_norm(hidden, scale + 1, shift))
        return self.vector_head(hidden, condition).float(), logits
