"""Flow decoding: every token is a function of its noise and of the tokens before it, and a distilled student guesses
them all."""

import itertools
from dataclasses import dataclass

import torch

from ..kernels.coupling import sample
from .contract.distribution import Sampling
from .contract.models import TokenModel, VectorModel
from .contract.noise import Purpose, normals, uniforms
from .contract.settings import check_settings
from .contract.state import CursorState
from .contract.supports import DecodingMethod, missing, traits_of
from .few_step import FewStepDecoding
from .window import decided_end, start_distribution


# Where the flow stops, of 1: nearer to its end a step would have to be ever smaller, and most noise has come to one
# token.
END = 0.9
# Of the Runge-Kutta method of fourth order. Two are too few for the tests of exactness.
STEPS = 12


def flow(
    probabilities: torch.FloatTensor, noise: torch.FloatTensor, codebook: torch.FloatTensor, steps: int = STEPS
) -> torch.FloatTensor:
    """Probabilities [..., V] of the tokens, given the `noise` [..., D]: those of standard normal noise have the mean
    `probabilities` [..., V].

    A token of the vector c is reached along the line from its noise to c, which is at (1 - t) noise + t c at the time
    t. The flow that moves all points as these lines do on average keeps their distribution at every t (flow matching,
    https://arxiv.org/abs/2210.02747). It carries the noise to a point at t = `END`, which almost determines the token.

    Args:
        codebook: the vectors of the tokens [V, D], of about unit length.
        steps: integration steps, >= 1.
    """
    logarithms, half_squares = probabilities.log(), codebook.square().sum(-1) / 2

    def tokens_at(x: torch.FloatTensor, t: float) -> torch.FloatTensor:
        scale = t / (1 - t) ** 2
        scores = torch.addmm(half_squares, x, codebook.T, beta=-t * scale, alpha=scale)
        return (logarithms + scores.unflatten(0, noise.shape[:-1])).softmax(-1)

    def velocity(x: torch.FloatTensor, t: float) -> torch.FloatTensor:
        return torch.addmm(x, tokens_at(x, t).flatten(0, -2), codebook, beta=-1) / (1 - t)

    x, times = noise.flatten(0, -2), [1 - (1 - END) ** (step / steps) for step in range(steps + 1)]
    for start, end in itertools.pairwise(times):
        size, middle = end - start, (start + end) / 2
        first = velocity(x, start)
        second = velocity(x + size / 2 * first, middle)
        third = velocity(x + size / 2 * second, middle)
        fourth = velocity(x + size * third, end)
        x = x + size / 6 * (first + 2 * second + 2 * third + fourth)
    return tokens_at(x, END)


def _teacher(model: TokenModel | VectorModel) -> TokenModel | None:
    """The model that verifies the guesses: itself, or of a student its teacher, if that generates token by token."""
    teacher = model.teacher if model.kind == "vectors" else model
    return teacher if teacher is not None and teacher.kind == "tokens" else None


@dataclass
class FlowState(CursorState):
    """Adds to `CursorState`: `noise` float32 [B, N, D], and the `window`. `model` is the teacher of a student."""

    model: TokenModel
    noise: torch.FloatTensor
    window: int
    student_passes: int

    @property
    def vectors(self) -> torch.Tensor:
        """The vectors [B, N, D] of `tokens`."""
        assert self.model.codebook is not None
        return self.model.codebook[self.tokens]

    @property
    def reach(self) -> tuple[torch.LongTensor, int]:
        return self.cursor.max() - 1, self.window


@dataclass(frozen=True)
class FlowDecoding(DecodingMethod):
    """Exact use of a student of Distilled Decoding (https://arxiv.org/abs/2412.17153): the student guesses all tokens,
    and its teacher verifies them.

    Each token is a function of its own noise and of the teacher's probabilities: where a flow from noise to codebook
    vectors leads, which is what the student was trained to foresee. A step evaluates `window` guesses after an image's
    cursor and decides the leading ones that are what their noise leads to, and the first that is not, corrected. So
    the image is that of the teacher alone, token by token from the same noise, whatever the student guesses; the
    guesses only save forward passes. Those behind are replaced by what their noise leads to after the guesses before
    them.

    Exact but for the integration of the flow: with 12 steps, the probabilities given the noise differ from those with
    48 by a total variation of 0.0001 where all 1,024 tokens of `emoji-llamagen` are equally likely, and of 0.000002
    with its own probabilities at temperature 1 (means over 150 noise vectors).

    It runs on a teacher alone too, whose first guesses are random then. The forward passes of the student are counted
    as `student_passes`, not as `forward_passes`.

    Attributes:
        window: guesses per step, >= 1.
        starts: from where each forward pass of the student generates, see `FewStepDecoding`.

    Raises:
        ValueError: if a setting is not among these.
    """

    window: int = 32
    starts: tuple[int, ...] = (0,)

    exact = True
    needs = {"tokens": ("single tokens", "codebook"), "vectors": ("token teacher",)}

    def __post_init__(self):
        check_settings(self, {"window": 1})
        object.__setattr__(self, "starts", self._student.starts)

    @property
    def _student(self) -> FewStepDecoding:
        return FewStepDecoding(self.starts)

    def misfit(self, model: TokenModel | VectorModel) -> str | None:
        if model.kind == "tokens":
            return None
        teacher = _teacher(model)
        assert teacher is not None
        return missing(self.needs, traits_of(teacher)) or self._student.supports(model)

    def start(self, model: TokenModel | VectorModel, sampling: Sampling, seeds: torch.LongTensor) -> FlowState:
        guesses, noise, passes = self._guess(model, sampling, seeds)
        if sampling.forced is not None:
            guesses = torch.where(sampling.forced < 0, guesses, sampling.forced)
        teacher = _teacher(model)
        assert teacher is not None
        cache, logits = teacher.prefill(len(seeds))
        state = FlowState.open(
            teacher,
            sampling,
            seeds,
            cache,
            spare=self.window,
            cursor=torch.zeros_like(seeds),
            noise=noise,
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
        """Guesses of all tokens [B, N], their noise [B, N, D], and the student's forward passes."""
        if model.kind == "vectors":
            student = self._student.start(model, sampling, seeds)
            while student.taken < len(student.passes):
                self._student.step(student)
            return student.tokens, student.noise, student.taken
        assert model.codebook is not None
        ranks = torch.arange(model.num_tokens, device=model.device).expand(len(seeds), -1)
        _, sums = start_distribution(model, sampling, len(seeds))
        guesses = torch.searchsorted(sums, uniforms(seeds, ranks, Purpose.START, None, 1)[..., 0], right=True)
        return guesses, normals(seeds, ranks, Purpose.NOISE, None, model.codebook.shape[1]), 0

    def step(self, state: FlowState) -> None:
        offsets = torch.arange(state.window, device=state.seeds.device)
        positions = state.cursor[:, None] + offsets
        live, before = positions < state.model.num_tokens, positions - 1
        guesses = state.token_buffer.gather(1, positions)
        logits = state.model.forward(state.token_buffer.gather(1, before), torch.where(live, before, -1), state.cache)
        tokens = self._tokens(state, state.probabilities(logits, positions, live), positions)
        end = decided_end(state, positions, tokens == guesses, positions[:, -1:])
        state.token_buffer.scatter_(1, positions, tokens)
        state.advance(end)

    def _tokens(
        self, state: FlowState, probabilities: torch.FloatTensor, positions: torch.LongTensor
    ) -> torch.LongTensor:
        """The tokens [B, Q] of `positions` [B, Q] that their noise leads to, by their `probabilities` [B, Q, V]."""
        assert state.model.codebook is not None
        codebook = state.model.codebook.float()
        codebook = codebook / codebook.square().sum(-1).mean().sqrt()
        images = torch.arange(len(positions), device=positions.device)[:, None]
        noise = state.noise[images, positions.clamp(max=state.model.num_tokens - 1)]
        weights = flow(probabilities, noise, codebook)
        return sample(weights, uniforms(state.seeds, positions, Purpose.SAMPLE, None, 1)[..., 0])
