"""A student learns what its teacher makes of noise, whose pairs outlast an interruption."""

import pytest
import torch
from pipelines.llamagen import tiny as tiny_llamagen

from arimage import LlamaGenDDTransformer
from arimage.decoding import FlowDecoding
from arimage.settings.schema import check
from arimage.training.acceleration import student as student_module
from arimage.training.recipe import PartRecipe


pytest.importorskip("datasets", reason="the extra `train` is not installed")
from training.tokens.test_cache import encode, parquet  # noqa: E402

from arimage.training.acceleration.parts import Sets, run_part  # noqa: E402
from arimage.training.acceleration.student import StudentTask, begin_student  # noqa: E402
from arimage.training.tokens.cache import TokenCache  # noqa: E402
from arimage.training.tokens.heldout import hold_out  # noqa: E402


OPTIMIZER = {"steps": 24, "learning_rate": 1e-2, "warmup_steps": 4, "ema_decay": 0.8}
TRAINING = {"batch_size": 8, "noises_per_prompt": 3, "pair_batch_size": 5, "starts": [0, 6]}


def recipe(**training):
    return check(PartRecipe, {"part": "student", "optimizer": OPTIMIZER, "training": TRAINING | training}, "mine.toml")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """Tokens of twelve pictures, each a red heart or a green tree."""
    root = tmp_path_factory.mktemp("tokens")
    parquet(root / "a.parquet", range(12), caption=["a red heart", "a green tree"] * 6)
    encode(tiny_llamagen.text_pipeline(), root / "a.parquet", root / "tokens")
    return root / "tokens"


def task_of(tokens, out, **training):
    trained, held = hold_out(TokenCache(tokens))
    return begin_student(recipe(**training), tiny_llamagen.text_pipeline(), Sets(trained, held), out)


@pytest.fixture(scope="module")
def trained(tokens, tmp_path_factory):
    """The figures of all steps, and the folder of the run."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        figures, loss = [], StudentTask.loss

        def recorded(self, step):
            value, found = loss(self, step)
            figures.append({name: float(one) for name, one in found.items()})
            return value, found

        monkeypatch.setattr(StudentTask, "loss", recorded)
        out = tmp_path_factory.mktemp("run")
        run_part(begin_student, recipe(), tiny_llamagen.text_pipeline(), tokens, None, out)
    return figures, out


def test_the_losses_fall(trained):
    figures, out = trained
    for name in ("code loss", "vector loss"):
        first, last = (sum(row[name] for row in rows) for rows in (figures[:6], figures[-6:]))
        assert last < 0.95 * first, name
    assert (out / "student" / "samples.png").is_file()


def test_the_pairs_are_what_the_teacher_makes_of_the_noise(tokens, trained):
    task = task_of(tokens, trained[1])
    assert sorted(task.prompts) == ["a green tree", "a red heart"]
    assert len(task.tokens) == 2 * 3 + 2 and len(set(task.seeds.tolist())) == 8
    for i, seed in enumerate(task.seeds[:3]):
        call = task.result.prepare(task.prompts[i % 2])
        state = FlowDecoding().start(call.model.teacher, call.sampling, seed[None])
        while not state.finished.all():
            FlowDecoding().step(state)
        assert torch.equal(state.tokens[0], task.tokens[i])


def test_noise_that_is_called_held_out_is_not_trained(tokens, trained, tmp_path):
    task = task_of(tokens, trained[1])
    taken, predict = set(), task.losses
    task.losses = lambda pairs, start: (taken.update(task.seeds[pairs].tolist()), predict(pairs, start))[1]
    for step in range(20):
        task.loss(step)
    seen = set(taken)
    taken.clear()
    assert all(name.startswith("held-out") for name in task.report(0, tmp_path))
    assert seen and taken and not seen & taken


def test_embeddings_of_places_and_condition_reach_every_token():
    pipe, prompts = tiny_llamagen.text_pipeline(), ["a red heart", "tree"]
    teacher, codebook = pipe.transformer, pipe.vq.code_vectors()
    plain, placed = (LlamaGenDDTransformer.for_teacher(teacher, codebook, flag).eval() for flag in (False, True))
    # Of a new student the head of the vectors is random, and least squares may round by where they lie in memory.
    placed.vector_head.load_state_dict(plain.vector_head.state_dict())
    placed.input_projection.load_state_dict(plain.input_projection.state_dict())
    condition = pipe.prepare(prompts, guidance_scale=1.0).model.condition
    noise = torch.randn(2, 16, codebook.shape[1], generator=torch.Generator().manual_seed(0))
    first, second = plain(noise, start=6, **condition)[0], placed(noise, start=6, **condition)[0]
    # It begins as a student without them.
    assert torch.equal(first, second)
    placed(noise, start=6, **condition)[0].square().mean().backward()
    gradients = placed.place_embedding.weight.grad, placed.condition_projection.weight.grad
    assert all(gradient.abs().sum(-1).min() > 0 for gradient in gradients)


def test_pairs_that_were_generated_before_an_interruption_are_kept(tokens, trained, tmp_path, monkeypatch):
    generate, batches = student_module.LlamaGenPipeline.__call__, []

    def interrupted(self, **arguments):
        batches.append(arguments["prompt"])
        if len(batches) == 2:
            raise KeyboardInterrupt
        return generate(self, **arguments)

    monkeypatch.setattr(student_module.LlamaGenPipeline, "__call__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        task_of(tokens, tmp_path)
    first = tmp_path / "pairs" / "00000.safetensors"
    assert [*first.parent.iterdir()] == [first]
    found = task_of(tokens, tmp_path).tokens
    # Of the eight pairs two batches, of which the first was there already.
    assert len(batches) == 3
    assert torch.equal(found, task_of(tokens, trained[1]).tokens)


def test_processes_that_train_together_share_the_pairs(tokens, trained, tmp_path, monkeypatch):
    there = []
    monkeypatch.setattr(student_module, "processes", lambda: (1, 2))
    monkeypatch.setattr(student_module, "wait_for_all", lambda: there.extend((tmp_path / "pairs").iterdir()))
    task = task_of(tokens, tmp_path)
    assert [file.name for file in there] == ["00001.safetensors"]
    monkeypatch.undo()
    whole = task_of(tokens, trained[1])
    assert torch.equal(task.tokens, whole.tokens) and torch.equal(task.seeds, whole.seeds)


def test_what_does_not_fit_is_refused(tokens, trained, tmp_path):
    with pytest.raises(ValueError, match="--out"):
        task_of(tokens, trained[1], seed=1)
    (tmp_path / "pairs").mkdir()
    (tmp_path / "pairs" / "00000.safetensors").write_bytes(b"cut short")
    with pytest.raises(ValueError, match=r"00000.safetensors is damaged \(.*\): delete it"):
        task_of(tokens, tmp_path)
    with pytest.raises(ValueError, match="starts"):
        task_of(tokens, tmp_path, starts=[0, 16])
