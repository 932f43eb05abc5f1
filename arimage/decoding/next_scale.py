"""Next-scale decoding: all tokens of a map in one forward pass, from the coarsest map to the finest."""

from dataclasses import dataclass
from typing import TypeVar

import torch

from ..kernels.coupling import sample_at
from .contract.distribution import PER_SCALE, Sampling
from .contract.models import ScaleModel
from .contract.noise import Purpose, exponentials
from .contract.settings import check_settings, check_several
from .contract.state import LockstepState
from .contract.supports import DecodingMethod, Needs


@dataclass
class ScaleState(LockstepState):
    """Adds to `LockstepState`: `latents` [B, D, *shape], the sum of the maps that are decided (None at the start).
    `tokens` holds the maps from coarse to fine, each row by row. `mixed` says whether the latents are sums of mixtures
    of token vectors, `end` how many maps are generated, and `guided` how many the settings guide."""

    structure = frozenset({"mixed", "end", "guided"})

    model: ScaleModel
    latents: torch.FloatTensor | None = None
    mixed: bool = False
    end: int = 0
    guided: int = 0

    @property
    def replaceable(self) -> bool:
        return not self.mixed

    def replace(self, tokens: torch.LongTensor) -> None:
        super().replace(tokens)
        latents = None
        for scale in range(self.taken):
            positions = scale_positions(self.model, scale, len(tokens))
            added = self.model.vectors(scale, tokens.gather(1, positions))
            latents = self.model.accumulate(scale, latents, added)
        assert self.latents is not None
        self.latents.copy_(latents)

    @property
    def num_steps(self) -> int:
        return self.end

    @property
    def work(self) -> torch.FloatTensor:
        costs = self.model.costs[: self.end]
        return torch.full_like(self.seeds, sum(costs[: self.taken]) / sum(costs), dtype=torch.float32)

    def stack_sampling(self) -> None:
        self.sampling = stack_of_scales(self.sampling, self.model, len(self.seeds))


def scale_sampling(sampling: Sampling, scale: int, model: ScaleModel) -> Sampling:
    """The settings for `scale`, see `ScaleModel.guidance_schedule`."""
    ours = sampling.at_scale(scale)
    if model.guidance_schedule == "constant" or sampling.guided_by_scale:
        return ours
    ratio = scale / max(len(model.scales) - 1, 1)
    return ours.with_guidance(1 + (ours.guidance_scale - 1) * ratio)


def stack_of_scales(sampling: Sampling, model: ScaleModel, batch_size: int) -> Sampling:
    """The settings as a stack of `batch_size` rows that hold one number for each scale of `model`."""
    if sampling.stacked:
        return sampling
    scales = [scale_sampling(sampling, scale, model) for scale in range(len(model.scales))]
    numbers = {name: tuple(getattr(scale, name) for scale in scales) for name in PER_SCALE}
    return sampling.replaced(**numbers).as_stack(batch_size, model.device)


def guided_count(sampling: Sampling, count: int) -> int:
    """How many of `count` scales are guided: those at the end of a list whose numbers are 1 or less are not."""
    scales = sampling.guidance_scale
    if not isinstance(scales, tuple):
        return count
    return max((scale + 1 for scale, number in enumerate(scales) if number > 1), default=0)


def scale_positions(model: ScaleModel, scale: int, batch_size: int) -> torch.LongTensor:
    """The positions [B, n] of the tokens of `scale` among the tokens of all scales."""
    first, count = sum(model.scale_sizes[:scale]), model.scale_sizes[scale]
    return (first + torch.arange(count, device=model.device)).expand(batch_size, -1)


_State = TypeVar("_State", bound=ScaleState)
_COUNTS = ("guided_scales", "stop_after")


@dataclass(frozen=True)
class NextScaleDecoding(DecodingMethod):
    """Sample every map of a next-scale model (VAR, https://arxiv.org/abs/2404.02905) in one forward pass: K passes per
    image.

    `guidance_scale` and `temperature` may be lists with one number per scale. A single `guidance_scale` of VAR grows
    along the K scales: scale k uses 1 + (guidance_scale - 1) k / (K - 1).

    Attributes:
        more_smooth: for a smoother image, add up mixtures of token vectors, with Gumbel-softmax weights that sharpen
            along the scales, instead of single vectors. Not exact: an image then does not correspond to tokens, and
            the reported tokens are those with the largest weights.
        guided_scales: guide the first scales only, this many. The later ones, which have most of the tokens, are fed
            without the unconditional branch, which halves their cost. None guides all. Not exact, since the model's
            own distribution guides all. Scales at the end of a list of guidance scales that are all 1 are fed without
            this branch too, and change nothing.
        stop_after: generate this many scales only, and decode their sum to an image of the full size, without the
            details of the others, whose tokens stay -1. None generates all. A film must end in its last clip. Not
            exact.
        pruned: for each of the last scales that are generated, the share of its cells, 0 <= share < 1, that is not
            fed: (0.4, 0.5) leaves out 40 % of the last scale but one and half of the last. Those cells are fed whose
            inputs differ most from the mean of their map. In the others, the layers change the hidden states by as
            much as at their place in the last scale of which all cells were fed. This is FastVAR
            (https://arxiv.org/abs/2503.23367), except that cells are chosen once per scale, before the first layer,
            and not in each of most layers. The first two scales cannot be pruned, nor, in films, the first of the last
            clip and those before it. Not exact, and without a bound.
    """

    more_smooth: bool = False
    guided_scales: int | None = None
    stop_after: int | None = None
    pruned: tuple[float, ...] = ()

    @property
    def needs(self) -> Needs:
        return {"scales": ("pruning",) if self.pruned else ()}

    def __post_init__(self):
        sentence = "give numbers from 0 to less than 1, one per scale"
        check_several(self, "pruned", float, lambda shares: all(0 <= share < 1 for share in shares), sentence)
        check_settings(self, dict.fromkeys(_COUNTS, 1), {"more_smooth": (True, False)})

    @property
    def exact(self) -> bool:
        return not self.more_smooth and self.guided_scales is None and self.stop_after is None and not self.pruned

    def misfit(self, model: ScaleModel) -> str | None:
        for name in _COUNTS:
            if (getattr(self, name) or 0) > len(model.scales):
                return f"{name} is {getattr(self, name)}: give at most its {len(model.scales)} scales"
        end = self.stop_after or len(model.scales)
        if end <= model.last_clip:
            return f"stop_after is {end}, but its last clip begins after {model.last_clip} scales: give more"
        most = max(end - max(2, model.last_clip + 1), 0)
        if len(self.pruned) > most:
            return (
                f"pruned holds {len(self.pruned)} shares: give at most {most}, one for each scale after the second "
                "and after the first of the last clip"
            )
        if self.more_smooth and model.codebook is None:
            return "more_smooth adds up vectors of a codebook, and it predicts bits: leave it out"
        return None

    def start(self, model: ScaleModel, sampling: Sampling, seeds: torch.LongTensor) -> ScaleState:
        return self.open(ScaleState, model, sampling, seeds)

    def open(
        self, state_class: type[_State], model: ScaleModel, sampling: Sampling, seeds: torch.LongTensor
    ) -> _State:
        """Prefill and decide the first map."""
        end = self.stop_after or len(model.scales)
        if self.pruned:
            shares = dict(enumerate(self.pruned, end - len(self.pruned)))
            cache, logits = model.prefill(len(seeds), pruned=shares)
        else:
            cache, logits = model.prefill(len(seeds))
        guided = guided_count(sampling, len(model.scales))
        state = state_class.open(model, sampling, seeds, cache, mixed=self.more_smooth, end=end, guided=guided)
        self.commit(state, logits)
        return state

    def step(self, state: ScaleState) -> None:
        if state.over:
            return
        guided = min(state.guided, self.guided_scales or state.guided)
        guidance = {} if state.taken < guided else {"guided": False}
        self.commit(state, state.model.forward(state.taken, state.latents, state.cache, **guidance))

    def commit(self, state: ScaleState, logits: torch.FloatTensor) -> None:
        """Decide the next map, given its logits [G, B, n, V]."""
        model, scale = state.model, state.taken
        positions = scale_positions(model, scale, len(state.seeds))
        sampling = scale_sampling(state.sampling, scale, model)
        guided = model.guide(logits, sampling.guidance_scale, sampling.temperature)
        if guided is not None:
            logits, sampling = guided, sampling.replaced(guidance_scale=1.0, temperature=1.0)
        probabilities = state.probabilities(logits, positions, sampling=sampling)
        if self.more_smooth:
            ratio = scale / max(len(model.scales) - 1, 1)
            gumbel = -exponentials(state.seeds, positions, None, Purpose.GUMBEL, model.vocab_size).log()
            temperature = max(0.27 * (1 - 0.95 * ratio), 0.005)
            weights = ((probabilities.log() * (1 + ratio) + gumbel) / temperature).softmax(-1)
            tokens = weights.argmax(-1)
            added = (weights @ model.codebook).transpose(1, 2).unflatten(2, model.scales[scale])
        else:
            tokens = self.sample(state, probabilities, positions)
            added = model.vectors(scale, tokens)
        latents = model.accumulate(scale, state.latents, added)
        state.latents = latents.clone() if state.latents is None else state.latents.copy_(latents)
        state.tokens.scatter_(1, positions, tokens)
        state.record(torch.full_like(state.seeds, tokens.shape[1]))
        state.taken += 1
        state.finished.fill_(state.over)

    def sample(
        self, state: ScaleState, probabilities: torch.FloatTensor, positions: torch.LongTensor
    ) -> torch.LongTensor:
        """Tokens [B, n] at `positions` [B, n], from `probabilities` [B, n, V]."""
        return sample_at(probabilities, state.seeds, positions, None, Purpose.SAMPLE)
