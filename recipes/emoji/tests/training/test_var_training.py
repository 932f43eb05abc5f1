"""VAR transformers learn codes under captions, go on after an interruption, and leave a model that generates."""

import copy
import itertools
import json
import math

import pytest
import tiny
import torch
from pipelines.var import tiny as tiny_var
from safetensors.torch import load_file

from arimage import AutoPipeline, NextScaleDecoding
from arimage.training.loop import OptimizerSettings, fit
from arimage_emoji.training import captions as captions_module
from arimage_emoji.training import recipe as recipe_module
from arimage_emoji.training.captioned import ImageCaptions
from arimage_emoji.training.recipe import run_transformer
from arimage_emoji.training.transformers import var as training
from arimage_emoji.training.transformers.var import VARTransformerSettings, VARTransformerTask


SIZES = [side * side for side in tiny.SCALES]
OPTIMIZER = {"steps": 16, "learning_rate": 1e-2, "warmup_steps": 4, "ema_decay": 0.8}
RECIPE = {
    "image_size": tiny.SCALES[-1] * tiny.SCALE_FACTOR,
    "tokenizer": {
        "class": "VARVQModel",
        "model": {
            "channels": 8, "channel_multipliers": [1, 2], "layers_per_block": 1, "codebook_size": tiny.CODES,
            "codebook_dim": 4, "scales": list(tiny.SCALES), "norm_num_groups": 4,
        },
        "optimizer": dict(OPTIMIZER),
        "training": {"codebook_start": 4},
    },
    "transformer": {
        "model": {"hidden_size": 32, "num_layers": 1, "num_attention_heads": 2, "dropout": 0.1},
        "optimizer": OPTIMIZER,
        "training": {
            "batch_size": 4, "scale_shares": [0, 0.5, 0, 0.5], "caption_length": 8, "text_vocab_size": 300,
            "sample_prompts": ["a red heart", "a green tree"],
        },
    },
    "refiner": {
        "model": {"hidden_size": 16, "num_layers": 1, "num_attention_heads": 2, "shared_adaln": True},
        "optimizer": OPTIMIZER | {"steps": 8},
        "training": {"scale_shares": [0, 0, 0, 1]},
    },
    "text_encoder": {"d_model": 16, "d_kv": 8, "num_heads": 2, "d_ff": 32, "num_layers": 1, "dropout_rate": 0.1},
    "generation": {"sampling": {"guidance_scale": 2.0, "top_k": 10}, "decoding": {"name": "next-scale"}},
}  # fmt: skip


def pictures(count=4):
    """Captioned pictures of one colour each, so that their codes follow from the captions."""
    colours = torch.randint(256, (count, 3, 1, 1), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    side = tiny.SCALES[-1] * tiny.SCALE_FACTOR
    names = [f"a {colour} {shape}" for colour, shape in itertools.product(("red", "green"), ("heart", "tree"))]
    return ImageCaptions(
        images=colours.expand(-1, -1, side, side).clone(),
        alpha=torch.full((count, 1, side, side), 255, dtype=torch.uint8),
        captions=[[names[i % 4], f"{names[i % 4]}, flat style"] for i in range(count)],
        names=["name"] * count,
        bases=["base"] * count,
        weights=torch.ones(count),
    )


def avoid_files(monkeypatch):
    """The data need no file."""
    monkeypatch.setattr(recipe_module, "load_both", lambda recipe, part, *paths: (pictures(), pictures()))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    avoid_files(monkeypatch)


def run(out):
    tiny.scale_tokenizer().save_pretrained(out / "tokenizer" / "tokenizer")
    return run_transformer(RECIPE, "train", "heldout", out, "cpu")


def log_of(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("run")
    losses, loss = [], VARTransformerTask.loss
    with pytest.MonkeyPatch.context() as monkeypatch:
        avoid_files(monkeypatch)
        monkeypatch.setattr(
            VARTransformerTask, "loss", lambda self, step: losses.append(loss(self, step)) or losses[-1]
        )
        pipe = run(out)
    return out, pipe, [float(total.detach()) for total, _ in losses]


def test_the_losses_fall(trained):
    *_, losses = trained
    large, small = losses[:16], losses[16:]
    assert len(small) == 8
    # A head of zeros gives every code the same probability.
    assert large[0] == pytest.approx(math.log(tiny.CODES), abs=1e-3)
    assert sum(large[-4:]) < 0.95 * sum(large[:4])
    assert sum(small[-3:]) < 0.98 * sum(small[:3])


def test_a_run_leaves_its_records_and_a_model_that_generates(trained):
    out, *_ = trained
    for part in ("transformer", "refiner"):
        assert all(math.isfinite(log_of(out / part)[-1][f"held-out loss of scale {k}"]) for k in range(len(SIZES)))
        assert (out / part / "samples.png").is_file()
    assert {t.dtype for file in (out / "model").rglob("*.safetensors") for t in load_file(file).values()} == {
        torch.float16
    }
    assert not any(str(out) in file.read_text() for file in (out / "model").rglob("*.json"))
    pipe = AutoPipeline.from_pretrained(out / "model")
    assert pipe.decoding == NextScaleDecoding()
    assert pipe.generation_config == {"guidance_scale": 2.0, "temperature": 1.0, "top_k": 10, "top_p": 1.0}
    pipe.set_progress_bar_config(disable=True)
    for decoding in ("next-scale", "code"):
        output = pipe(["a red heart", "a tree"], decoding=decoding, generator=torch.Generator().manual_seed(0))
        assert len(output.images) == 2 and output.stats.forward_passes == len(SIZES)


@pytest.mark.every(2)
@pytest.mark.parametrize("part", ["transformer", "refiner"])
def test_an_interrupted_run_ends_as_if_it_had_never_been(trained, tmp_path, monkeypatch, part):
    loss, whole = VARTransformerTask.loss, trained[0]

    def interrupted(self, step):
        its_part = "transformer" if any(p.requires_grad for p in self.text_encoder.parameters()) else "refiner"
        if (its_part, step) == (part, 3):
            raise KeyboardInterrupt
        return loss(self, step)

    with monkeypatch.context() as broken:
        broken.setattr(VARTransformerTask, "loss", interrupted)
        # Every step of the part leaves a checkpoint.
        seconds = {part: -1.0}
        broken.setattr(
            captions_module,
            "fit",
            lambda task, settings, out, **more: fit(
                task, settings, out, report_every_seconds=seconds.get(out.name, 300.0), **more
            ),
        )
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path)
    assert torch.load(tmp_path / part / "checkpoint.pt", weights_only=True)["step"] == 3
    # The interrupted run has already left a model that loads.
    assert (AutoPipeline.from_pretrained(tmp_path / "model").refiner is None) == (part == "transformer")
    run(tmp_path)
    files = [file.relative_to(whole) for file in (whole / "model").rglob("*.safetensors")]
    assert len(files) == 4
    for file in files:
        ours, theirs = load_file(tmp_path / file), load_file(whole / file)
        assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == [], file


def task_of(pipe=None, teacher=None, **settings):
    pipe = pipe or tiny_var.pipeline("text")
    settings = VARTransformerSettings(OptimizerSettings(steps=4, learning_rate=1e-3), batch_size=4, **settings)
    return VARTransformerTask(pipe, pictures(), pictures(), settings, teacher)


def test_short_steps_see_more_beginnings(monkeypatch):
    task, seen = task_of(scale_shares=(0, 0.5, 0, 0.5)), set()
    losses = VARTransformerTask.losses

    def recorded(self, captions, codes, *more):
        seen.add((len(captions), len(codes)))
        return losses(self, captions, codes, *more)

    monkeypatch.setattr(VARTransformerTask, "losses", recorded)
    for step in range(12):
        task.loss(step)
    assert seen == {(4 * (tiny.TEXT_LENGTH + sum(SIZES)) // (tiny.TEXT_LENGTH + 5), 2), (4, 4)}


@pytest.mark.every(2)
@pytest.mark.parametrize("power", [0.0, 1.0])
@pytest.mark.parametrize("first", [0, 2])
def test_the_scales_are_weighed_from_the_first_on(power, first):
    total, figures = task_of(token_power=power, first_scale=first).loss(0)
    weights = torch.tensor(SIZES[first:]).float() ** power
    expected = (torch.stack([*figures.values()][first:]) * weights).sum() / weights.sum()
    assert total.detach() == pytest.approx(float(expected), rel=1e-5)


def test_noise_is_in_the_inputs_and_not_in_the_targets(monkeypatch):
    task, calls = task_of(code_noise=0.5, caption_dropout=0.0), []
    monkeypatch.setattr(task, "losses", lambda *arguments: calls.append(arguments) or [torch.zeros(())] * 4)
    task.loss(0)
    captions, codes, _, noisy = calls[0]
    original = dict(zip([variants[0] for variants in task.captions], zip(*task.codes, strict=True), strict=True))
    for i, caption in enumerate(captions):
        maps = original[caption.removesuffix(", flat style")]
        assert all(torch.equal(one[i], its) for one, its in zip(codes, maps, strict=True))
    same = torch.cat([(one == its).flatten() for one, its in zip(codes, noisy, strict=True)]).float().mean()
    assert 0.3 < same < 0.75


def test_who_equals_its_teacher_learns_nothing_from_it():
    pipe = tiny_var.pipeline("text")
    alone, taught = (float(task_of(pipe, teacher).loss(0)[0].detach()) for teacher in (None, pipe.transformer))
    other, half = (float(task_of(pipe, pipe.refiner, law_weight=weight).loss(0)[0].detach()) for weight in (1.0, 0.5))
    assert taught == pytest.approx(alone, rel=1e-5)
    task = task_of(pipe, pipe.refiner).eval()
    assert float(task.loss(0)[0].detach()) == pytest.approx(alone, rel=1e-5)
    assert other > alone + 0.1 and half == pytest.approx((alone + other) / 2, rel=1e-5)


def test_a_refiner_leaves_transformer_and_text_as_they_were(tmp_path, monkeypatch):
    compiled = []
    monkeypatch.setattr(training.VARTransformer, "compile_repeated_blocks", lambda self: compiled.append(self))
    pipe = tiny_var.pipeline("text", refiner=False)
    before = {name: copy.deepcopy(getattr(pipe, name).state_dict()) for name in ("transformer", "text_encoder", "vq")}
    settings = VARTransformerSettings(OptimizerSettings(steps=3, learning_rate=1e-2), caption_length=tiny.TEXT_LENGTH)
    model = {"hidden_size": 16, "num_layers": 1, "num_attention_heads": 2}
    trained = training.train_refiner(pipe, model, pictures(), pictures(), settings, tmp_path, compile=True)
    assert compiled == [pipe.refiner]
    assert trained is pipe and pipe.refiner.config.hidden_size == 16
    for name, state in before.items():
        for key, value in getattr(pipe, name).state_dict().items():
            assert torch.equal(value, state[key]), f"{name} {key}"
