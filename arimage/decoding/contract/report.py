"""What a batch of images says about itself, to callbacks, previews and statistics."""

from collections.abc import Sequence
from typing import Any

import torch

from .data import StateData


class Report(StateData):
    """What a `DecodingState` reports about its images.

    Attributes:
        head_calls: sequential calls of denoising heads so far; 0 for models without one.
        student_passes: forward passes of a student that drafted these images at the start.
    """

    # Set by decodings of models with a denoising head.
    head_calls = 0
    student_passes = 0

    @property
    def decided(self) -> torch.BoolTensor:
        """Bool [B, N], which tokens are final: by default the first ones, as many as the steps decided."""
        ranks = torch.arange(self.model.num_tokens, device=self.seeds.device)
        return ranks < self.accepted.sum(0)[:, None]

    @property
    def work(self) -> torch.FloatTensor:
        """Float32 [B], the share of its work that each image has done."""
        return self.decided.float().mean(1)

    @property
    def newest(self) -> torch.BoolTensor:
        """Bool [B, N], which tokens the last step of each image decided."""
        ranks = torch.arange(self.model.num_tokens, device=self.seeds.device)
        end = self.accepted.sum(0)[:, None]
        return (ranks < end) & (ranks >= end - self.accepted.gather(0, self.steps[None] - 1).T)

    @property
    def replaceable(self) -> bool:
        """Whether the `newest` tokens may be replaced, since nothing has been computed from them yet."""
        return False

    def replace(self, tokens: torch.LongTensor) -> None:
        """Set the tokens to `tokens` [B, N], which may differ only in the `newest` ones."""
        self.tokens.copy_(tokens)

    @property
    def forward_passes(self) -> int:
        """Forward passes of the model until every image was finished, prefill included. Reads the device."""
        return int(self.steps.max())

    def accepted_per_step(self) -> torch.LongTensor:
        """Int64 [forward_passes, B] on the CPU: the number of tokens that each step of each image decided. Reads the
        device."""
        return self.accepted[: self.forward_passes].cpu()

    def check(self, names: Sequence[Any] | None = None) -> None:
        """Raise an error if any probabilities were not finite. Reads the device.

        Args:
            names: the name of the image in each row, None for an idle row; by default the index of the row.

        Raises:
            ValueError: naming the images.
        """
        names = range(len(self.seeds)) if names is None else names
        broken = [names[row] for row in self.invalid.nonzero().flatten().tolist() if names[row] is not None]
        if broken:
            what, images = "tokens" if self.tokens.is_floating_point() else "logits", ", ".join(map(str, broken))
            raise ValueError(
                f"the {what} of the model are not finite (images {images} of the batch): check its weights, or load "
                "it with dtype float32 or bfloat16"
            )
