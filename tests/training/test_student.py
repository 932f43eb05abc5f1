"""A student learns what its teacher makes of noise, whose pairs outlast an interruption."""

import pytest
import torch
from pipelines.llamagen import tiny as tiny_llamagen
from pipelines.var import tiny as tiny_var

from arimage import LlamaGenDDTransformer, VARDDTransformer
from arimage.decoding import FlowDecoding
from arimage.settings.schema import check
from arimage.training.acceleration import student as student_module
from arimage.training.recipe import PartRecipe


pytest.importorskip("datasets", reason="the extra `train` is not installed")
from training.tokens.test_cache import encode, parquet  # noqa: E402

from arimage.training.acceleration.parts import Sets, run_part  # noqa: E402
from arimage.training.acceleration.student import FlowMaps, StudentTask, begin_student  # noqa: E402
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


@pytest.fixture(scope="module")
def classes(tmp_path_factory):
    """Tokens of twelve pictures of three classes, of a VAR."""
    root = tmp_path_factory.mktemp("maps")
    parquet(root / "a.parquet", range(12), label=[number % 3 for number in range(12)])
    encode(tiny_var.pipeline("class"), root / "a.parquet", root / "tokens")
    return root / "tokens"


def test_a_student_of_a_var_learns_maps_that_their_noise_determines(classes, tmp_path):
    pipe, training = tiny_var.pipeline("class"), {"starts": None, "noises_per_prompt": 3}
    trained, held = hold_out(TokenCache(classes))
    task = begin_student(recipe(**training), pipe, Sets(trained, held), tmp_path)
    scales = pipe.vq.config.scales
    assert task.settings.starts == (0, len(scales) // 2)
    assert task.tokens.shape == (3 * 3 + 3, sum(side**2 for side in scales))
    # The same seeds give the same tokens in another batch, and other seeds others.
    call = pipe.prepare(class_labels=[int(task.prompts[task.index[1]])], num_images_per_prompt=1)
    state = FlowMaps().start(call.model, call.sampling, task.seeds[1:2])
    while not state.over:
        FlowMaps().step(state)
    assert torch.equal(state.tokens[0], task.tokens[1]) and not torch.equal(task.tokens[0], task.tokens[3])
    # Given the first maps, only the others are learned.
    first, last = task.losses(torch.arange(4), 0), task.losses(torch.arange(4), len(scales) - 1)
    assert first["code loss"] != last["code loss"]
    figures = run_part(begin_student, recipe(**training), pipe, classes, None, tmp_path)
    assert figures["held-out code loss after"] < figures["held-out code loss before"]
    assert not any(name.startswith("tokens per") for name in figures)


def test_the_maps_of_all_noise_follow_the_model():
    """A model of one map: how often noise leads to a token is the token's probability."""
    pipe = tiny_var.pipeline("class")
    call = pipe.prepare(class_labels=[3] * 4000, guidance_scale=1.0)
    model, sampling = call.model, call.sampling
    state = FlowMaps(stop_after=1).start(model, sampling, torch.arange(4000))
    _, logits = model.take(torch.tensor([0])).prefill(1)
    expected = logits[0, 0, 0].softmax(-1)
    found = torch.bincount(state.tokens[:, 0], minlength=len(expected)) / 4000
    assert (found - expected).abs().sum() / 2 < 0.05


@pytest.mark.parametrize("shared", [False, True])
def test_a_new_student_of_a_var_has_the_modulations_of_its_teacher(shared):
    teacher = tiny_var.transformer("class", shared_adaln=shared)
    student = VARDDTransformer.for_teacher(teacher)
    vector = teacher.class_embedding(torch.tensor([1, 2]))
    gates = [modulations[0] for modulations in teacher.modulations(vector)[:-1]]
    width, condition = teacher.config.hidden_size, torch.nn.functional.silu(vector)
    for block, gate in zip(student.blocks, gates, strict=True):
        torch.testing.assert_close(block.modulation(condition)[:, None, :width], gate)
    assert not any(block.known_projection.weight.any() for block in student.blocks)


def test_a_var_that_cannot_have_a_student_is_refused(classes, tmp_path):
    trained, held = hold_out(TokenCache(classes))
    for pipe, training, message in (
        (tiny_var.pipeline("text"), {"starts": [0]}, "--model is a VAR of texts"),
        (tiny_var.pipeline("class"), {"starts": [0, 6]}, "starts .* maps"),
        (tiny_var.pipeline("class"), {"starts": [0], "place_embeddings": True}, "place_embeddings"),
    ):
        with pytest.raises(ValueError, match=message):
            begin_student(recipe(**training), pipe, Sets(trained, held), tmp_path)
