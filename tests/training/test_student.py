"""A student learns what its teacher makes of noise, goes on after an interruption, and is saved with its teacher."""

import sys

import pytest
import torch
from pipelines.llamagen import tiny as tiny_llamagen
from pipelines.var import tiny as tiny_var

from arimage import AutoPipeline, LlamaGenDDPipeline, LlamaGenDDTransformer
from arimage.cli import main as cli
from arimage.training import commands
from arimage.training.acceleration import distill as distill_module
from arimage.training.acceleration.distill import DistillSettings, train_distill
from arimage.training.loop import OptimizerSettings


PROMPTS = ["a red heart", "a green tree"]
SETTINGS = DistillSettings(
    OptimizerSettings(steps=24, learning_rate=1e-2, warmup_steps=4, ema_decay=0.8),
    batch_size=8,
    noises_per_prompt=3,
    pair_batch_size=5,
    starts=(0, 6),
)


def train(out, prompts=PROMPTS, settings=SETTINGS):
    return train_distill(tiny_llamagen.text_pipeline(), prompts, settings, out)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        figures, loss = [], distill_module.DistillTask.loss

        def recorded(self, step):
            value, found = loss(self, step)
            figures.append({name: float(one) for name, one in found.items()})
            return value, found

        monkeypatch.setattr(distill_module.DistillTask, "loss", recorded)
        out = tmp_path_factory.mktemp("run")
        return train(out), figures, out


def test_the_losses_fall(trained):
    _, figures, out = trained
    for name in ("code loss", "vector loss"):
        first, last = (sum(row[name] for row in rows) for rows in (figures[:6], figures[-6:]))
        assert last < 0.95 * first, name
    assert (out / "samples.png").is_file()


def test_the_pairs_are_what_the_teacher_makes_of_the_noise(trained):
    pipe, _, out = trained
    task = distill_module.DistillTask(pipe.transformer, tiny_llamagen.text_pipeline(), PROMPTS, SETTINGS, out)
    assert len(task.tokens) == 2 * 3 + 2 and len(set(task.seeds.tolist())) == 8
    for i, seed in enumerate(task.seeds[:3]):
        call = pipe.prepare(PROMPTS[i % 2])
        state = distill_module.FlowDecoding().start(call.model.teacher, call.sampling, seed[None])
        while not state.finished.all():
            distill_module.FlowDecoding().step(state)
        assert torch.equal(state.tokens[0], task.tokens[i])


def test_noise_that_is_called_held_out_is_not_trained(trained):
    pipe, _, out = trained
    task = distill_module.DistillTask(pipe.transformer, tiny_llamagen.text_pipeline(), PROMPTS, SETTINGS, out)
    taken, predict = set(), task.losses
    task.losses = lambda pairs, start: (taken.update(task.seeds[pairs].tolist()), predict(pairs, start))[1]
    for step in range(20):
        task.loss(step)
    seen = set(taken)
    taken.clear()
    with torch.no_grad():
        assert all(name.startswith("held-out") for name in task.report(0, out))
    assert seen and taken and not seen & taken


def test_only_the_student_is_trained(trained):
    pipe, before = trained[0], tiny_llamagen.text_pipeline()
    parts = {"teacher": before.transformer, "vq": before.vq, "text_encoder": before.text_encoder}
    for name, module in parts.items():
        for key, value in module.state_dict().items():
            assert torch.equal(getattr(pipe, name).state_dict()[key], value), f"{name} {key}"


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


@pytest.mark.slow
@pytest.mark.parametrize("at", [pytest.param(0, marks=pytest.mark.slow), 17])
def test_an_interrupted_run_ends_as_if_it_had_never_been(trained, tmp_path, monkeypatch, at):
    loss = distill_module.DistillTask.loss

    def interrupted(self, step):
        if step == at:
            raise KeyboardInterrupt
        return loss(self, step)

    monkeypatch.setattr(distill_module.DistillTask, "loss", interrupted)
    # Every step leaves a checkpoint.
    fit = distill_module.fit
    monkeypatch.setattr(distill_module, "fit", lambda *args, **more: fit(*args, report_every_seconds=0, **more))
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path)
    monkeypatch.setattr(distill_module.DistillTask, "loss", loss)
    again = train(tmp_path).transformer.state_dict()
    for name, value in trained[0].transformer.state_dict().items():
        assert torch.equal(again[name], value), name


def test_pairs_that_were_generated_before_an_interruption_are_kept(trained, tmp_path, monkeypatch):
    generate, batches = distill_module.LlamaGenPipeline.__call__, []

    def interrupted(self, **arguments):
        batches.append(arguments["prompt"])
        if len(batches) == 2:
            raise KeyboardInterrupt
        return generate(self, **arguments)

    monkeypatch.setattr(distill_module.LlamaGenPipeline, "__call__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path)
    first = tmp_path / "pairs" / "00000.safetensors"
    assert [*first.parent.iterdir()] == [first]
    tokens = distill_module.DistillTask(
        trained[0].transformer, tiny_llamagen.text_pipeline(), PROMPTS, SETTINGS, tmp_path
    ).tokens
    # Of the eight pairs two batches, of which the first was there already.
    assert len(batches) == 3
    whole = distill_module.DistillTask(
        trained[0].transformer, tiny_llamagen.text_pipeline(), PROMPTS, SETTINGS, trained[2]
    )
    assert torch.equal(tokens, whole.tokens)


def test_processes_that_train_together_share_the_pairs(trained, tmp_path, monkeypatch):
    there = []
    monkeypatch.setattr(distill_module, "processes", lambda: (1, 2))
    monkeypatch.setattr(distill_module, "wait_for_all", lambda: there.extend((tmp_path / "pairs").iterdir()))
    task = distill_module.DistillTask(
        trained[0].transformer, tiny_llamagen.text_pipeline(), PROMPTS, SETTINGS, tmp_path
    )
    assert [file.name for file in there] == ["00001.safetensors"]
    monkeypatch.undo()
    whole = distill_module.DistillTask(
        trained[0].transformer, tiny_llamagen.text_pipeline(), PROMPTS, SETTINGS, trained[2]
    )
    assert torch.equal(task.tokens, whole.tokens) and torch.equal(task.seeds, whole.seeds)


@pytest.mark.every(2)
@pytest.mark.parametrize("kind", ["text", "class"])
def test_the_command_saves_the_student_with_its_teacher(tmp_path, monkeypatch, kind):
    (tmp_path / "mine.toml").write_text(
        "image_size = 8\n[distill.optimizer]\nsteps = 2\nlearning_rate = 1e-3\n[distill.training]\n"
        "batch_size = 2\nnoises_per_prompt = 1\nstarts = [0, 6]\n" + "place_embeddings = true\n" * (kind == "text")
    )
    (tmp_path / "prompts.txt").write_text("a red heart\n\na tree\n")
    teacher = tiny_llamagen.text_pipeline() if kind == "text" else tiny_llamagen.class_pipeline()
    monkeypatch.setattr(commands, "load_pipeline", lambda *_: teacher)
    words = ["--recipe", tmp_path / "mine.toml", "--out", tmp_path / "run"]
    words += ["--prompts", tmp_path / "prompts.txt"] if kind == "text" else []
    monkeypatch.setattr(sys, "argv", ["arimage", "train", "distill", *map(str, words)])
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    pipe = AutoPipeline.from_pretrained(tmp_path / "run" / "model")
    pipe.set_progress_bar_config(disable=True)
    assert isinstance(pipe, LlamaGenDDPipeline) and pipe.decoding.starts == (0, 6)
    assert (pipe.transformer.place_embedding is not None) == (kind == "text")
    condition = {"prompt": "a tree"} if kind == "text" else {"class_labels": 3}
    # The name of the checkpoint's own decoding stands for its settings.
    assert pipe(**condition, decoding="few-step").stats.forward_passes == 2
    assert pipe(**condition, decoding="few-step:starts=0").stats.forward_passes == 1
    stats = pipe(**condition, decoding="flow").stats
    assert stats.exact and stats.student_passes == 1 and stats.forward_passes <= 16


def test_what_does_not_fit_is_refused(trained, tmp_path):
    with pytest.raises(ValueError, match="--out"):
        train(trained[2], ["another prompt"])
    (tmp_path / "pairs").mkdir()
    (tmp_path / "pairs" / "00000.safetensors").write_bytes(b"cut short")
    with pytest.raises(ValueError, match=r"00000.safetensors is damaged \(.*\): delete it"):
        train(tmp_path)
    with pytest.raises(ValueError, match="starts"):
        train(tmp_path, settings=DistillSettings(SETTINGS.optimizer, starts=(0, 16)))
    recipe = {"image_size": 8, "distill": {"optimizer": {"steps": 1, "learning_rate": 1e-3}, "training": {}}}
    with pytest.raises(ValueError, match="prompts"):
        distill_module.run_distill(recipe, tiny_llamagen.text_pipeline(), None, tmp_path)
    with pytest.raises(ValueError, match="LlamaGen"):
        distill_module.run_distill(recipe, tiny_var.pipeline("text"), None, tmp_path)
