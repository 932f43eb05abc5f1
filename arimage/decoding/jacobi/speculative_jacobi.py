"""Speculative Jacobi decoding: draft a window of tokens, verify it in one forward pass, and draft the next window from
the same pass."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, Self, cast, get_args

import torch

from ...kernels import window as kernel
from ...kernels.coupling import couple_at, race_at, sample_at
from ..acceptance import Acceptance, Accepts, ExactAcceptance, check_acceptance
from ..continuous.path_coupling import LatentSampling, PathState, start_paths, step_window
from ..contract.distribution import Sampling
from ..contract.layout import Layout
from ..contract.models import CausalLatentModel, FeatureModel, TokenModel
from ..contract.noise import Purpose, normals
from ..contract.settings import check_number, check_settings
from ..contract.supports import DecodingMethod, Need, Needs
from .adaptive_window import AdaptiveWindow
from .corrections import correct, ranks_around, tokens_around
from .step_seconds import SIZES, step_seconds
from .window import Init, WindowState, needs_of_init, open_window, resize_window, slide_window


Refresh = Literal["independent", "coupled", "gumbel"]
# A window shrinks at the end of the images by multiples of so many drafts, since that moves the drafts.
SHRINKS_BY = 8


@dataclass
class JacobiState(WindowState):
    """Adds to `WindowState`.

    Attributes:
        accepts: the test for drafts that are not fresh.
        adaptive: chooses the size of an adaptive window; None otherwise.
        guided: whether the images are guided.
        levels: K, for how many steps a draft is fed as noise before it is fed as a token.
        level: float32 [B, N + capacity], how many of these steps each position's draft has left; [B, 0] if K is 0.
        vectors: float32 [B, N + capacity, D], the noisy vectors of these drafts; [B, 0] if K is 0.
        around: int64 [B, N + capacity, K], see `ranks_around`; [B, 0] without corrections.
    """

    structure = WindowState.structure | {"levels", "guided"}
    settled = frozenset({"accepts", "adaptive"})

    accepts: Accepts
    adaptive: AdaptiveWindow | None
    guided: bool
    levels: int
    level: torch.FloatTensor
    vectors: torch.FloatTensor
    around: torch.LongTensor

    def time_steps(self, take_step: Callable[[], object], how: str) -> None:
        if self.adaptive is None:
            return
        window, before = self.window, {}

        def start() -> Callable[[int], None]:
            before.update({name: values.clone() for name, _, values in self.per_image()})

            def step(size: int) -> None:
                resize_window(self, size)
                take_step()

            return step

        self.adaptive.begin(step_seconds(self.model, len(self.seeds), self.guided, how, start))
        # In the cache, a slot is written again before it is read.
        for name, values in before.items():
            getattr(self, name).copy_(values)
        self.window = window
        resize_window(self, self.adaptive.window)

    def adapt(self) -> None:
        if self.adaptive is not None:
            resize_window(self, self.adaptive.choose(self.cursor))

    def shrink(self) -> None:
        if self.adaptive is None:
            left = self.model.num_tokens - int(self.cursor.min())
            multiple = math.lcm(SHRINKS_BY, self.model.block)
            resize_window(self, min(self.window, max(left + -left % multiple, multiple)))

    def starter(self, decoding: "SpeculativeJacobiDecoding") -> "SpeculativeJacobiDecoding":
        return decoding if self.adaptive is None else replace(decoding, window=self.window)

    def put(self, images: torch.LongTensor, other: Self) -> bool:
        if self.adaptive is not None:
            self.adaptive.restart()
        elif other.window > self.window:
            resize_window(self, other.window)
        self.accepts.put(other.accepts)
        return super().put(images, other)

    def enter(self, positions: torch.LongTensor, entered: torch.BoolTensor) -> None:
        if self.levels:
            noise = normals(self.seeds, positions, None, Purpose.NOISE, self.vectors.shape[-1])
            self._write(torch.where(entered, positions, self.model.num_tokens), self.levels, noise)

    def noisy(self, positions: torch.LongTensor) -> dict[str, torch.Tensor]:
        """The arguments of `DenoisingModel.forward` that replace the tokens at `positions` [B, W]."""
        vectors, level = self._at(positions)
        return {"vectors": vectors, "noise": level / self.levels}

    def is_token(self, positions: torch.LongTensor) -> torch.BoolTensor:
        """Bool [B, W], which of `positions` [B, W] are fed as tokens."""
        return self.level.gather(1, positions) == 0

    def denoise(self, positions: torch.LongTensor, end: torch.LongTensor, tokens: torch.LongTensor) -> None:
        """Move the vectors at `positions` [B, W] one level towards those of `tokens` [B, W]. Positions before `end`
        [B] are decided."""
        assert self.model.codebook is not None
        vectors, level = self._at(positions)
        # In a mixture (1 - t) x + t noise, t falls from level / K to (level - 1) / K.
        vectors = vectors + (normalised(self.model.codebook)[tokens] - vectors) / level.clamp(min=1)[..., None]
        self._write(positions, torch.where(positions < end[:, None], 0, (level - 1).clamp(min=0)), vectors)

    def _at(self, positions: torch.LongTensor) -> tuple[torch.FloatTensor, torch.FloatTensor]:
        index = positions[..., None].expand(-1, -1, self.vectors.shape[-1])
        return self.vectors.gather(1, index), self.level.gather(1, positions)

    def _write(self, positions: torch.LongTensor, level: torch.FloatTensor | int, vectors: torch.FloatTensor) -> None:
        self.vectors.scatter_(1, positions[..., None].expand_as(vectors), vectors)
        self.level.scatter_(1, positions, level)


def normalised(codebook: torch.Tensor) -> torch.FloatTensor:
    """The vectors [V, D], normalised to mean 0 and deviation 1 in each of the D dimensions, the scale of the noise."""
    codebook = codebook.float()
    return (codebook - codebook.mean(0)) / codebook.std(0)


@dataclass(frozen=True)
class SpeculativeJacobiDecoding(DecodingMethod):
    """Speculative Jacobi decoding (https://arxiv.org/abs/2410.01699), exact unless `acceptance`, `relax` or `reuse`
    relax it.

    A step evaluates `window` drafts after an image's cursor. The leading accepted drafts are decided; the first
    rejected one is replaced by a sample from the residual distribution and decided too. The remaining drafts are
    sampled again from the probabilities just computed. Every image has its own cursor. For a model that predicts
    blocks of tokens, a step decides whole blocks, up to and including that of the first rejected draft, whose other
    tokens do not depend on it: each is accepted or replaced on its own.

    A relaxed test only changes which drafts are decided, not how the others are sampled again, so a draft follows its
    recorded distribution whatever the test. It applies only to drafts that the model has evaluated before, so it needs
    a window of at least 2. If the distribution of one token, given the tokens before it, is off by a total variation
    of at most e, that of an image of N tokens is off by at most 1 - (1 - e) ** (N - 1).

    For a `CausalLatentModel` it couples denoising paths, as `PathJacobiDecoding` does. This needs the coupled refresh,
    an exact acceptance and a window that is a number. `init` is ignored.

    Attributes:
        window: drafts per step, >= 1; 1 is autoregressive decoding. It is rounded up to whole blocks. "auto" uses the
            size that decides the most tokens per second, by the duration of a step, measured in the first call of a
            model with a batch size and stored on disk, and the drafts accepted in this call. This is exact too, but
            the same seed may give another image on another machine or in another batch. Not for models that predict
            blocks.
        refresh: how undecided drafts are sampled again: "independent" of the old ones (the original method); "coupled"
            to them, so that as many as possible stay the same (the maximal coupling of
            https://arxiv.org/abs/2510.24211); or with "gumbel" noise that is fixed per position (its other coupling).
        init: the draft at a position that enters the window: a sample from the "uniform" distribution; the "common"
            token, likeliest at most of the first places before any is decided, for models in any order that predict
            groups; or a copy of the token to the "left", "above", or, in a video, at the same place in the "previous"
            frame, which may be a given one.
        acceptance: the test of a draft: exact, by groups of tokens or by neighbours in the codebook.
        relax: factor on the probability to accept a draft, >= 1. With an exact acceptance, 1 is exact, and otherwise e
            = 1 - 1 / relax (COOL-SD, https://arxiv.org/abs/2601.09212, with a constant factor).
        reuse: keep an undecided draft if its probability is more than `reuse` times that of the previous step, 0 to 1,
            and sample the others again according to `refresh` (SJD++, https://arxiv.org/abs/2512.07503, with the
            independent refresh). Not exact, and without a bound: a kept draft does not follow the distribution that is
            recorded for it. None disables it.
        levels: for how many steps a draft is fed as noise, less each time, before it is fed as a token; 0 disables it.
            The model needs a denoiser, which acts on noisy drafts only (in https://arxiv.org/abs/2510.08994 the model
            itself is fine-tuned). Exact, since a token is decided only after all tokens before it are free of noise.
        corrections: how often, after a forward pass, undecided drafts are sampled again to fit the tokens that are
            next to them now, by a small model of neighbours, which the model needs; 0 disables it, 4 is a good number.
            Exact, since drafts are verified with the distribution that they were sampled from. Needs the coupled
            refresh, without `reuse`.
    """

    window: int | Literal["auto"] = 32
    refresh: Refresh = "coupled"
    init: Init = "uniform"
    acceptance: Acceptance = field(default_factory=ExactAcceptance)
    relax: float = 1.0
    reuse: float | None = None
    levels: int = 0
    corrections: int = 0

    def __post_init__(self):
        check_settings(
            self,
            {"levels": 0, "corrections": 0} | ({} if self.window == "auto" else {"window": 1}),
            {"refresh": get_args(Refresh), "init": get_args(Init)},
        )
        check_acceptance(self)
        check_number(self, "relax", 1)
        if self.reuse is not None:
            check_number(self, "reuse", 0, 1)
        if self.corrections and (self.refresh != "coupled" or self.reuse is not None):
            raise ValueError(f"corrections is {self.corrections}: give the coupled refresh, without reuse, or 0")

    @property
    def exact(self) -> bool:
        return self.acceptance.exact and self.relax == 1 and self.reuse is None

    @property
    def needs(self) -> Needs:
        of_window: tuple[Need, ...] = ("single tokens",) if self.window == "auto" else ()
        of_levels: tuple[Need, ...] = ("denoiser",) if self.levels else ()
        of_corrections: tuple[Need, ...] = ("single tokens", "neighbours") if self.corrections else ()
        of_drafts = *needs_of_init(self.init), *of_window, *of_levels, *of_corrections
        needs: Needs = {"tokens": (*of_drafts, *self.acceptance.needs)}
        plain = self.exact and self.refresh == "coupled" and self.window != "auto"
        plain = plain and not self.levels and not self.corrections
        return {**needs, "causal_latents": ("noise",)} if plain else needs

    def positions(self, layout: Layout) -> int | None:
        window = SIZES[-1] if self.window == "auto" else self.window
        return min(window, layout.num_tokens)

    def start(
        self, model: TokenModel | CausalLatentModel, sampling: Sampling, seeds: torch.LongTensor
    ) -> JacobiState | PathState:
        if model.kind == "causal_latents":
            assert isinstance(sampling, LatentSampling) and self.window != "auto"
            return start_paths(model, sampling, seeds, self.window)
        accepts, adaptive = self.acceptance.bind(model), None
        if self.window == "auto":
            # Its sizes are known once the loop has timed the steps.
            adaptive = AdaptiveWindow({1: 1.0}, model.num_tokens, model.device)
            window, capacity = 1, SIZES[-1]
        else:
            window = capacity = self.window + -self.window % model.block
        room = model.num_tokens + min(capacity, model.num_tokens)
        around = ranks_around(model, len(seeds), room) if self.corrections else seeds.new_zeros(len(seeds), 0)
        level = seeds.new_zeros(len(seeds), 0, dtype=torch.float32)
        vectors = torch.zeros(len(seeds), 0, device=model.device, dtype=torch.float32)
        if self.levels:
            assert model.codebook is not None
            level, vectors = (
                level.new_zeros(len(seeds), room),
                vectors.new_zeros(len(seeds), room, model.codebook.shape[1]),
            )
        return open_window(
            JacobiState,
            model,
            sampling,
            seeds,
            window,
            self.init,
            capacity=capacity,
            accepts=accepts,
            adaptive=adaptive,
            guided=sampling.guided,
            levels=self.levels,
            level=level,
            vectors=vectors,
            around=around,
        )

    def step(self, state: JacobiState | PathState) -> None:
        if isinstance(state, PathState):
            step_window(state, "reflection")
            return
        model, fresh = state.model, state.fresh[:, : state.window]
        opened = kernel.open_window(state.positions, state.token_buffer, state.window, model.block, model.num_tokens)
        positions, ended, drafts, previous, fed = opened
        before = tokens_around(state.token_buffer, state.around, positions) if self.corrections else None
        noisy = state.noisy(positions - model.block) if self.levels else {}
        fed_to, features = (previous, fed, state.cache), None
        if self.corrections and model.neighbours is not None and model.neighbours.reads_features:
            logits, features = cast(FeatureModel, model).forward(*fed_to, return_features=True, **noisy)
        else:
            logits = model.forward(*fed_to, **noisy)
        p, q = state.probabilities(logits, positions, ended), state.draft_probabilities[:, : state.window]
        verified, kept, noise = couple_at(p, q, drafts, state.seeds, positions, state.steps, Purpose.VERIFY)
        redrafted = self._refresh(state, positions, drafts, verified, p, q)
        if self.relax > 1 or not self.acceptance.exact:
            # The q of a fresh draft is not a prediction: the neighbours of a random token would pass a relaxed test.
            kept = torch.where(fresh, kept, state.accepts(p, q, drafts, noise[..., 0] / self.relax))
            verified = torch.where(kept, drafts, verified)
        if self.levels:
            # Positions after a noisy draft have not attended to its token.
            kept = kept & state.is_token(positions)
        # With the coupled refresh, the same samples are the decided tokens and the next drafts.
        tokens = verified, None if redrafted is verified else redrafted, state.token_buffer
        end = kernel.close_window(positions, kept, *tokens, *state.progress, model.block, model.num_tokens)
        if before is not None:
            undecided = (positions >= end[:, None]) & ~ended
            evaluated, outputs = (positions, drafts, before), (logits, features)
            p = correct(state, state.around, self.corrections, undecided, evaluated, outputs, p, q, noise[..., :2])
        if state.adaptive is not None:
            state.adaptive.observe((kept & (positions < end[:, None])).sum(1), ~ended.all(1))
        if self.levels:
            state.denoise(positions, end, state.token_buffer.gather(1, positions))
        slide_window(state, end, p, noise[..., 2])

    def _refresh(self, state, positions, drafts, verified, p, q) -> torch.LongTensor:
        """The drafts [B, W] of the next step at positions that this step does not decide."""
        if self.refresh == "coupled":
            tokens = verified
        elif self.refresh == "independent":
            tokens = sample_at(p, state.seeds, positions, state.steps, Purpose.REFRESH)
        else:
            tokens = race_at(p, state.seeds, positions, None, Purpose.GUMBEL)
        if self.reuse is not None:
            now, before = (values.gather(-1, drafts[..., None]).squeeze(-1) for values in (p, q))
            stays = (now > self.reuse * before) & ~state.fresh[:, : state.window]
            tokens = torch.where(stays, drafts, tokens)
        return tokens
