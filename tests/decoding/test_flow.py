"""A student guesses, its teacher verifies: the images are those of the teacher alone, whatever the student guesses."""

import copy
from dataclasses import replace

import pytest
import torch
from decoding.conftest import some_order
from decoding.test_exactness import SAMPLINGS, assert_follows, sample_images

from arimage.decoding import FlowDecoding, Sampling, decode
from arimage.decoding.contract.noise import normals
from arimage.decoding.flow import flow


# Of a teacher without a student.
ALONE = FlowDecoding(3, guesses="random")


class Student:
    """Guesses as `guesses` says for the images of a `TableModel`, its teacher.

    "random" guesses anything, "constant" the last token, "perfect" what the teacher generates from the same noise and
    "spoiled" the same but for the third token; "broken" returns NaN.
    """

    kind = "vectors"

    noise = None

    def __init__(self, teacher, guesses="random", decoding=None, sampling=None, seeds=None):
        self.teacher, self.guesses, self.calls = teacher, guesses, 0
        self.num_tokens, self.vocab_size = teacher.num_tokens, teacher.vocab_size
        self.offsets = range(teacher.num_tokens + 1)
        self.codes_until = teacher.num_tokens
        self.device, self.network, self.codebook = teacher.device, None, teacher.codebook
        if guesses in ("perfect", "spoiled"):
            self.known = decode(teacher, replace(decoding, guesses="random"), sampling, seeds).tokens
            if guesses == "spoiled":
                self.known[:, 2] = (self.known[:, 2] + 1) % self.vocab_size

    @property
    def forward_passes(self):
        return self.teacher.forward_passes

    def joint(self, sampling):
        return self.teacher.joint(sampling)

    def predict(self, vectors, start):
        self.calls += 1
        if self.guesses == "random":
            # Of all noise, that of later tokens too.
            generator = torch.Generator().manual_seed(self.calls)
            mixing = torch.randn(self.num_tokens, self.num_tokens, self.vocab_size, generator=generator)
            logits = torch.einsum("bm,mnv->bnv", vectors[..., 0], mixing)
        elif self.guesses == "constant":
            logits = torch.arange(self.vocab_size).float().expand(*vectors.shape[:2], -1)
        elif self.guesses == "broken":
            logits = vectors.new_full((*vectors.shape[:2], self.vocab_size), torch.nan)
        else:
            logits = torch.nn.functional.one_hot(self.known, self.vocab_size).float()
        return vectors, logits


# All, with many more images.
CASES = [("everything", 10_000)] + [
    pytest.param(name, 200_000, marks=pytest.mark.slow, id=f"{name}-many") for name in SAMPLINGS
]


@pytest.mark.parametrize(("sampling", "size"), CASES)
def test_images_follow_the_teacher_whatever_the_student_guesses(table_model, sampling, size):
    case, sampling = sampling, SAMPLINGS[sampling]
    teacher = table_model(branches=1 if sampling.guidance_scale == 1 else 2)
    tokens = sample_images(Student(teacher), FlowDecoding(3), sampling, size, case)
    assert_follows(tokens, teacher.joint(sampling), teacher.vocab_size)


def test_images_follow_a_teacher_of_any_order_with_known_tokens(table_model):
    size, forced = 10_000, [1, 0, -1, -1, -1, -1]
    teacher = table_model(grid=(2, 3), vocab_size=2, order=some_order("random", (2, 3), size))
    sampling = Sampling(top_p=0.95, forced=torch.tensor(forced).expand(size, -1))
    tokens = sample_images(Student(teacher), FlowDecoding(2), sampling, size)
    assert_follows(tokens, teacher.joint_given(Sampling(top_p=0.95), forced), teacher.vocab_size)


def too_few_steps(probabilities, noise, codebook):
    return flow(probabilities, noise, codebook, 1)


def noise_of_the_first_token(seeds, positions, steps, purpose, count):
    return normals(seeds, torch.zeros_like(positions), steps, purpose, count)


@pytest.mark.parametrize(
    ("name", "flaw"), [("flow", too_few_steps), ("normals", noise_of_the_first_token)], ids=["steps", "noise"]
)
def test_the_check_finds(name, flaw, table_model, monkeypatch):
    monkeypatch.setattr("arimage.decoding.flow." + name, flaw)
    teacher = table_model()
    tokens = sample_images(teacher, ALONE, Sampling(), 10_000)
    with pytest.raises(AssertionError, match="chi-square"):
        assert_follows(tokens, teacher.joint(Sampling()), teacher.vocab_size)


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("kind", "window"),
    [("random", 1), ("random", 8), ("constant", 3), ("perfect", 3), ("perfect", 8), ("spoiled", 3), ("broken", 8)],
)
def test_guesses_change_the_passes_and_nothing_else(table_model, kind, window):
    sampling, seeds = Sampling(guidance_scale=1.5, top_p=0.95), torch.arange(20)
    teacher, decoding = table_model(grid=(2, 4), vocab_size=3, branches=2), FlowDecoding(window)
    alone = decode(teacher, ALONE, sampling, seeds)
    student = Student(teacher, kind, decoding, sampling, seeds)
    state = decode(student, decoding, sampling, seeds)
    assert torch.equal(state.tokens, alone.tokens)
    assert torch.equal(state.vectors, teacher.codebook[state.tokens])
    assert student.calls == state.student_passes == 1 and alone.student_passes == 0
    if kind == "perfect":
        assert (state.steps == 1 + -(-7 // window)).all()
    elif kind == "spoiled" and window > 1:
        # The prefill, the step that corrects the third token, and the others.
        assert (state.steps >= 3).all()
        assert state.accepted_per_step()[1].tolist() == [2] * 20


def test_known_tokens_stay(table_model):
    teacher, seeds = table_model(grid=(2, 3)), torch.arange(50)
    forced = torch.tensor([-1, 2, -1, -1, 0, 1]).expand(50, -1)
    for model, decoding in ((teacher, ALONE), (Student(teacher), FlowDecoding(4))):
        tokens = decode(model, decoding, Sampling(forced=forced), seeds).tokens
        assert torch.equal(torch.where(forced < 0, -1, tokens), forced)


def test_the_flow_keeps_the_probabilities_and_the_noise_tells_the_token():
    generator = torch.Generator().manual_seed(0)
    codebook = torch.nn.functional.normalize(torch.randn(12, 4, generator=generator), dim=-1)
    probabilities = torch.rand(12, generator=generator).square()
    probabilities = probabilities / probabilities.sum()
    noise = torch.randn(10_000, 4, generator=generator)
    weights = flow(probabilities.expand(10_000, -1), noise, codebook)
    # Six standard errors of the mean, and the error of the integration.
    assert (weights.mean(0) - probabilities).abs().max() < 6 * 0.5 / 100 + 1e-3
    assert weights.max(-1).values.mean() > 0.95
    finer = flow(probabilities.expand(10_000, -1), noise, codebook, 48)
    assert (weights - finer).abs().sum(-1).mean() / 2 < 1e-3


def test_what_it_cannot_verify_is_refused(table_model):
    teacher, decoding = table_model(), FlowDecoding()
    student = Student(teacher)
    assert decoding.supports(student) is None and ALONE.supports(teacher) is None
    assert "set guesses to random" in decoding.supports(teacher) and "vectors" in ALONE.supports(student)
    student.teacher = None
    assert "teacher" in decoding.supports(student)
    blind = copy.copy(teacher)
    blind.codebook = None
    assert "codebook" in ALONE.supports(blind) and "codebook" in decoding.supports(Student(blind))
    assert "starts" in FlowDecoding(starts=(0, 9)).supports(Student(teacher))
