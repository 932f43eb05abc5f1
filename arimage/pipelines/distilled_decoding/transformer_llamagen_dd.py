"""The student of LlamaGen in Distilled Decoding (https://arxiv.org/abs/2412.17153): all tokens from noise in one
forward pass."""

from typing import Literal

import torch
from diffusers import ConfigMixin
from diffusers.configuration_utils import register_to_config
from torch import nn

from ...models.layers import Linear, additive, check_heads, heads_per_key
from ...models.llama_blocks import Block, ClassOrTextCondition
from ...models.mixin import ModelMixin, TransformerMixin
from ...settings.schema import Classes, Count, Epsilon, Flag, Layers, Positive, Share, Side, Whole, Width, checked
from ..llamagen.transformer_llamagen import LlamaGenTransformer
from .vector_model import VectorHead, known_flags


class LlamaGenDDTransformer(TransformerMixin, ModelMixin, ConfigMixin, ClassOrTextCondition):
    """The decoder of LlamaGen, fed with vectors instead of tokens: the vectors of known tokens, then noise. One causal
    forward pass turns the noise at each position into the vector of its token. The defaults are the published
    LlamaGen-DD-B.

    Args:
        grid_size (`int`): tokens along each side of the image.
        hidden_size, intermediate_size, num_layers, num_attention_heads (`int`): the Llama decoder's shape. The width
            of a head must be a multiple of 4.
        num_key_value_heads (`int`, *optional*): fewer than `num_attention_heads` for grouped-query attention.
        vocab_size, codebook_dim (`int`): image tokens, and the width of their vectors in the codebook.
        conditioning (`str`): "class" or "text", as in the teacher.
        num_classes (`int`): number of classes.
        num_condition_tokens, caption_dim (`int`): length of the prefix and width of the text embeddings, for "text".
        codes_until (`int`, *optional*): how many of the first tokens the checkpoint takes from its code head; the rest
            are vectors. For `FewStepDecoding`.
        dropout (`float`): of embeddings and residual branches, in training.
        place_embeddings (`bool`): whether each position begins with embeddings of its place and of the condition.
            Without them, as published, it learns of both by attention to the prefix alone.
    """

    @register_to_config
    @checked
    def __init__(
        self,
        grid_size: Side = 16,
        hidden_size: Width = 768,
        intermediate_size: Width = 2048,
        num_layers: Layers = 12,
        num_attention_heads: Count = 12,
        num_key_value_heads: Count | None = None,
        vocab_size: Count = 16384,
        codebook_dim: Width = 8,
        num_classes: Classes = 1000,
        codes_until: Whole | None = 80,
        rope_theta: Positive = 10000.0,
        norm_eps: Epsilon = 1e-5,
        dropout: Share = 0.0,
        conditioning: Literal["class", "text"] = "class",
        num_condition_tokens: Count = 1,
        caption_dim: Width = 2048,
        place_embeddings: Flag = False,
    ):
        super().__init__()
        check_heads(hidden_size, num_attention_heads, 4)
        self.add_condition()
        self.input_projection = Linear(codebook_dim, hidden_size)
        self.known_embedding = nn.Embedding(2, hidden_size)
        self.place_embedding = nn.Embedding(grid_size**2, hidden_size) if place_embeddings else None
        self.condition_projection = Linear(hidden_size, hidden_size) if place_embeddings else None
        self.embedding_dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(self.config) for _ in range(num_layers))
        self.norm = nn.RMSNorm(hidden_size, norm_eps)
        self.head = Linear(hidden_size, vocab_size, bias=False)
        self.vector_head = VectorHead(hidden_size, codebook_dim)

    @classmethod
    def for_teacher(
        cls, teacher: LlamaGenTransformer, codebook: torch.Tensor, place_embeddings: bool = False
    ) -> "LlamaGenDDTransformer":
        """A student to train, in float32, with the weights of its teacher. Its input projection is fitted so that the
        vectors of the `codebook` [V, codebook_dim] give about the embeddings that their tokens have in the teacher."""
        shape = {name: value for name, value in teacher.config.items() if not name.startswith("_")}
        count, width = codebook.shape
        codes_until = teacher.config.grid_size**2
        student = cls(**shape, codebook_dim=width, codes_until=codes_until, place_embeddings=place_embeddings)
        own = student.state_dict()
        shared = {name: value.float() for name, value in teacher.state_dict().items() if name in own}
        student.load_state_dict({**own, **shared})
        vectors = torch.cat([codebook.float(), codebook.new_ones(count, 1).float()], dim=1)
        fitted = torch.linalg.lstsq(vectors.cpu(), teacher.token_embedding.weight.detach().float().cpu()).solution
        with torch.no_grad():
            student.input_projection.weight.copy_(fitted[:width].T)
            student.input_projection.bias.copy_(fitted[width])
        for new in (student.known_embedding, student.place_embedding, student.condition_projection):
            for weight in [] if new is None else new.parameters():
                nn.init.zeros_(weight)
        return student

    def forward(
        self, vectors: torch.Tensor, *, start: int, **condition: torch.Tensor
    ) -> tuple[torch.FloatTensor, torch.FloatTensor]:
        """One forward pass: the vectors [B, N, codebook_dim] of all tokens and the logits [B, N, vocab_size] of their
        codes, in float32.

        Args:
            vectors: [B, N, codebook_dim] in raster order: known tokens before `start`, noise from there on.
            start: how many tokens are known.
            condition: arguments of `embed_condition`.
        """
        prefix, visible = self.embed_condition(**condition), self.prefix_mask(**condition)
        count, width = visible.shape[1], vectors.shape[1]
        mean = ((prefix * visible[..., None]).sum(1) / visible.sum(1, keepdim=True)).to(prefix.dtype)
        inputs = self.input_projection(vectors.to(self.dtype))
        if self.place_embedding is not None and self.condition_projection is not None:
            # A look-up, not the weight itself: adapters and offloading act on the forward pass of a module alone.
            places = self.place_embedding(torch.arange(width, device=inputs.device))
            inputs = inputs + places + self.condition_projection(mean)[:, None]
        hidden = torch.cat([prefix, inputs], dim=1)
        hidden = hidden + self.known_embedding(known_flags(start, width, vectors.device, count))
        hidden = self.embedding_dropout(hidden)
        table, mask = self.teacher_forcing(visible, width)
        scores = additive(mask, hidden.dtype, heads_per_key(self.config))
        for block in self.blocks:
            hidden = block(hidden, table[None], scores)
        hidden = hidden[:, count:]
        return self.vector_head(hidden, mean).float(), self.head(self.norm(hidden)).float()
