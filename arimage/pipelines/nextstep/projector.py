"""Between the tokens of NextStep (https://arxiv.org/abs/2508.10711) and its language model."""

import torch
from diffusers import ConfigMixin
from diffusers.configuration_utils import register_to_config

from ...models.layers import Linear
from ...models.mixin import ModelMixin
from ...settings.schema import Width, checked


class NextStepProjector(ModelMixin, ConfigMixin):
    """Projects tokens to inputs of the language model, and its outputs to the conditions of the denoising head.

    Args:
        token_dim (`int`, defaults to 64): D, the width of a token.
        hidden_size (`int`, defaults to 5120): C, the width of the language model.
    """

    @register_to_config
    @checked
    def __init__(self, token_dim: Width = 64, hidden_size: Width = 5120):
        super().__init__()
        self.of_tokens = Linear(token_dim, hidden_size)
        self.of_hidden = Linear(hidden_size, hidden_size)

    def forward(self, states: torch.Tensor, *, hidden: bool = False) -> torch.Tensor:
        """Tokens [..., D], or with `hidden` outputs of the language model [..., C], as [..., C]."""
        return (self.of_hidden if hidden else self.of_tokens)(states.to(self.dtype))
