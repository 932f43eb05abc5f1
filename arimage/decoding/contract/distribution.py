"""The sampling distribution: from a model's logits to the probabilities that an exact decoding reproduces."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, ClassVar, Self

import torch

from ...kernels import probabilities as kernel
from ...kernels.probabilities.reference import force


# The settings that are stored per lane in a stack: their dtype, and the value that stands for None. A stack in which
# no lane sets one has None.
PER_LANE = {
    "guidance_scale": (torch.float32, None),
    "temperature": (torch.float32, None),
    "top_k": (torch.long, None),
    "top_p": (torch.float32, None),
    "min_p": (torch.float32, 0.0),
    "guided_tokens": (torch.long, torch.iinfo(torch.long).max),
    "guidance_scale_pow": (torch.float32, 0.0),
    "allowed": (torch.bool, True),
    "forced": (torch.long, -1),
}
# Those that steps leave out where no lane sets them.
OPTIONAL = ("min_p", "guided_tokens", "guidance_scale_pow", "allowed", "forced")
# Those that may be one number per scale.
PER_SCALE = ("guidance_scale", "temperature")


# Larger settings would only overflow.
LARGEST = 10**6
GUIDANCE_SCHEDULES = ("linear", "half-linear", "falling", "constant")


def _is_number(value, kind) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


# Of each number: its kind and range, and what is right.
_RANGES = {
    "guidance_scale": (Real, 0, LARGEST, f"a number from 0 to {LARGEST:g}; 1 disables guidance"),
    "temperature": (Real, 1e-6, LARGEST, f"a number from 1e-6 to {LARGEST:g}, or top_k=1 for greedy decoding"),
    "top_k": (Integral, 0, LARGEST, f"a whole number from 1 to {LARGEST}, or 0 for all tokens"),
    "top_p": (Real, math.ulp(0), 1, "a probability above 0 and up to 1"),
    "min_p": (Real, 0, 1, "a number from 0 to 1; 0 keeps all tokens"),
    "guided_tokens": (Integral, 0, LARGEST, "a number of tokens, or None for all"),
    "guidance_scale_pow": (Real, 0, LARGEST, f"a number from 0 to {LARGEST:g}; 0 is constant guidance"),
}


def by_lane(setting, dims: int = 2):
    """The setting in a shape that broadcasts to [B, ...] of `dims` dimensions: a number is unchanged, one number per
    lane [B] becomes [B, 1, ...]."""
    per_lane = isinstance(setting, torch.Tensor) and setting.ndim == 1
    return setting.view(-1, *[1] * (dims - 1)) if per_lane else setting


@dataclass(frozen=True)
class Sampling:
    """How the next token is sampled: guidance, temperature, allowed tokens, top-k, top-p, min-p, softmax, in this
    order.

    Either one for all images, or a `stack` in which every lane of a batch has its own settings. In a stack all
    attributes are tensors [B, ...] or None, so steps that were captured serve images with other settings too.

    Attributes:
        guidance_scale: s in u + s (c - u), with conditional logits c and unconditional logits u, >= 0; 0 to 1 disable
            it. For a `ScaleModel` a number, which follows the model's `guidance_schedule`, or one per scale.
        temperature: >= 1e-6. For a `ScaleModel` a number or one per scale.
        top_k: keep the tokens whose logit reaches the k-th largest, ties included; 0 = all. 1 is greedy decoding.
        top_p: keep the most probable tokens until their sum exceeds it, in (0, 1]; 1 = all.
        min_p: keep tokens that are at least `min_p` times as probable as the most probable one, in [0, 1]; 0 = all.
        guided_tokens: guide the first n tokens of an image only; None = all.
        guidance_scale_pow: p, from 0 to 1e6: the token of rank r of N is guided by 1 + (s - 1) (1 - cos(pi (r / N)^p))
            / 2, which grows along the image; 0 = by s everywhere (RAR, https://arxiv.org/abs/2411.00776).
        guidance_length: N for `guidance_scale_pow`, the same for all images of a batch.
        allowed: bool [V], tokens that may be sampled; None = all.
        forced: int64 [B, N], given tokens by rank, -1 = to be sampled. A sampled token follows the model's
            distribution given all tokens before it, forced ones included; it does not depend on forced tokens after
            it.

    Raises:
        ValueError: if a number is out of its range, or `allowed` or `forced` has a wrong dtype or shape.
    """

    # The settings of which a stack has one per lane; the others are the same for all lanes.
    per_lane: ClassVar[Sequence[str]] = tuple(PER_LANE)

    # A number, one per scale, or in a stack one per lane, or [B, K] for K scales.
    guidance_scale: Any = 1.0
    temperature: Any = 1.0
    top_k: int | torch.LongTensor = 0
    top_p: float | torch.FloatTensor = 1.0
    min_p: float | torch.FloatTensor = 0.0
    guided_tokens: int | torch.LongTensor | None = None
    guidance_scale_pow: float | torch.FloatTensor = 0.0
    guidance_length: int | None = None
    allowed: torch.BoolTensor | None = field(default=None, compare=False)
    forced: torch.LongTensor | None = field(default=None, compare=False)

    def __post_init__(self):
        for name in PER_SCALE:
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        for name, (kind, least, most, remedy) in _RANGES.items():
            value = getattr(self, name)
            numbers = value if name in PER_SCALE and isinstance(value, tuple) and value else (value,)
            fit = all(_is_number(one, kind) and least <= one <= most for one in numbers)
            if not fit and (name != "guided_tokens" or value is not None):
                raise ValueError(f"{name} is {value!r}: give {remedy}")
        power, allowed = self.guidance_scale_pow, self.allowed
        if power > 0 and self.guidance_length is None:
            raise ValueError(f"guidance_scale_pow is {power!r}: give guidance_length, the tokens of an image")
        if allowed is not None and not (
            isinstance(allowed, torch.Tensor) and allowed.dtype == torch.bool and allowed.ndim == 1 and allowed.any()
        ):
            raise ValueError("allowed must be a bool tensor [V] that allows at least one token")
        if self.forced is not None and not (isinstance(self.forced, torch.Tensor) and self.forced.ndim >= 2):
            raise ValueError(f"forced is {self.forced!r}: give a tensor of tokens [B, N]")

    @classmethod
    def stack(cls, samplings: Sequence[Self], device: torch.device | str | None = None) -> Self:
        """Settings for a batch in which lane b uses `samplings[b]`, stored in tensors on `device` that `put`
        overwrites.

        A lane without guidance (a scale of 1 or less) gets the scale 1, so it can be in one batch with guided lanes. A
        setting that none of `samplings` sets (`min_p`, `guided_tokens`, `allowed`, `forced`) is None, and `put` cannot
        add it later. `forced` is [1, N] in each of `samplings`.
        """
        stacked = samplings[0].replaced()
        for name in cls.per_lane:
            found = [value for sampling in samplings if (value := sampling.in_effect(name)) is not None]
            shape = (len(samplings), *torch.as_tensor(found[0]).shape[-1:]) if found else None
            lanes = None if shape is None else torch.empty(shape, dtype=PER_LANE[name][0], device=device)
            object.__setattr__(stacked, name, lanes)
        for lane, sampling in enumerate(samplings):
            stacked.put(torch.tensor([lane], device=device), sampling)
        return stacked

    def as_stack(self, count: int, device: torch.device) -> Self:
        """These settings as a stack of `count` equal lanes on `device`. Numbers per scale become K numbers per lane.
        `forced` is [`count`, N]."""
        if self.stacked:
            return self
        changes: dict[str, Any] = {}
        for name in self.per_lane:
            value: Any = self.in_effect(name)
            dtype = PER_LANE[name][0]
            if name == "guidance_scale":
                value = tuple(max(scale, 1) for scale in value) if isinstance(value, tuple) else max(value, 1)
            if isinstance(value, torch.Tensor):
                value = value.to(device)
                changes[name] = value.repeat(count, 1) if name == "allowed" else value.clone()
            elif isinstance(value, tuple):
                # The numbers of one scale lie next to each other.
                changes[name] = torch.tensor(value, dtype=dtype).to(device)[:, None].repeat(1, count).T
            else:
                lanes = None if value is None else torch.full((count,), value, dtype=dtype, device=device)
                changes[name] = lanes
        return self.replaced(**changes)

    def put(self, lanes: torch.LongTensor, other: Self) -> None:
        """Overwrite the settings of `lanes` [n] of a stack, in place, with `other`: one for all of them or a stack of
        n.

        Raises:
            ValueError: if `other` has a setting that is None in the stack.
        """
        for name in self.per_lane:
            mine, value, absent = getattr(self, name), other.in_effect(name), PER_LANE[name][1]
            if isinstance(value, tuple):
                raise ValueError(
                    f"{name} is one number per scale, but images of this batch have settings of their own: give one "
                    "number"
                )
            if mine is None and value is None:
                continue
            if mine is None:
                raise ValueError(f"no lane of this stack has {name}: set it in one of the samplings that are stacked")
            value = absent if value is None else value
            if not isinstance(value, torch.Tensor):
                # Without a copy to the device.
                mine.index_fill_(0, lanes, max(value, 1) if name == "guidance_scale" else value)
                continue
            if mine.ndim == 2 and value.shape[-1] != mine.shape[-1]:
                raise ValueError(
                    f"{name} is of {value.shape[-1]} and of {mine.shape[-1]} tokens in one batch: give equal sizes"
                )
            mine[lanes] = value.to(mine.device)

    def in_effect(self, name: str) -> Any:
        """A setting of a lane, None if it has no effect."""
        value, absent = getattr(self, name), PER_LANE[name][1]
        return None if isinstance(value, Real) and value == absent else value

    def replaced(self, **changes) -> Self:
        """A copy with other settings. It is not validated again, since checking `allowed` would synchronize with the
        device, and made without `copy`, which not every PyTorch compiles."""
        other = object.__new__(type(self))
        for each in fields(self):
            object.__setattr__(other, each.name, changes.get(each.name, getattr(self, each.name)))
        return other

    @property
    def guided(self) -> bool:
        """Whether the unconditional logits are needed. Always True for a stack, since any of its lanes may be
        guided."""
        scale = self.guidance_scale
        return isinstance(scale, torch.Tensor) or max(scale if isinstance(scale, tuple) else (scale,)) > 1

    def check_scales(self, count: int | None) -> None:
        """Raise a `ValueError` if a setting holds several numbers, but not one for each of the `count` scales of a
        model; None stands for a model without scales."""
        for name in PER_SCALE:
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != count:
                remedy = "one number" if count is None else f"one number, or one for each of the {count} scales"
                raise ValueError(f"{name} holds {len(value)} numbers: give {remedy}")

    @property
    def guided_by_scale(self) -> bool:
        """Whether there is one guidance scale per scale of a `ScaleModel`, or a list of them per lane."""
        scale = self.guidance_scale
        return isinstance(scale, tuple) or (isinstance(scale, torch.Tensor) and scale.ndim == 2)

    def at_scale(self, scale: int) -> Self:
        """The settings for `scale`: the numbers of those that have one per scale."""
        changes = {}
        for name in PER_SCALE:
            value = getattr(self, name)
            if isinstance(value, tuple):
                changes[name] = max(value[scale], 1.0) if name == "guidance_scale" else value[scale]
            elif isinstance(value, torch.Tensor) and value.ndim == 2:
                changes[name] = value[:, scale].contiguous()
        return self.replaced(**changes)

    def with_guidance(self, scale: float | torch.FloatTensor) -> Self:
        """A copy with another guidance scale, a number or one for each position [B, Q]."""
        return self.replaced(guidance_scale=scale)

    @property
    def stacked(self) -> bool:
        """Whether every lane has its own settings."""
        return isinstance(self.temperature, torch.Tensor)

    def take(self, images: torch.LongTensor) -> Self:
        """The settings of the `images` [M]."""
        names = [name for name in (self.per_lane if self.stacked else ("forced",)) if getattr(self, name) is not None]
        return self.replaced(**{name: getattr(self, name)[images] for name in names})

    def join(self, images: torch.LongTensor, other: Self, batch_size: int) -> Self:
        """Settings of a batch of `batch_size` images in which `images` [M] use `other`. Returns self if nothing
        differs, and also if self is a stack that has every setting of `other`: it is then updated in place."""
        unlike = self.stacked or other.stacked or self != other or self.allowed is not other.allowed
        if not unlike and self.forced is None and other.forced is None:
            return self
        stack, moved = self.replaced(), not self.stacked
        if not self.stacked:
            stack = self.as_stack(batch_size, images.device)
        for name in self.per_lane:
            dtype, absent = PER_LANE[name]
            if getattr(stack, name) is None and (value := other.in_effect(name)) is not None:
                value = torch.as_tensor(value)
                shape = value.shape[1:] if other.stacked else value.shape[-1:]
                lanes = torch.full((batch_size, *shape), absent, dtype=dtype, device=images.device)
                object.__setattr__(stack, name, lanes)
                moved = True
        stack.put(images, other)
        return stack if moved else self

    def probabilities(
        self,
        logits: torch.Tensor,
        positions: torch.LongTensor,
        invalid: torch.BoolTensor | None = None,
        ended: torch.BoolTensor | None = None,
    ) -> torch.FloatTensor:
        """Probabilities [B, Q, V] in float32 of the tokens at `positions` [B, Q], which may be after the end of the
        image, from logits [G, B, Q, V], G = 1 or 2. Sets `invalid` [B] of the images with probabilities that are not
        finite, but where `ended` [B, Q]."""
        self._check_allowed(logits.shape[-1])
        scale = self._scale_at(positions)
        min_p = 0.0 if self.min_p is None else self.min_p
        settings = scale, self.temperature, self.top_k, self.top_p, self.allowed, min_p
        return kernel.probabilities(logits, *settings, self.forced, positions, invalid, ended)

    def guided_values(self, values: torch.Tensor, positions: torch.LongTensor) -> torch.FloatTensor:
        """Values [B, Q, ...] in float32 at `positions` [B, Q], of those with and without the condition [2, B, Q, ...],
        or of the only ones [1, B, Q, ...]: logits, or features from which logits follow linearly."""
        return kernel.guide(values, self._scale_at(positions))

    def _scale_at(self, positions: torch.LongTensor) -> Any:
        """The guidance scale at `positions` [B, Q]: a number, one per image [B], or one per position."""
        scale = self.guidance_scale
        if self.in_effect("guidance_scale_pow") is not None:
            assert self.guidance_length is not None
            share = positions.clamp(0, self.guidance_length - 1).float() / self.guidance_length
            power = by_lane(self.guidance_scale_pow)
            scale = 1 + (by_lane(scale) - 1) * (1 - torch.cos(math.pi * share**power)) / 2
        if self.guided_tokens is not None:
            scale = torch.where(positions < by_lane(self.guided_tokens), by_lane(scale), 1.0)
        return scale

    def _check_allowed(self, vocab_size: int) -> None:
        if self.allowed is not None and self.allowed.shape[-1] != vocab_size:
            raise ValueError(
                f"allowed has {self.allowed.shape[-1]} tokens, the model {vocab_size}: give one flag per token"
            )

    def check_forced(self, count: int, num_tokens: int) -> None:
        """Raise a `ValueError` if `forced` does not hold the tokens of `count` images of `num_tokens` each."""
        if self.forced is not None and tuple(self.forced.shape[:2]) != (count, num_tokens):
            raise ValueError(
                f"forced is {tuple(self.forced.shape)} for {count} images of {num_tokens} tokens: give one value per "
                "token, -1 for those to be sampled"
            )

    def force(self, probabilities: torch.FloatTensor, positions: torch.LongTensor) -> torch.FloatTensor:
        """Probabilities [B, Q, V] of the tokens at `positions` [B, Q], one-hot where a token is forced."""
        return probabilities if self.forced is None else force(probabilities, self.forced, positions)

    def uniform(self, positions: torch.LongTensor, vocab_size: int) -> torch.FloatTensor:
        """Initial probabilities [B, Q, V] of drafts at `positions` [B, Q]: uniform over the allowed tokens, one-hot
        where a token is forced."""
        self._check_allowed(vocab_size)
        if self.allowed is None:
            weights = torch.full((vocab_size,), 1 / vocab_size, device=positions.device, dtype=torch.float32)
        else:
            allowed = self.allowed if self.allowed.ndim == 1 else self.allowed[:, None]
            weights = allowed.float() / allowed.sum(-1, keepdim=True)
        return self.force(weights.expand(*positions.shape, -1), positions)


@dataclass(frozen=True)
class LatentSampling(Sampling):
    """How a `LatentModel` samples continuous tokens. The settings for discrete tokens (`top_k`, `top_p`,
    `min_p`, `guided_tokens`, `allowed`) must keep their defaults.

    Attributes:
        guidance_scale: s in u + s (c - u), with the noise c predicted under the condition and u without it; 0 to 1
            disable it.
        temperature: factor on the noise of the denoising steps, >= 1e-6.
        guidance_schedule: with "linear", guidance grows from 1 in proportion to the number of decided tokens, and with
            "half-linear", too, but is at least s / 2; with "falling", it shrinks to 1; with "constant", it does not
            change.
        num_inference_steps: forward passes per image, 1 .. N; used by a `MaskedLatentModel` only.
        num_diffusion_steps: denoising steps per token, >= 2. A tuple gives the number of steps in each of several
            equal parts of the training steps, from the least noise to the most.
        forced: float32 [B, N, D], given tokens of a `MaskedLatentModel`, NaN = to be sampled. Sampled tokens depend on
            all given tokens.
    """

    per_lane: ClassVar[Sequence[str]] = ("guidance_scale", "temperature", "forced")

    guidance_schedule: str = "linear"
    num_inference_steps: int = 64
    num_diffusion_steps: int | tuple[int, ...] = 100

    def __post_init__(self):
        super().__post_init__()
        self.check_scales(None)
        for name, default in (("top_k", 0), ("top_p", 1), ("min_p", 0), ("guided_tokens", None), ("allowed", None)):
            if getattr(self, name) != default:
                raise ValueError(
                    f"{name} is for tokens of a vocabulary, and those of this model are continuous: leave it out"
                )
        if self.guidance_schedule not in GUIDANCE_SCHEDULES:
            choices = ", ".join(GUIDANCE_SCHEDULES)
            raise ValueError(f"guidance_schedule is {self.guidance_schedule!r}: choose among {choices}")
        passes, steps = self.num_inference_steps, self.num_diffusion_steps
        if not (_is_number(passes, Integral) and 1 <= passes <= LARGEST):
            raise ValueError(f"num_inference_steps is {passes!r}: give a whole number from 1 to {LARGEST}")
        # JSON has lists only.
        parts = tuple(steps) if isinstance(steps, list | tuple) else (steps,)
        whole = all(_is_number(part, Integral) and part >= 1 for part in parts)
        if not parts or not whole or not 2 <= sum(parts) <= LARGEST:
            raise ValueError(
                f"num_diffusion_steps is {steps!r}: give a whole number from 2 to {LARGEST}, or several as a list"
            )
        parts = tuple(map(int, parts))
        object.__setattr__(self, "num_diffusion_steps", parts if len(parts) > 1 else sum(parts))

    def join(self, images: torch.LongTensor, other: Self, batch_size: int) -> Self:
        """See `Sampling.join`.

        Raises:
            ValueError: if `other` has another schedule or other numbers of steps: images of continuous tokens that are
                generated together have equal ones.
        """
        for item in fields(LatentSampling):
            mine, theirs = getattr(self, item.name), getattr(other, item.name)
            if item.name not in PER_LANE and mine != theirs:
                raise ValueError(
                    f"{item.name} is {theirs!r} and {mine!r} in one batch: generate images of continuous tokens with "
                    "different settings in batches of their own"
                )
        return super().join(images, other, batch_size)

    def guidance_at(self, share: torch.Tensor) -> torch.FloatTensor:
        """The guidance scales where `share` [B, ...] of the tokens, 0 to 1, are decided."""
        schedule, scale = self.guidance_schedule, by_lane(self.guidance_scale, share.ndim)
        share = torch.ones_like(share, dtype=torch.float32) if schedule == "constant" else share.float()
        linear = 1 + (scale - 1) * (1 - share if schedule == "falling" else share)
        return linear.clamp(min=scale / 2) if schedule == "half-linear" else linear

    @property
    def num_denoising_steps(self) -> int:
        """The denoising steps of a token, of all parts together."""
        steps = self.num_diffusion_steps
        return sum(steps) if isinstance(steps, tuple) else steps
