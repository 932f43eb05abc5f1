"""Flow decoding: every token is a function of its noise and the tokens before it, and a distilled student guesses all
of them."""

import itertools
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from ..kernels.coupling import sample_at
from .contract.distribution import Sampling
from .contract.layout import Layout
from .contract.models import TokenModel, VectorModel
from .contract.noise import Purpose, normals, uniforms
from .contract.settings import check_settings
from .contract.state import CursorState
from .contract.supports import DecodingMethod, Needs, missing, traits_of
from .few_step import FewStepDecoding
from .jacobi.window import decided_end, start_distribution


Guesses = Literal["student", "random"]
# What the flow needs from the model that verifies.
TEACHER: Needs = {"tokens": ("single tokens", "codebook")}
# The flow stops at this time (its end is 1): later steps would have to be ever smaller, and most noise has reached one
# token.
END = 0.9
# Steps of the fourth-order Runge-Kutta method. Two are too few for the tests of exactness.
STEPS = 12


def flow(
    probabilities: torch.FloatTensor, noise: torch.FloatTensor, codebook: torch.FloatTensor, steps: int = STEPS
) -> torch.FloatTensor:
    """Probabilities [..., V] of the tokens, given the `noise` [..., D]. Averaged over standard normal noise they are
    `probabilities` [..., V].

    The path of a token with vector c is the line from its noise to c, (1 - t) noise + t c at the time t. The flow
    whose velocity is the average of these lines has the same distribution at every t (flow matching,
    https://arxiv.org/abs/2210.02747). It moves the noise to a point at t = `END`, which almost determines the token.

    Args:
        codebook: the vectors of the tokens [V, D], of approximately unit length.
        steps: integration steps, >= 1.
    """
    logarithms, half_squares = probabilities.log(), codebook.square().sum(-1) / 2

    def tokens_at(x: torch.FloatTensor, t: float) -> torch.FloatTensor:
        scale = t / (1 - t) ** 2
        scores = torch.addmm(half_squares, x, codebook.T, beta=-t * scale, alpha=scale)
        return (logarithms + scores.unflatten(0, noise.shape[:-1])).softmax(-1)

    def velocity(x: torch.FloatTensor, t: float) -> torch.FloatTensor:
        return torch.addmm(x, tokens_at(x, t).flatten(0, -2), codebook, beta=-1 / (1 - t), alpha=1 / (1 - t))

    x, times = noise.flatten(0, -2), [1 - (1 - END) ** (step / steps) for step in range(steps + 1)]
    for start, end in itertools.pairwise(times):
        size, middle = end - start, (start + end) / 2
        first = velocity(x, start)
        second = velocity(torch.add(x, first, alpha=size / 2), middle)
        third = velocity(torch.add(x, second, alpha=size / 2), middle)
        fourth = velocity(torch.add(x, third, alpha=size), end)
        change = torch.add(first, second, alpha=2).add_(third, alpha=2).add_(fourth)
        x = torch.add(x, change, alpha=size / 6)
    return tokens_at(x, END)


def _teacher(model: TokenModel | VectorModel) -> TokenModel | None:
    """The model that verifies the guesses: the model itself, or the teacher of a student if it generates token by
    token."""
    teacher = model.teacher if model.kind == "vectors" else model
    return teacher if teacher is not None and teacher.kind == "tokens" else None


@dataclass
class FlowState(CursorState):
    """Adds to `CursorState`: `noise` float32 [B, N, D], the `codebook` of the flow, float32 [V, D], and the `window`.
    With a student, `model` is its teacher."""

    shared = frozenset({"codebook"})
    structure = frozenset({"window", "student_passes"})

    model: TokenModel
    noise: torch.FloatTensor
    codebook: torch.FloatTensor
    window: int
    student_passes: int

    @property
    def vectors(self) -> torch.Tensor:
        """The codebook vectors [B, N, D] of `tokens`."""
        assert self.model.codebook is not None
        return self.model.codebook[self.tokens]

    @property
    def reach(self) -> tuple[torch.LongTensor, int]:
        return self.furthest - 1, self.window


@dataclass(frozen=True)
class FlowDecoding(DecodingMethod):
    """Exact use of a student of Distilled Decoding (https://arxiv.org/abs/2412.17153): the student guesses all tokens,
    and its teacher verifies them.

    Each token is a function of its own noise and the teacher's probabilities: a flow from noise to codebook vectors
    maps the noise to a token, and the student was trained to predict that token. A step evaluates `window` guesses
    after an image's cursor. It decides the leading guesses that the flow confirms and corrects the first wrong one,
    which is decided too. The guesses after it are replaced by the results of the flow, given the guesses before them.
    So the image is the one that the teacher alone generates token by token from the same noise, whatever the student
    guesses; guesses only save forward passes.

    Exact up to the numerical integration of the flow: with 12 steps, the probabilities given the noise differ from
    those with 48 steps by a total variation of 0.0001 where all 1,024 tokens of a small LlamaGen are equally probable.
    The forward passes of the student are counted as `student_passes`, not as `forward_passes`.

    Attributes:
        window: guesses per step, >= 1.
        starts: the levels from which the forward passes of the student generate, see `FewStepDecoding`.
        guesses: where the first guesses come from: the "student", or "random" numbers, for a teacher alone.
    """

    window: int = 32
    starts: tuple[int, ...] = (0,)
    guesses: Guesses = "student"

    exact = True

    @property
    def needs(self) -> Needs:
        return {"vectors": ("token teacher",), "tokens": ("student",)} if self.guesses == "student" else TEACHER

    def __post_init__(self):
        check_settings(self, {"window": 1}, {"guesses": get_args(Guesses)})
        object.__setattr__(self, "starts", self._student.starts)

    @property
    def _student(self) -> FewStepDecoding:
        return FewStepDecoding(self.starts)

    def misfit(self, model: TokenModel | VectorModel) -> str | None:
        if model.kind == "tokens":
            return None
        teacher = _teacher(model)
        assert teacher is not None
        return missing(TEACHER, traits_of(teacher)) or self._student.supports(model)

    def positions(self, layout: Layout) -> int | None:
        return self.window

    def start(self, model: TokenModel | VectorModel, sampling: Sampling, seeds: torch.LongTensor) -> FlowState:
        guesses, noise, passes = self._guess(model, sampling, seeds)
        if sampling.forced is not None:
            guesses = torch.where(sampling.forced < 0, guesses, sampling.forced)
        teacher = _teacher(model)
        assert teacher is not None
        cache, logits = teacher.prefill(len(seeds))
        assert teacher.codebook is not None
        codebook = teacher.codebook.float()
        state = FlowState.open(
            teacher,
            sampling,
            seeds,
            cache,
            spare=self.window,
            cursor=torch.zeros_like(seeds),
            noise=noise,
            codebook=codebook / codebook.square().sum(-1).mean().sqrt(),
            window=self.window,
            student_passes=passes,
        )
        state.tokens.copy_(guesses)
        first = state.cursor[:, None].clone()
        state.tokens[:, :1] = self._tokens(state, state.probabilities(logits[:, :, None], first), first)
        state.advance(torch.ones_like(seeds))
        return state

    def _guess(
        self, model: TokenModel | VectorModel, sampling: Sampling, seeds: torch.LongTensor
    ) -> tuple[torch.LongTensor, torch.FloatTensor, int]:
        """Guesses of all tokens [B, N], their noise [B, N, D], and the number of forward passes of the student."""
        if model.kind == "vectors":
            student = self._student.start(model, sampling, seeds)
            while student.taken < len(student.passes):
                self._student.step(student)
            return student.tokens, student.noise, student.taken
        assert model.codebook is not None
        ranks = torch.arange(model.num_tokens, device=model.device).expand(len(seeds), -1)
        _, sums = start_distribution(model, sampling, len(seeds))
        guesses = torch.searchsorted(sums, uniforms(seeds, ranks, None, Purpose.START, 1)[..., 0], right=True)
        return guesses, normals(seeds, ranks, None, Purpose.NOISE, model.codebook.shape[1]), 0

    def step(self, state: FlowState) -> None:
        offsets = torch.arange(state.window, device=state.seeds.device)
        positions = state.cursor[:, None] + offsets
        ended, before = positions >= state.model.num_tokens, positions - 1
        guesses, previous = state.token_buffer.gather(1, positions), state.token_buffer.gather(1, before)
        logits = state.model.forward(previous, before.masked_fill_(ended, -1), state.cache)
        tokens = self._tokens(state, state.probabilities(logits, positions, ended), positions)
        end = decided_end(state, positions, tokens == guesses, positions[:, -1:])
        state.token_buffer.scatter_(1, positions, tokens)
        state.advance(end)

    def _tokens(
        self, state: FlowState, probabilities: torch.FloatTensor, positions: torch.LongTensor
    ) -> torch.LongTensor:
        """The tokens [B, Q] that the flow assigns to the noise at `positions` [B, Q], given their `probabilities`
        [B, Q, V]."""
        images = torch.arange(len(positions), device=positions.device)[:, None]
        noise = state.noise[images, positions.clamp(max=state.model.num_tokens - 1)]
        weights = flow(probabilities, noise, state.codebook)
        return sample_at(weights, state.seeds, positions, None, Purpose.SAMPLE)
