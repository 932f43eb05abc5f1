"""The state of a decoding: what has been decided, what it reports, how images enter, and what the loop asks of it."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import nn

from ...kernels.cursor import advance
from .distribution import Sampling
from .models import Model


@dataclass
class DecodingState:
    """A batch of B images of N tokens that are being decoded. All tensors are allocated once, and steps write them in
    place. A finished image is replaced by another from what the state declares about its fields: one that holds no
    tensor is the model, the sampling settings, or in `caches` or one of the three after it.

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
        student_passes: forward passes of a student that drafted these images at the start.
        refillable: whether finished images may be replaced by others while the rest goes on, see `put`.
        image_dims: the batch dimension of those tensors where it is not the first.
        shared: the tensors that all images share, which have no batch dimension.
        caches: the fields that hold caches; None where there is none.
        structure: the values that steps are made for, hashable: images may use a state one after another only if these
            are equal.
        renewed: the values that further images bring with them, see `restart`.
        settled: the values that follow from the decoding and the network, or that `put` of the class takes care of.
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

    refillable: ClassVar[bool] = True
    image_dims: ClassVar[dict[str, int]] = {"accepted": 1}
    shared: ClassVar[frozenset[str]] = frozenset()
    caches: ClassVar[tuple[str, ...]] = ("cache",)
    structure: ClassVar[frozenset[str]] = frozenset()
    renewed: ClassVar[frozenset[str]] = frozenset()
    settled: ClassVar[frozenset[str]] = frozenset()

    # Set by decodings of models with a denoising head.
    head_calls = 0
    student_passes = 0

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

    # How images enter.

    def starter(self, decoding: Any) -> Any:
        """The decoding to `start` further images with, so that they can be `put` into this state, which `decoding`
        opened."""
        return decoding

    def put(self, images: torch.LongTensor, other: Self) -> bool:
        """Replace the `images` [M] with the images of `other`, a state of M images that the same decoding has
        started with the same network. Everything is written in place. Returns True if prompts or sampling settings did
        not fit, so that captured steps no longer apply.

        Raises:
            ValueError: if the images have settings that cannot be in one batch with these.
        """
        sampling, self.sampling = self.sampling, self.sampling.join(images, other.sampling, len(self.seeds))
        for name in self.caches:
            theirs = getattr(other, name)
            if theirs is None:
                setattr(self, name, None)
            else:
                getattr(self, name).put(images, theirs)
        for name, dim, values in self.per_image():
            theirs = getattr(other, name)
            if dim == 0 and values.ndim > 1:
                # The states may have different numbers of spare columns.
                values = values[:, : theirs.shape[1]]
            values.index_copy_(dim, images, theirs)
        for name in self.shared:
            getattr(self, name).copy_(getattr(other, name))
        # Two calls of `decode` may have one model.
        replaced = self.model is not other.model and self.model.put(images, other.model)  # pyright: ignore[reportArgumentType] of the same kind
        return replaced or self.sampling is not sampling

    def restart(self, images: torch.LongTensor, other: Self) -> bool:
        """`put` into a state whose images are all finished."""
        for name in self.renewed:
            setattr(self, name, getattr(other, name))
        return self.put(images, other)

    def select(self, images: torch.LongTensor) -> None:
        """Make image j the former image `images[j]`, [M], to drop images or to make room for others."""
        for name, dim, values in list(self.per_image()):
            setattr(self, name, values.index_select(dim, images))
        self.model, self.sampling = self.model.take(images), self.sampling.take(images)
        for cache in self._caches():
            cache.expand(images)

    def allocate(self) -> None:
        """Allocate what steps need; see `ImageCache`."""
        for cache in self._caches():
            cache.allocate()

    @property
    def nbytes(self) -> int:
        """The memory that the state holds: its tensors, those of its caches and of its sampling settings, and the
        conditions of its images."""
        storages = (each.untyped_storage() for each in held_tensors(self))
        return sum({storage._cdata: storage.nbytes() for storage in storages}.values())

    @property
    def shapes(self) -> tuple:
        """The shapes of its tensors, but for the number of images, and their dtypes."""
        return tuple(
            (name, values.dtype, values.shape[:dim], values.shape[dim + 1 :]) for name, dim, values in self.per_image()
        )

    def per_image(self) -> Iterator[tuple[str, int, torch.Tensor]]:
        """The tensors with a batch dimension: name, batch dimension, tensor."""
        for item in fields(self):
            values = getattr(self, item.name)
            if isinstance(values, torch.Tensor) and item.name not in self.shared:
                yield item.name, self.image_dims.get(item.name, 0), values

    def _caches(self) -> list[Any]:
        return [cache for name in self.caches if (cache := getattr(self, name)) is not None]

    # What the loop asks on the host between steps.

    @property
    def over(self) -> bool:
        """Whether the host knows, without reading the device, that every image is finished; possible where all images
        are at the same step. A further step changes nothing."""
        return False

    @property
    def step_variant(self) -> Hashable:
        """All that the host decides about the next step, such as the shapes of its tensors: steps of one variant
        launch the same kernels. None where the host reads the device, or allocates memory that stays."""
        return self.cache.attended_slots

    @property
    def reach(self) -> tuple[torch.LongTensor, int] | None:
        """Exclusive upper bound [] of the cache slots in use, and how far one step can raise it; None where
        unknown."""
        return None

    def limit_attention(self, steps: int, multiple: int = 64) -> None:
        """Called by the loop on the host: limit attention to the slots that the next `steps` steps can use, rounded up
        to a `multiple`. Reads the device, unless forward passes find the end themselves."""
        reach = self.reach
        if reach is not None and not self.cache.finds_ends:
            slot, stride = reach
            self.cache.attended_slots = attention_limit(int(slot) + steps * stride, self.model.num_tokens, multiple)

    def time_steps(self, take_step: Callable[[], object], how: str) -> None:
        """Called by the loop on the host before the first step of a state. It may take steps with `take_step`, as all
        steps of this state are taken, to measure them, but must undo them.

        Args:
            how: how `take_step` is compiled; "" if it is not.
        """

    def adapt(self) -> None:
        """Called by the loop on the host every few steps; may change the variant of the next steps."""

    def shrink(self) -> None:
        """Called by the loop on the host before every step of a single image where shapes may change: leave out what
        lies after its end, which does not change it."""

    # What it says about its images, to callbacks, previews and statistics.

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
    def step_variant(self) -> Hashable:
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


def held_tensors(value: Any) -> list[torch.Tensor]:
    """All tensors in an object, its attributes and containers. The weights of networks belong to others."""
    waiting, seen, found = [value], set(), []
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, nn.Module | type):
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value
        else:
            waiting += getattr(value, "__dict__", {}).values()
    return found
