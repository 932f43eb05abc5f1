"""What has been decided about the images of a batch: the buffers that steps write in place."""

from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F

from .distribution import Sampling
from .models import Model


@dataclass
class StateData:
    """The data of a `DecodingState`: a batch of B images of N tokens. All tensors are allocated once and written in
    place.

    Attributes:
        model, sampling, seeds: the model, how to sample, and one seed per image (int64 [B]).
        cache: the model's cache of this call.
        token_buffer: int64 [B, N + spare], spare >= 1; the spare columns collect tokens after the end of the image,
            which are discarded. See `tokens`.
        finished: bool [B].
        steps: int64 [B], the forward passes of the model so far, per image, prefill included; a finished image is no
            longer counted.
        accepted: int64 [N + 1, B], the number of tokens that each step of an image decided.
        invalid: bool [B], whether any probabilities of the image were not finite.
    """

    model: Model
    sampling: Sampling
    seeds: torch.LongTensor
    cache: Any
    token_buffer: torch.LongTensor
    finished: torch.BoolTensor
    steps: torch.LongTensor
    accepted: torch.LongTensor
    invalid: torch.BoolTensor

    @classmethod
    def open(
        cls,
        model: Model,
        sampling: Sampling,
        seeds: torch.LongTensor,
        cache: Any,
        *,
        spare: int = 1,
        **buffers,
    ) -> Self:
        """A state in which nothing is decided; `buffers` are the fields that a subclass adds."""
        batch, size = len(seeds), model.num_tokens
        return cls(
            model=model,
            sampling=sampling,
            seeds=seeds,
            cache=cache,
            token_buffer=F.pad(seeds.new_full((batch, size), -1), (0, spare)),
            finished=torch.zeros_like(seeds, dtype=torch.bool),
            steps=torch.zeros_like(seeds),
            accepted=seeds.new_zeros(size + 1, batch),
            invalid=torch.zeros_like(seeds, dtype=torch.bool),
            **buffers,
        )

    @property
    def tokens(self) -> torch.LongTensor:
        """Int64 [B, N] by rank: decided tokens and drafts; -1 where there is neither."""
        return self.token_buffer[:, : self.model.num_tokens]

    def probabilities(
        self,
        logits: torch.Tensor,
        positions: torch.LongTensor,
        ended: torch.BoolTensor | None = None,
        sampling: Sampling | None = None,
    ) -> torch.FloatTensor:
        """The `distribution`. An image with probabilities that are not finite becomes `invalid`, but where `ended`
        [B, Q], at positions that were not fed and at those after the end of the image."""
        return (sampling or self.sampling).probabilities(logits, positions, self.invalid, ended)

    def distribution(
        self, logits: torch.Tensor, positions: torch.LongTensor, sampling: Sampling | None = None
    ) -> torch.FloatTensor:
        """`Sampling.probabilities` with `sampling`, by default the state's; positions may be after the end of the
        image."""
        return (sampling or self.sampling).probabilities(logits, positions)

    def write_tokens(self, positions: torch.LongTensor, where: torch.BoolTensor, tokens: torch.LongTensor) -> None:
        """Write `tokens` [B, Q] at `positions` [B, Q] where the mask [B, Q] is True."""
        self.token_buffer.scatter_(1, torch.where(where, positions, self.model.num_tokens), tokens)

    def record(self, accepted: torch.LongTensor) -> None:
        """Count a step that decided `accepted` [B] tokens (0 for a finished image). Call it before `finished` is
        updated."""
        self.accepted.scatter_(0, self.steps[None], accepted[None])
        self.steps += ~self.finished

    def stack_sampling(self) -> None:
        """Called by the loop before steps are compiled or captured: put the sampling settings into tensors, so that
        the same steps serve images with others."""
        self.sampling = self.sampling.as_stack(len(self.seeds), self.seeds.device)

    def finish(self) -> None:
        """Finish all images as they are: further steps change nothing."""
        self.finished.fill_(True)
