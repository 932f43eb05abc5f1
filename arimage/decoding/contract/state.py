"""The state of a decoding: buffers that its steps write in place."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F

from .distribution import Sampling
from .models import Model


@dataclass
class DecodingState:
    """A batch of B images of N tokens that are being decoded. All tensors are allocated once and written in place.

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
        head_calls: sequential calls of denoising heads so far; 0 for models without one.
        image_dims: the batch dimension of those tensors where it is not the first.
        shared: the tensors that all images share, which have no batch dimension.
        refillable: whether finished images may be replaced by others, see `put`.
        student_passes: forward passes of a student that drafted these images at the start.
    """

    image_dims: ClassVar[dict[str, int]] = {"accepted": 1}
    shared: ClassVar[frozenset[str]] = frozenset()
    # Set by decodings of models with a denoising head.
    head_calls = 0
    refillable: ClassVar[bool] = True
    student_passes = 0

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

    @property
    def decided(self) -> torch.BoolTensor:
        """Bool [B, N], which tokens are final: by default the first ones, as many as the steps decided."""
        ranks = torch.arange(self.model.num_tokens, device=self.seeds.device)
        return ranks < self.accepted.sum(0)[:, None]

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
    def over(self) -> bool:
        """Whether the host knows, without reading the device, that every image is finished; possible where all images
        are at the same step. A further step changes nothing."""
        return False

    @property
    def step_shape(self) -> Hashable:
        """A key of the shapes of the next step; None where every step has different shapes."""
        return () if self.reach is None else self.cache.limit

    @property
    def forward_passes(self) -> int:
        """Forward passes of the model until every image was finished, prefill included. Reads the device."""
        return int(self.steps.max())

    def accepted_per_step(self) -> torch.LongTensor:
        """Int64 [forward_passes, B] on the CPU: the number of tokens that each step of each image decided. Reads the
        device."""
        return self.accepted[: self.forward_passes].cpu()

    def probabilities(
        self,
        logits: torch.Tensor,
        positions: torch.LongTensor,
        live: torch.BoolTensor | None = None,
        sampling: Sampling | None = None,
    ) -> torch.FloatTensor:
        """`Sampling.probabilities` with `sampling`, by default the state's. An image with probabilities at a `live`
        position [B, Q] that are not finite becomes `invalid`; positions after the end of the image are never live."""
        sampling = sampling or self.sampling
        if sampling.forced is not None:
            positions = positions.clamp(max=self.model.num_tokens - 1)
        probabilities = sampling.probabilities(logits, positions)
        # Logits that are not finite make the whole row NaN.
        broken = probabilities[..., 0].isnan()
        self.invalid |= (broken if live is None else broken & live).any(1)
        return probabilities

    def write_tokens(self, positions: torch.LongTensor, where: torch.BoolTensor, tokens: torch.LongTensor) -> None:
        """Write `tokens` [B, Q] at `positions` [B, Q] where the mask [B, Q] is True."""
        self.token_buffer.scatter_(1, torch.where(where, positions, self.model.num_tokens), tokens)

    def record(self, accepted: torch.LongTensor) -> None:
        """Count a step that decided `accepted` [B] tokens (0 for a finished image). Call it before `finished` is
        updated."""
        self.accepted.scatter_(0, self.steps[None], accepted[None])
        self.steps += ~self.finished

    def starter(self, decoding: Any) -> Any:
        """The decoding to `start` further images with, so that they can be `put` into this state, which `decoding`
        opened."""
        return decoding

    def put(self, rows: torch.LongTensor, other: Self) -> bool:
        """Replace the images in `rows` [M] with the images of `other`, a state of M images that the same decoding has
        started with the same network. Everything is written in place, except for prompts or sampling settings that
        there is no room for; in this case it returns True.

        Raises:
            ValueError: if the images have settings that cannot be in one batch with these.
        """
        sampling, self.sampling = self.sampling, self.sampling.join(rows, other.sampling, len(self.seeds))
        model: Any = self.model
        moved = model.put(rows, other.model)
        self.cache.put(rows, other.cache)
        for name, dim, values in self._per_image():
            theirs = getattr(other, name)
            if dim == 0 and values.ndim > 1:
                # The states may have different numbers of spare columns.
                values = values[:, : theirs.shape[1]]
            values.index_copy_(dim, rows, theirs)
        return moved or self.sampling is not sampling

    def select(self, rows: torch.LongTensor) -> None:
        """Make image j the former image `rows[j]`, [M], to drop images or to make room for others."""
        for name, dim, values in list(self._per_image()):
            setattr(self, name, values.index_select(dim, rows))
        self.model, self.sampling = self.model.take(rows), self.sampling.take(rows)
        self.cache.expand(rows)

    def _per_image(self) -> Iterator[tuple[str, int, torch.Tensor]]:
        """The tensors with a batch dimension: name, batch dimension, tensor."""
        for field in fields(self):
            values = getattr(self, field.name)
            if isinstance(values, torch.Tensor) and field.name not in self.shared:
                yield field.name, self.image_dims.get(field.name, 0), values

    @property
    def reach(self) -> tuple[torch.LongTensor, int] | None:
        """Exclusive upper bound [] of the cache slots in use, and how far one step can raise it; None where
        unknown."""
        return None

    def limit_attention(self, steps: int) -> None:
        """Called by the loop on the host: limit attention to the slots that the next `steps` steps can use. Reads the
        device."""
        if self.reach is not None:
            slot, stride = self.reach
            self.cache.limit = attention_limit(int(slot) + steps * stride, self.model.num_tokens)

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

    def time_steps(self, take_step: Callable[[Self], None], how: str) -> None:
        """Called by the loop on the host before the first step of a state. It may take steps with `take_step`, as all
        steps of this state are taken, to measure them, but must undo them.

        Args:
            how: how `take_step` is compiled; "" if it is not.
        """

    def adapt(self) -> None:
        """Called by the loop on the host every few steps; may change the shapes of the next steps."""


@dataclass
class CursorState(DecodingState):
    """Adds to `DecodingState`: `cursor` [B], the first position that is not decided."""

    cursor: torch.LongTensor

    def advance(self, end: torch.LongTensor) -> None:
        """Count a step that decided the tokens before `end` [B]."""
        self.record(end - self.cursor)
        self.cursor.copy_(end)
        torch.ge(end, self.model.num_tokens, out=self.finished)


def attention_limit(slots: int, most: int) -> int:
    """The attention limit for `slots` slots: rounded up to a multiple of 64, so that few sizes are compiled, at most
    `most`."""
    return min(-(-slots // 64) * 64, most)
