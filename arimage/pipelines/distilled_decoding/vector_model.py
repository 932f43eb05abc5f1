"""What the students of Distilled Decoding (https://arxiv.org/abs/2412.17153) share, for every teacher."""

from collections.abc import Hashable, Sequence
from typing import Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from torch import nn

from ...models.bound import BoundNetwork
from ...models.conditions import Conditions
from ...models.layers import Linear


class VectorHead(nn.Module):
    """Turns hidden states [B, T, C] into vectors [B, T, D]. The class embedding [B, C] scales and shifts the
    normalised states."""

    def __init__(self, hidden_size: int, codebook_dim: int):
        super().__init__()
        self.shift_and_scale = nn.Parameter(torch.randn(2, hidden_size) / hidden_size**0.5)
        self.linear = Linear(hidden_size, codebook_dim)

    def forward(self, hidden, condition):
        shift, scale = (self.shift_and_scale + condition[:, None]).split(1, dim=1)
        return self.linear(torch.addcmul(shift, F.layer_norm(hidden, hidden.shape[-1:], eps=1e-6), scale + 1))


def known_flags(start: int, count: int, device: torch.device, prefix: int = 1) -> torch.LongTensor:
    """Int64 [prefix + count]: 1 for the `prefix` positions of a class or text and the vectors before `start`, 0 for
    the noise."""
    return (torch.arange(prefix + count, device=device) < prefix + start).long()


class DistilledModel(BoundNetwork):
    """A student with the conditions of one call, as a `VectorModel` (see `arimage.decoding.contract.models`).

    Args:
        transformer: a `LlamaGenDDTransformer` or `VARDDTransformer`, or what `torch.compile` made of it. Every forward
            pass calls it.
        condition: arguments of its forward pass, one row per image, such as class_labels [B].
        offsets: how many vectors come before each level, then the number N of all.
        codebook: the vectors of the tokens [V, D].
        layout: the `Layout` of the tokens; None for token maps.
        teacher: the `TokenModel` or `ScaleModel` that the student was distilled from, bound to the same images.
    """

    kind: ClassVar[Literal["vectors"]] = "vectors"
    companions, reads_values = ("teacher",), True

    def __init__(
        self,
        transformer: nn.Module,
        condition: dict[str, torch.Tensor],
        offsets: Sequence[int],
        codebook: torch.Tensor,
        *,
        layout: Any = None,
        teacher: Any = None,
    ):
        super().__init__(transformer, Conditions(condition), codebook.float())
        self.offsets: Sequence[int] = tuple(offsets)
        self.layout, self.teacher = layout, teacher
        self.num_tokens, self.vocab_size = self.offsets[-1], transformer.config.vocab_size
        self.codes_until = transformer.config.codes_until
        self.noise: torch.FloatTensor | None = None

    def predict(self, vectors: torch.FloatTensor, start: int) -> tuple[torch.FloatTensor, torch.FloatTensor]:
        """See `VectorModel.predict`."""
        return self.network(vectors, start=start, **self.conditions.values)

    @property
    def put_key(self) -> Hashable:
        return super().put_key, self.offsets

    def take(self, images: torch.LongTensor) -> Self:
        other = super().take(images)
        other.noise = None if self.noise is None else self.noise[images]
        return other
