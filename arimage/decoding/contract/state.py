"""The state of a decoding: its data, how images enter it, what it reports, and what the loop asks of it."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch

from ...kernels.cursor import advance
from .admission import Admission
from .report import Report


@dataclass
class DecodingState(Admission, Report):
    """A batch of B images of N tokens that are being decoded: its `StateData`, `Admission` and `Report`, and what the
    loop asks on the host between steps."""

    @property
    def over(self) -> bool:
        """Whether the host knows, without reading the device, that every image is finished; possible where all images
        are at the same step. A further step changes nothing."""
        return False

    @property
    def step_shape(self) -> Hashable:
        """A key of all that the host decides about the next step, such as its shapes: steps with equal keys launch the
        same kernels. None where the host reads the device, or allocates memory that stays."""
        return self.cache.attended_slots

    @property
    def reach(self) -> tuple[torch.LongTensor, int] | None:
        """Exclusive upper bound [] of the cache slots in use, and how far one step can raise it; None where
        unknown."""
        return None

    def limit_attention(self, steps: int, multiple: int = 64) -> None:
        """Called by the loop on the host: limit attention to the slots that the next `steps` steps can use, rounded up
        to a `multiple`. Reads the device, unless forward passes find the end themselves."""
        if self.reach is not None and not self.cache.finds_ends:
            slot, stride = self.reach
            self.cache.attended_slots = attention_limit(int(slot) + steps * stride, self.model.num_tokens, multiple)

    def time_steps(self, take_step: Callable[[], object], how: str) -> None:
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

    @property
    def furthest(self) -> torch.LongTensor:
        """The largest cursor [] of an image that is not finished."""
        return self.cursor.masked_fill(self.finished, 0).max()

    @property
    def progress(self) -> tuple[torch.LongTensor, torch.BoolTensor, torch.LongTensor, torch.LongTensor]:
        """What the end of a step writes: `cursor`, `finished`, `steps`, `accepted`."""
        return self.cursor, self.finished, self.steps, self.accepted

    def advance(self, end: torch.LongTensor) -> None:
        """Count a step that decided the tokens before `end` [B]."""
        advance(end, *self.progress, self.model.num_tokens)

    def finish(self) -> None:
        self.cursor.fill_(self.model.num_tokens)
        super().finish()


@dataclass
class LockstepState(DecodingState):
    """Adds to `DecodingState`: `taken`, the number of steps that all images have taken. They begin and end together,
    so the host knows where they are."""

    refillable = False
    renewed = frozenset({"taken"})

    taken: int = field(default=0, kw_only=True)

    @property
    def num_steps(self) -> int:
        """The number of steps of an image."""
        raise NotImplementedError

    @property
    def over(self) -> bool:
        return self.taken == self.num_steps

    @property
    def step_shape(self) -> Hashable:
        return self.taken


def not_finite(vectors: torch.Tensor) -> torch.BoolTensor:
    """Which `vectors` [..., D] have values that are not finite, in fewer launches than with `isfinite`."""
    # Only the difference of finite numbers is 0.
    return (vectors - vectors).sum(-1) != 0


def attention_limit(slots: int, most: int, multiple: int = 64) -> int:
    """The attention limit for `slots` slots: rounded up to a `multiple`, at most `most`."""
    return min(-(-slots // multiple) * multiple, most)


def captured_multiple(most: int) -> int:
    """What the attention limits of captured steps are multiples of: a quarter of `most` slots, so that there are few
    captures."""
    return -(-most // 256) * 64
