"""Generation token by token with a cache of a few rows of the image."""

from dataclasses import dataclass

import torch

from .autoregressive import AutoregressiveState, decide_first, step_token
from .contract.distribution import Sampling
from .contract.models import RasterModel
from .contract.settings import check_settings
from .contract.state import attention_limit
from .contract.supports import DecodingMethod


@dataclass
class LineCacheState(AutoregressiveState):
    """Adds to `AutoregressiveState`: `rows`, int64 [B, lines * columns], the row of the image whose token lies in each
    slot of the cache, -1 where there is none. Its column is that of the slot."""

    rows: torch.LongTensor

    def limit_attention(self, steps: int, multiple: int = 64) -> None:
        if not self.cache.finds_ends:
            self.cache.attended_slots = attention_limit(int(self.furthest) + steps, self.rows.shape[1], multiple)


@dataclass(frozen=True)
class LineCacheDecoding(DecodingMethod):
    """`AutoregressiveDecoding` with a cache of `lines` rows of the image, after LineAR
    (https://arxiv.org/abs/2512.04857): N forward passes per image, with less memory, that attend to fewer tokens.

    Once the rows are full, a token replaces one of its own column: the one whose keys are most like those of the whole
    column, by cosines summed over all layers and heads. The token above it stays, in a video those of the last frame.
    LineAR chooses in every head, by the attention of the last row's queries, which a cache does not see.

    A token follows the model's distribution given the tokens that are kept. How far that is from the model's
    own distribution is not bounded. With as many lines as the image has rows, nothing is replaced, and the images are
    those of `AutoregressiveDecoding`.

    Attributes:
        lines: how many rows of tokens the cache has, >= 2; None is a quarter of the rows, but at least 8. A video has
            the rows of all its frames.
    """

    lines: int | None = None

    exact = False
    needs = {"tokens": ("single tokens", "raster", "one grid", "one order")}

    def __post_init__(self):
        check_settings(self, {"lines": 2})

    def start(self, model: RasterModel, sampling: Sampling, seeds: torch.LongTensor) -> LineCacheState:
        layout, batch = model.layout, len(seeds)
        slots = min(self.lines or max(8, layout.rows // 4), layout.rows) * layout.columns
        cache, logits = model.prefill(batch) if slots == layout.num_tokens else model.prefill(batch, slots=slots)
        rows = seeds.new_full((batch, slots), -1)
        state = LineCacheState.open(model, sampling, seeds, cache, cursor=torch.ones_like(seeds), rows=rows)
        decide_first(state, logits)
        return state

    def step(self, state: LineCacheState) -> None:
        shape, slots = state.model.layout.shape, torch.arange(state.rows.shape[1], device=state.seeds.device)
        if len(slots) == state.model.num_tokens:
            step_token(state)
            return
        newest = state.cursor[:, None] - 1
        row, column = newest // shape[-1], newest % shape[-1]
        # Those of its column, which fill in order.
        choice = slots[:: shape[-1]] + column
        held, lines = state.rows.gather(1, choice), choice.shape[1]
        recent = min(shape[-2] if len(shape) == 3 else 1, lines - 1)
        likeness = state.cache.likeness(choice).masked_fill(held >= row - recent, float("-inf"))
        line = torch.where(row < lines, row, likeness.argmax(1, keepdim=True))
        at = choice.gather(1, line)
        state.rows.scatter_(1, at, torch.where(state.finished[:, None], held.gather(1, line), row))
        step_token(state, slots=at, visible=slots <= newest[..., None])
