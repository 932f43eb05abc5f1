"""ZipAR: begin a row before the row above it is complete, and decide one token of every open row per step."""

from dataclasses import dataclass

import torch

from ..kernels.coupling import couple, sample
from .contract.distribution import Sampling
from .contract.models import TokenModel
from .contract.noise import Purpose, uniforms
from .contract.settings import check_settings
from .contract.supports import DecodingMethod
from .rows import RowState, decide, default_context, forward_rows, start_rows


@dataclass
class ZipARState(RowState):
    """Adds to `RowState`: `draft_probabilities` [B, V], what the draft of a row's first token was sampled from, zero
    where there is none."""

    draft_probabilities: torch.FloatTensor


@dataclass(frozen=True)
class ZipARDecoding(DecodingMethod):
    """ZipAR (https://arxiv.org/abs/2412.04062): rows * columns tokens in columns + (rows - 1) * window steps.

    A row begins once the row above holds `window` tokens; each open row gains one token per step. A token follows the
    model's distribution given the tokens before it that are decided by then: tokens further right in the row above are
    missing, and a row that begins early does so without the token before it. So the images follow the model's own
    distribution if no token depends on those missing, and nothing bounds how far off they are if one does: on a random
    table over 2 x 3 tokens of 2 kinds the total variation is 0.24 with a window of 1 and 0.17 with 2. A window that
    covers the row is autoregressive decoding, token by token. The rows of a video are those of all frames.

    Attributes:
        window: tokens of the row above that a row waits for, >= 1; None is a third of a row, at least 12.
        adaptive: draft a row's first token when the row above holds `window` tokens and begin the row only once the
            draft is accepted given one more token; a draft that is not is replaced by a sample from the residual
            distribution, and the row waits for another token, so that there are more steps.

    Raises:
        ValueError: if a setting is not among these.
    """

    window: int | None = None
    adaptive: bool = False

    exact = False
    needs = {"tokens": ("single tokens", "raster")}

    def __post_init__(self):
        check_settings(self, {} if self.window is None else {"window": 1}, {"adaptive": (True, False)})

    def start(self, model: TokenModel, sampling: Sampling, seeds: torch.LongTensor) -> ZipARState:
        none = torch.zeros(len(seeds), model.vocab_size, device=model.device)
        return start_rows(ZipARState, model, sampling, seeds, self._context(model), draft_probabilities=none)

    def step(self, state: ZipARState) -> None:
        step = forward_rows(state, None, self._context(state.model))
        positions, live, p = (values.squeeze(2) for values in (step.positions, step.live, step.probabilities))
        tokens = sample(p, uniforms(state.seeds, positions, Purpose.SAMPLE, None, 1)[..., 0])
        accepted = live
        if self.adaptive:
            # Only the lowest open row has no token, so at most one row per image has a pending draft.
            q = state.draft_probabilities[:, None].expand_as(p)
            begins = live & (positions % state.model.layout.columns == 0)
            drafted = begins & (q.sum(-1) > 0)
            noise = uniforms(state.seeds, positions, Purpose.VERIFY, state.steps, 2)
            verified, kept = couple(p, q, state.token_buffer.gather(1, positions).clamp(min=0), noise)
            tokens = torch.where(drafted, verified, tokens)
            waits = step.opening & ~(drafted & kept)
            accepted = live & ~waits
            state.draft_probabilities.copy_(torch.where(waits[..., None], p, 0).sum(1))
        decide(state, step, tokens[..., None], accepted.long())

    def _context(self, model: TokenModel) -> int:
        return min(self.window or default_context(model.layout.columns), model.layout.columns)
