"""Few-step decoding: a distilled student turns noise into all tokens in one or a few forward passes."""

from collections.abc import Hashable
from dataclasses import dataclass

import torch

from ..kernels.codebook import nearest_code
from ..kernels.coupling import sample_at
from .contract.distribution import Sampling
from .contract.models import VectorModel
from .contract.noise import Purpose, normals
from .contract.settings import check_settings, check_several
from .contract.state import LockstepState
from .contract.supports import DecodingMethod
from .next_scale import scale_sampling, stack_of_scales


# The network of a forward pass, the first level that it generates, and the level before which all levels are final
# after it.
Pass = tuple[str, int, int]


@dataclass
class FewStepState(LockstepState):
    """Adds to `LockstepState`: `noise` and `vectors`, both float32 [B, N, D]; the image is decoded from `vectors`, and
    `tokens` are the tokens nearest to them. `passes` describes each forward pass. `cache` is the teacher's."""

    structure = frozenset({"passes"})

    model: VectorModel
    noise: torch.FloatTensor
    vectors: torch.FloatTensor
    passes: tuple[Pass, ...]

    @property
    def num_steps(self) -> int:
        return len(self.passes)

    def stack_sampling(self) -> None:
        teacher = self.model.teacher
        if teacher is not None and teacher.kind == "scales":
            self.sampling = stack_of_scales(self.sampling, teacher, len(self.seeds))
        else:
            super().stack_sampling()

    @property
    def step_variant(self) -> Hashable:
        # The teacher allocates a cache.
        return self.taken if all(network == "student" for network, _, _ in self.passes) else None


@dataclass(frozen=True)
class FewStepDecoding(DecodingMethod):
    """Distilled Decoding (https://arxiv.org/abs/2412.17153): one forward pass per entry of `starts`.

    The noise determines the image: the student was trained to return in one pass what the teacher generates token by
    token from the same noise, through a flow from noise to codebook vectors. Each further pass keeps everything before
    its start and generates the rest again from its noise.

    Not exact, and without a bound: nothing verifies the student. For ImageNet at 256 pixels, the authors report an FID
    of 11.35 in one pass and 7.58 in two for LlamaGen-DD-L (its teacher: 4.11 in 256 passes), and 9.94 and 7.82 for
    VAR-DD-d16 (its teacher: 4.19 in 10).

    Levels are tokens in a raster model and maps in a next-scale model.

    Attributes:
        starts: the level from which each pass generates, in ascending order; the first is 0.
        codes_until: before this level the result is the vector of the most probable code, from it on a vector between
            codes. None takes the level that the checkpoint was tuned for.
        teacher_start: before the second pass of the student, the teacher generates the levels from this one to
            `starts[1]`, one forward pass each. A raster model takes one more to read the tokens before them. Only the
            teacher uses the sampling settings. At 0 the first pass of the student is left out.
    """

    starts: tuple[int, ...] = (0,)
    codes_until: int | None = None
    teacher_start: int | None = None

    exact = False
    needs = {"vectors": ()}

    def __post_init__(self):
        sentence = "give ascending whole numbers of which the first is 0"
        check_several(self, "starts", int, lambda first: first[:1] == (0,) and sorted({*first}) == [*first], sentence)
        check_settings(self, {"codes_until": 0, "teacher_start": 0})
        if self.teacher_start is not None and (len(self.starts) < 2 or self.teacher_start >= self.starts[1]):
            raise ValueError(
                f"teacher_start is {self.teacher_start}: give less than the second of starts, {self.starts!r}"
            )

    def misfit(self, model: VectorModel) -> str | None:
        levels = len(model.offsets) - 1
        if self.starts[-1] >= levels:
            return f"starts is {self.starts}: give less than its {levels} levels"
        if self.codes_until is None and model.codes_until is None:
            return f"codes_until is None, and the checkpoint names none: give 0 to {levels}"
        if (self.codes_until or 0) > levels:
            return f"codes_until is {self.codes_until}: give at most its {levels} levels"
        if self.teacher_start is not None and model.teacher is None:
            return "teacher_start needs a teacher: give the pipeline one, or None"
        return None

    def passes(self, model: VectorModel) -> tuple[Pass, ...]:
        """The forward passes for `model`, in order."""
        ends = [*self.starts[1:], len(model.offsets) - 1]
        student = tuple(("student", start, end) for start, end in zip(self.starts, ends, strict=True))
        if self.teacher_start is None:
            return student
        assert model.teacher is not None
        start, reads = self.teacher_start, model.teacher.kind == "tokens"
        before = (("student", 0, start), *([("read", start, start)] if reads else [])) if start else ()
        return (*before, *(("teacher", level, level + 1) for level in range(start, ends[0])), *student[1:])

    def start(self, model: VectorModel, sampling: Sampling, seeds: torch.LongTensor) -> FewStepState:
        noise = model.noise
        if noise is None:
            positions = torch.arange(model.num_tokens, device=model.device).expand(len(seeds), -1)
            noise = normals(seeds, positions, None, Purpose.NOISE, model.codebook.shape[1])
        passes = self.passes(model)
        state = FewStepState.open(model, sampling, seeds, None, noise=noise, vectors=noise.clone(), passes=passes)
        self.step(state)
        return state

    def step(self, state: FewStepState) -> None:
        if state.over:
            return
        network, level, end = state.passes[state.taken]
        if network == "student":
            self._generate(state, level)
        elif network == "read":
            assert state.model.teacher is not None
            state.cache, _ = state.model.teacher.prefill(len(state.seeds))
        else:
            self._teach(state, level)
        offsets = state.model.offsets
        before = offsets[state.passes[state.taken - 1][2]] if state.taken else 0
        state.record(torch.full_like(state.seeds, offsets[end] - before))
        state.taken += 1
        state.finished.fill_(state.over)

    def _generate(self, state: FewStepState, level: int) -> None:
        """Generate the vectors from `level` on with the student."""
        model = state.model
        start = model.offsets[level]
        vectors, logits = model.predict(torch.cat([state.vectors[:, :start], state.noise[:, start:]], dim=1), start)
        codes_until = model.codes_until if self.codes_until is None else self.codes_until
        assert codes_until is not None
        split = max(model.offsets[codes_until], start)
        codes, vectors = logits[:, start:split].argmax(-1), vectors[:, split:]
        state.invalid |= ~(logits[:, start:split].isfinite().all((1, 2)) & vectors.isfinite().all((1, 2)))
        state.vectors[:, start:split] = model.codebook[codes]
        state.vectors[:, split:] = vectors
        state.tokens[:, start:split] = codes
        nearest = nearest_code(vectors.flatten(0, 1), model.codebook)
        state.tokens[:, split:] = nearest.unflatten(0, vectors.shape[:2])

    def _teach(self, state: FewStepState, level: int) -> None:
        """Generate the tokens of `level`, given the tokens before it, with the teacher."""
        model, teacher, sampling = state.model, state.model.teacher, state.sampling
        assert teacher is not None
        batch, (start, end) = len(state.seeds), model.offsets[level : level + 2]
        if teacher.kind == "scales":
            latents = []
            for scale in range(level):
                added = teacher.vectors(scale, state.tokens[:, model.offsets[scale] : model.offsets[scale + 1]])
                latents.append(teacher.accumulate(scale, latents[-1] if latents else None, added))
            if state.cache is None:
                state.cache, logits = teacher.prefill(batch, latents)
            else:
                logits = teacher.forward(level, latents[-1], state.cache)
            sampling = scale_sampling(sampling, level, teacher)
        elif state.cache is None:
            state.cache, logits = teacher.prefill(batch)
            logits = logits[:, :, None]
        else:
            # All tokens so far the first time, then the last one.
            first = 0 if state.passes[state.taken - 1][0] == "read" else start - 1
            fed = torch.arange(first, start, device=model.device).expand(batch, -1)
            logits = teacher.forward(state.tokens[:, first:start], fed, state.cache)[:, :, -1:]
        positions = torch.arange(start, end, device=model.device).expand(batch, -1)
        probabilities = state.probabilities(logits, positions, sampling=sampling)
        state.tokens[:, start:end] = sample_at(probabilities, state.seeds, positions, None, Purpose.SAMPLE)
        state.vectors[:, :end] = model.codebook[state.tokens[:, :end]]
