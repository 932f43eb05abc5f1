"""The student of LlamaGen in Distilled Decoding (https://arxiv.org/abs/2412.17153): from noise to all tokens in one forward pass."""

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import nn

from .distilled import VectorHead, known_flags
from .layers import Linear, additive
from .transformer_llamagen import Block, RMSNorm, rotary_table


class LlamaGenDDTransformer(ModelMixin, ConfigMixin):
    """The decoder of LlamaGen, fed with vectors instead of tokens: those of known tokens, then noise. It returns the vectors of all
    tokens in one causal forward pass, each at the position of its noise. The defaults are the published LlamaGen-DD-B.

    Args:
        grid_size (`int`): tokens along each side of the image.
        hidden_size, intermediate_size, num_layers, num_attention_heads (`int`): the Llama decoder's shape; the width of a
            head must be a multiple of 4.
        num_key_value_heads (`int`, *optional*): fewer than `num_attention_heads` for grouped-query attention.
        vocab_size, codebook_dim (`int`): image tokens, and the width of their vectors in the codebook.
        num_classes (`int`): classes.
        codes_until (`int`, *optional*): how many tokens, from the first, the checkpoint takes from its code head; the rest are
            vectors. For `FewStepDecoding`.
        dropout (`float`): of embeddings and residual branches, in training.
    """

    _no_split_modules = ["Block"]
    _repeated_blocks = ["Block"]

    @register_to_config
    def __init__(
        self,
        grid_size: int = 16,
        hidden_size: int = 768,
        intermediate_size: int = 2048,
        num_layers: int = 12,
        num_attention_heads: int = 12,
        num_key_value_heads: int | None = None,
        vocab_size: int = 16384,
        codebook_dim: int = 8,
        num_classes: int = 1000,
        codes_until: int | None = 80,
        rope_theta: float = 10000.0,
        norm_eps: float = 1e-5,
        dropout: float = 0.0,
    ):
        super().__init__()
        if hidden_size % num_attention_heads or (hidden_size // num_attention_heads) % 4:
            raise ValueError(
                f"hidden_size {hidden_size} over {num_attention_heads} heads: the width of a head must be a multiple of 4"
            )
        # One more than there are classes, as in the teacher.
        self.class_embedding = nn.Embedding(num_classes + 1, hidden_size)
        self.input_projection = Linear(codebook_dim, hidden_size)
        self.known_embedding = nn.Embedding(2, hidden_size)
        self.embedding_dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(self.config) for _ in range(num_layers))
        self.norm = RMSNorm(hidden_size, norm_eps)
        self.head = Linear(hidden_size, vocab_size, bias=False)
        self.vector_head = VectorHead(hidden_size, codebook_dim)

    def forward(
        self, vectors: torch.Tensor, *, class_labels: torch.LongTensor, start: int
    ) -> tuple[torch.FloatTensor, torch.FloatTensor]:
        """One forward pass: the vectors [B, N, codebook_dim] of all tokens and the logits [B, N, vocab_size] of their codes, in
        float32.

        Args:
            vectors: [B, N, codebook_dim] in raster order, those of known tokens before `start` and noise from it on.
            class_labels: ids of classes [B].
            start: how many tokens are known.
        """
        config, condition = self.config, self.class_embedding(class_labels)
        hidden = torch.cat([condition[:, None], self.input_projection(vectors.to(self.dtype))], dim=1)
        hidden = hidden + self.known_embedding(known_flags(start, vectors.shape[1], vectors.device))
        hidden, length = self.embedding_dropout(hidden), hidden.shape[1]
        head_dim = config.hidden_size // config.num_attention_heads
        rotary = rotary_table(head_dim, (config.grid_size,) * 2, 1, config.rope_theta, vectors.device)[None]
        causal = torch.ones(1, length, length, dtype=torch.bool, device=vectors.device).tril()
        scores = additive(causal, hidden.dtype)
        for block in self.blocks:
            hidden = block(hidden, rotary, scores)
        hidden = hidden[:, 1:]
        return self.vector_head(hidden, condition).float(), self.head(self.norm(hidden)).float()
