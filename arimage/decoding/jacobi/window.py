"""The window of drafts ahead of an image's cursor, shared by the speculative Jacobi decodings."""

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
import torch.nn.functional as F

from ...kernels import window as kernel
from ...kernels.window import Drafting, reference
from ..autoregressive import decide_first, prefill
from ..contract.distribution import Sampling
from ..contract.models import TokenModel
from ..contract.noise import Purpose, uniforms
from ..contract.state import CursorState
from ..contract.supports import Need


Init = Literal["uniform", "common", "left", "above", "previous"]
# The places whose likeliest tokens tell which one is common.
_PLACES = 16
# The offset of the neighbour whose token is copied.
_OFFSETS = {"left": (0, -1), "above": (-1, 0), "previous": (-1, 0, 0)}


@dataclass
class WindowState(CursorState):
    """Adds to `CursorState`. The drafts are kept in a ring: when a draft is decided, its slot moves on to the position
    `window` further, and the other drafts stay in their slots. So the drafts at cursor .. cursor + W - 1 are in the
    first W slots, in any order. Positions after the end of the image are drafted too, but never evaluated.

    Attributes:
        window: W, the drafts in use; it changes between steps only.
        positions: int64 [B, capacity], the position of the draft in each slot.
        draft_probabilities: float32 [B, capacity, V], the distribution that the draft in each slot was sampled from.
        fresh: bool [B, capacity], the drafts that were never evaluated.
        init: how positions that enter the window are drafted.
        start, start_sums: float32 [B, V], the distribution of drafts that copy no neighbour, and its cumulative sums.
        neighbour: int64 [B, N + 1], the rank whose token `init` copies; N outside of the grid, and for rank N. None
            for "uniform" and "common".
    """

    structure = frozenset({"init"})
    renewed = frozenset({"window"})

    model: TokenModel
    window: int
    positions: torch.LongTensor
    draft_probabilities: torch.FloatTensor
    fresh: torch.BoolTensor
    init: Init
    start: torch.FloatTensor
    start_sums: torch.FloatTensor
    neighbour: torch.LongTensor | None

    @property
    def step_variant(self) -> Hashable:
        return self.window, self.cache.attended_slots

    @property
    def reach(self) -> tuple[torch.LongTensor, int]:
        return self.furthest - 1, self.window

    def finish(self) -> None:
        slots = torch.arange(self.positions.shape[1], device=self.positions.device)
        self.positions.copy_(self.model.num_tokens + slots)
        super().finish()

    def enter(self, positions: torch.LongTensor, entered: torch.BoolTensor) -> None:
        """Called after the `positions` [B, W] that `entered` [B, W] the window have been drafted."""


_State = TypeVar("_State", bound=WindowState)


def needs_of_init(init: Init) -> tuple[Need, ...]:
    """What drafting by `init` needs from a `TokenModel`."""
    of_init: dict[Init, tuple[Need, ...]] = {"previous": ("frames",), "common": ("groups",)}
    return of_init.get(init, ())


def start_distribution(
    model: TokenModel, sampling: Sampling, batch_size: int
) -> tuple[torch.FloatTensor, torch.FloatTensor]:
    """The uniform distribution [B, V] over the allowed tokens, and its cumulative sums."""
    allowed = sampling.allowed
    if allowed is None:
        allowed = torch.ones(model.vocab_size, device=model.device, dtype=torch.bool)
    allowed = allowed.float().expand(batch_size, -1)
    count = allowed.sum(-1, keepdim=True)
    # Sums of whole numbers, divided at the end: so the last sum is exactly 1, and tokens that are not allowed add
    # nothing.
    return allowed / count, allowed.cumsum(-1) / count


def open_window(
    state_class: type[_State],
    model: TokenModel,
    sampling: Sampling,
    seeds: torch.LongTensor,
    window: int,
    init: Init,
    *,
    scratch: int = 0,
    capacity: int | None = None,
    **buffers,
) -> _State:
    """Prefill, decide the first unknown rank (or the first block), and draft the `window` positions after it.

    Args:
        window: the number of drafts, a multiple of the model's block.
        scratch: the number of scratch slots of the cache.
        capacity: the largest window that the state has room for, by default `window`.
        buffers: the fields that `state_class` adds to `WindowState`.
    """
    count = min(_PLACES, model.num_tokens) if init == "common" else 1
    cache, logits, num_given = prefill(model, sampling, len(seeds), scratch, count)
    window, capacity = (min(size, model.num_tokens) for size in (window, capacity or window))
    start, start_sums = start_distribution(model, sampling, len(seeds))
    fresh = torch.ones(len(seeds), capacity, dtype=torch.bool, device=model.device)
    # The slot follows from the position: the positions that share a slot differ by multiples of the window.
    slots = torch.arange(capacity, device=model.device).expand(len(seeds), -1)
    ahead = torch.where(slots < window, (slots - num_given[:, None]) % window, slots)
    state = state_class.open(
        model,
        sampling,
        seeds,
        cache,
        spare=capacity,
        cursor=num_given + model.block,
        window=window,
        positions=num_given[:, None] + model.block + ahead,
        draft_probabilities=torch.zeros(
            len(seeds), capacity, model.vocab_size, device=model.device, dtype=torch.float32
        ),
        fresh=fresh,
        init=init,
        start=start,
        start_sums=start_sums,
        neighbour=None if init in ("uniform", "common") else _neighbours(model, len(seeds), init),
        **buffers,
    )
    if init == "common":
        logits = logits if logits.ndim == 4 else logits[:, :, None]
        _start_with_common(state, logits, num_given)
        logits = logits[:, :, 0]
    decide_first(state, logits, num_given)
    drafts = state.token_buffer.gather(1, state.positions[:, :window])
    _draft(state, fresh[:, :window], drafts, state.draft_probabilities[:, :window], state.cursor - 1)
    return state


def _start_with_common(state: WindowState, logits: torch.FloatTensor, num_given: torch.LongTensor) -> None:
    """Draft the token that is likeliest at most of the places after `num_given` [B], by their logits [G, B, Q, V]
    before any of them is decided."""
    positions = num_given[:, None] + torch.arange(logits.shape[2], device=logits.device)
    common = state.distribution(logits, positions).argmax(-1).mode(1, keepdim=True).values
    state.start.zero_().scatter_(1, common, 1)
    state.start_sums.copy_(state.start.cumsum(1))


def decided_end(
    state: CursorState, positions: torch.LongTensor, kept: torch.BoolTensor, last: torch.LongTensor
) -> torch.LongTensor:
    """The position [B] after the first draft that is not `kept` [B, W], at most the one after `last` [B, 1] and the
    end of the image."""
    decided = torch.where(kept, last, positions).amin(1)
    return (decided + 1).clamp_(max=state.model.num_tokens)


def slide_window(
    state: WindowState,
    end: torch.LongTensor,
    probabilities: torch.FloatTensor | None = None,
    uniform: torch.FloatTensor | None = None,
) -> None:
    """Draft what enters the window after the drafts before `end` [B] have been decided, see `CursorState.advance`.

    Args:
        probabilities: [B, W, V], the distributions that the other drafts were sampled from; None if the state has
            them.
        uniform: [B, W] in [0, 1), unused random numbers of the positions of this step; each is used for the draft that
            takes the slot, which is safe since a position is decided once. None generates numbers for the new
            positions.
    """
    window = state.window
    last = None if state.neighbour is None else state.positions[:, :window].amax(1)
    slots = state.positions, state.fresh, state.token_buffer, state.draft_probabilities, probabilities, end
    numbers = uniform, state.seeds, state.steps, Purpose.START
    kernel.slide_window(*slots, *_drafting(state), last, *numbers, window, state.model.num_tokens)
    state.enter(state.positions[:, :window], state.fresh[:, :window])


def resize_window(state: WindowState, window: int) -> None:
    """Keep the first `window` drafts, or draft more until there are as many."""
    before, window = state.window, min(window, state.model.num_tokens)
    if window == before:
        return
    # Sorted by position, the drafts to keep come first.
    order = state.positions[:, :before].argsort(1)
    images = torch.arange(len(order), device=order.device)[:, None]
    for values in (state.positions, state.fresh, state.draft_probabilities):
        values[:, :before] = values[images, order]
    state.window = window
    if window > before:
        offsets, cursor = torch.arange(window, device=order.device), state.cursor[:, None]
        state.positions[:, before:window] = (cursor + offsets)[:, before:]
        state.fresh[:, before:window] = True
        tokens = state.token_buffer.gather(1, state.positions[:, :window])
        entered, probabilities = (offsets >= before).expand(len(order), -1), state.draft_probabilities[:, :window]
        _draft(state, entered, tokens, probabilities, state.cursor + (before - 1))


def _drafting(state: WindowState) -> Drafting:
    model, init = state.model, state.init
    # The neighbour may be among the positions being drafted; after this many positions it is not.
    reach = {
        "uniform": state.window,
        "common": state.window,
        "left": state.window,
        "above": min(grid[-1] for grid in model.layout.grids),
        "previous": math.prod(model.layout.shape[-2:]),
    }[init]
    # A video is generated in raster order.
    context = model.context if init == "previous" else None
    start = state.start, state.start_sums, state.sampling.forced
    return Drafting(*start, state.neighbour, (state.window - 1) // reach, context)


def _draft(
    state: WindowState,
    entered: torch.BoolTensor,
    tokens: torch.LongTensor,
    probabilities: torch.FloatTensor,
    last: torch.LongTensor,
) -> None:
    """Draft the positions that `entered` [B, W] the window, which come after `last` [B]; the other drafts are
    `tokens` [B, W], and were sampled from `probabilities` [B, W, V]."""
    positions = state.positions[:, : state.window]
    drafts, start = reference.draft(state.token_buffer, positions, _drafting(state), last, _numbers(state, positions))
    state.token_buffer.scatter_(1, positions, torch.where(entered, drafts, tokens))
    torch.where(entered[..., None], start, probabilities, out=state.draft_probabilities[:, : state.window])
    state.enter(positions, entered)


def draft_uniformly(state, positions: torch.LongTensor) -> tuple[torch.LongTensor, torch.FloatTensor]:
    """Drafts [B, W] at `positions`, sampled by the state's `start_sums`, and their distributions [B, 1 or W, V]."""
    drafting = Drafting(state.start, state.start_sums, state.sampling.forced)
    return reference.draft(state.token_buffer, positions, drafting, None, _numbers(state, positions))


def _numbers(state, positions: torch.LongTensor) -> torch.FloatTensor:
    """The random numbers [B, W] in [0, 1) of drafts at `positions` [B, W]."""
    return uniforms(state.seeds, positions, state.steps, Purpose.START, 1)[..., 0]


def _neighbours(model: TokenModel, batch_size: int, init: Init) -> torch.LongTensor:
    """The ranks [B, N + 1] whose tokens `init` copies, see `WindowState`."""
    size = model.num_tokens
    ranks = torch.arange(size, device=model.device).repeat(batch_size, 1)
    around = model.layout.neighbours(ranks, _OFFSETS[init])
    return F.pad(around.masked_fill(around < 0, size), (0, 1), value=size)
