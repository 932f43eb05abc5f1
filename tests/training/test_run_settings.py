"""A run is resumed with the settings, data and networks that it began with, or refused in one sentence."""

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import tiny
import torch
from pipelines.llamagen import tiny as tiny_llamagen
from training.images import Images

from arimage.training import loop, resuming
from arimage.training.adapters.generated import generate_prior
from arimage.training.adapters.lora import LoraSettings, LoraTask
from arimage.training.adapters.pairs import Pairs
from arimage.training.loop import OptimizerSettings, fit
from arimage.training.tokenizers.tokenizer import TokenizerSettings, train_tokenizer
from arimage.training.tokenizers.upscaler import UpscalerSettings, train_upscaler


OPTIMIZER = OptimizerSettings(steps=2, learning_rate=1e-3, warmup_steps=1)
WIDTHS = {"channels": 8, "channel_multipliers": [1, 2], "layers_per_block": 1, "norm_num_groups": 4}


def pictures(seed, size=8, count=4):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(256, (count, 3, size, size), generator=generator, dtype=torch.uint8)
    return Images(images, torch.full((count, 1, size, size), 255, dtype=torch.uint8))


@dataclass
class Asked:
    """What a command asks for: settings, and seeds of the data and of the networks."""

    out: Path
    settings: dict
    data: int = 0
    heldout: int = 1
    base: int = 0

    def of(self, kind, **common):
        optimizer = {name: self.settings[name] for name in ("learning_rate", "steps") if name in self.settings}
        others = {name: value for name, value in self.settings.items() if name not in optimizer}
        return kind(replace(OPTIMIZER, **optimizer), **{**common, **others})

    def sets(self, **shape):
        return pictures(self.data, **shape), pictures(self.heldout, **shape)

    @property
    def pipe(self):
        return tiny_llamagen.text_pipeline(seed=self.base)


def tokenizer(asked):
    model = {**WIDTHS, "codebook_size": 8, "codebook_dim": 4, "latent_channels": 8}
    settings = asked.of(TokenizerSettings, batch_size=2, codebook_start=1, kmeans_batches=2, max_shift=1)
    tiny.image_tokenizer(seed=asked.base).save_pretrained(asked.out / "vq")
    train_tokenizer(model, *asked.sets(), settings, asked.out / "run", start_from=asked.out / "vq")


def upscaler(asked):
    settings = asked.of(UpscalerSettings, batch_size=2, max_shift=1)
    model = {"channels": [8, 12], "num_blocks": 1}
    train_upscaler(asked.pipe, model, *asked.sets(size=16), settings, asked.out / "run")


def lora(asked):
    pytest.importorskip("peft", reason="the extra `lora` is not installed")
    settings = LoraSettings(**{"steps": 2, "rank": 2, "batch_size": 2, "learning_rate": 1e-3, **asked.settings})
    names = [f"a {colour} {shape}" for colour in ("red", "green") for shape in ("heart", "tree")]
    data, prior = (Pairs(pictures(seed).images, names) for seed in (asked.data, asked.heldout))
    LoraTask(asked.pipe, data, settings, base="tiny", prior=prior).fit(asked.out / "run")


TRAINERS = [tokenizer, upscaler, lora]
# What changes, and the names that the sentence has for it. Not every trainer has all of them.
CHANGES = {
    "learning_rate": ({"settings": {"learning_rate": 2e-3}}, "learning_rate = 0.001 and you ask for 0.002"),
    "batch_size": ({"settings": {"batch_size": 3}}, "batch_size = . and you ask for 3"),
    "data": ({"data": 2}, "(data.images|prompts) = '"),
    "heldout": ({"heldout": 2}, "(heldout|prior).images = '"),
    "base": ({"base": 1}, r"(model\.[a-z_]+|vq|start_from[a-z_.]*|text_encoder|network|teacher) = "),
}


@pytest.mark.every(6)
@pytest.mark.parametrize(
    "trainer",
    TRAINERS,
    ids=lambda trainer: trainer.__name__,
)
def test_every_training_resumes_only_as_it_began(trainer, tmp_path):
    trainer(Asked(tmp_path, {}))
    for change, message in CHANGES.values():
        with pytest.raises(ValueError, match=f"(settings.json|safetensors) says [a-z._]*{message}.*another --out"):
            trainer(Asked(tmp_path, **{"settings": {}, **change}))
    # What was refused has changed nothing.
    trainer(Asked(tmp_path, {"steps": 3}))
    assert 3 in {torch.load(path, weights_only=True)["step"] for path in tmp_path.glob("run/**/checkpoint.pt")}


class Line(torch.nn.Module):
    """A weight that becomes 0, and what it has seen."""

    def __init__(self, stop_at=None):
        super().__init__()
        self.weight, self.stop_at = torch.nn.Parameter(torch.ones(2, 2)), stop_at

    def loss(self, step):
        if step == self.stop_at:
            raise KeyboardInterrupt
        loss = self.weight.square().mean()
        return loss, {"loss": loss.detach()}

    def report(self, step, out):
        return {"weight": float(self.weight.detach().mean())}


LINE = OptimizerSettings(steps=8, learning_rate=0.1, warmup_steps=1, restarts=((2, 0.2), (6, 0.1)))


def half(out, **more):
    with pytest.raises(KeyboardInterrupt):
        fit(Line(stop_at=4), LINE, out, checkpoint_every_seconds=-1.0, **more)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"learning_rate": 0.2}, "optimizer.learning_rate = 0.1 and you ask for 0.2"),
        ({"muon": ("weight",)}, "optimizer.muon"),
        ({"restarts": ((6, 0.1),)}, "optimizer.restarts"),
        ({"steps": 3, "restarts": ((2, 0.2),)}, "has taken 4 steps, and steps is 3"),
    ],
)
def test_another_optimizer_is_refused(tmp_path, change, name):
    half(tmp_path)
    before = (tmp_path / "checkpoint.pt").read_bytes()
    with pytest.raises(ValueError, match=name):
        fit(Line(), replace(LINE, **change), tmp_path)
    assert (tmp_path / "checkpoint.pt").read_bytes() == before
    fit(Line(), LINE, tmp_path)


@pytest.mark.parametrize(
    "change", [{"steps": 12}, {"restarts": ((2, 0.2),)}, {"restarts": ((2, 0.2), (4, 0.1)), "steps": 9}]
)
def test_what_is_still_to_come_may_change(tmp_path, change):
    half(tmp_path)
    settings = replace(LINE, **change)
    fit(Line(), settings, tmp_path, report_every_seconds=5.0, checkpoint_every_seconds=7.0, log_every=3)
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] == settings.steps
    # From now on it is what the run was trained with.
    if "restarts" in change:
        with pytest.raises(ValueError, match="optimizer.restarts"):
            fit(Line(), replace(LINE, steps=20), tmp_path)


def test_stages_that_have_not_begun_may_change(tmp_path):
    half(tmp_path, about={"stages": [{"start": 2, "x": 1}, {"start": 4, "x": 2}]})
    with pytest.raises(ValueError, match="stages"):
        fit(Line(), LINE, tmp_path, about={"stages": [{"start": 2, "x": 3}]})
    fit(Line(), LINE, tmp_path, about={"stages": [{"start": 2, "x": 1}, {"start": 5, "x": 3}]})


def test_a_run_of_an_earlier_version_that_says_less_goes_on(tmp_path):
    half(tmp_path)
    fit(Line(), LINE, tmp_path, about={"arguments": {"heads": 2}})
    with pytest.raises(ValueError, match="arguments.heads = 2 and you ask for 3"):
        fit(Line(), LINE, tmp_path, about={"arguments": {"heads": 3}})


def test_a_run_that_has_not_taken_a_step_takes_new_settings(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fit(Line(stop_at=0), LINE, tmp_path)
    fit(Line(), replace(LINE, learning_rate=0.3), tmp_path)
    assert json.loads((tmp_path / "settings.json").read_text())["optimizer"]["learning_rate"] == 0.3


@pytest.mark.parametrize("content", [None, "", "[1]", "{", "[" * 100_000, '{"optimizer": {"restarts": [3]}}'])
def test_without_its_settings_a_run_is_refused(tmp_path, content):
    half(tmp_path)
    (tmp_path / "settings.json").unlink()
    if content is not None:
        (tmp_path / "settings.json").write_text(content)
    with pytest.raises(ValueError, match="settings.json") as error:
        fit(Line(), LINE, tmp_path)
    assert str(error.value).endswith("another --out") and "\n" not in str(error.value)


def test_the_number_of_processes_is_compared(tmp_path, monkeypatch):
    half(tmp_path)
    for module in (loop, resuming):
        monkeypatch.setattr(module, "processes", lambda: (0, 2))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="processes = 1 and you ask for 2"):
        fit(Line(), LINE, tmp_path)


def test_networks_are_told_apart_by_their_weights_and_not_by_their_dtype():
    network = tiny.image_tokenizer()
    found = resuming.digest(network)
    assert resuming.digest(tiny.image_tokenizer().bfloat16()) == found != resuming.digest(tiny.image_tokenizer(seed=1))


def test_scales_of_adapters_are_compared():
    peft = pytest.importorskip("peft", reason="the extra `lora` is not installed")
    pipe = tiny_llamagen.text_pipeline()
    plain = resuming.of_pipeline(pipe)
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["head"])
    peft.inject_adapter_in_model(config, pipe.transformer, "mine")
    pipe.transformer._hf_peft_config_loaded = True
    first = resuming.of_pipeline(pipe)
    pipe.set_adapters("mine", 0.5)
    second = resuming.of_pipeline(pipe)
    assert plain["adapters"] == {} and first["adapters"] == {"transformer.mine": 2.0}
    assert second["adapters"] == {"transformer.mine": 1.0} and second["model"] == first["model"] != plain["model"]


def test_the_last_checkpoint_says_that_the_report_is_there_too(tmp_path):
    """A run that is killed in its last report makes it when it resumes."""
    task = Line()
    task.report = lambda step, out: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        fit(task, LINE, tmp_path, checkpoint_every_seconds=-1.0)
    fit(Line(), LINE, tmp_path)
    assert "weight" in (tmp_path / "log.jsonl").read_text().splitlines()[-1]


def test_a_prior_that_was_trained_with_is_kept(tmp_path):
    file, words = tmp_path / "prior.safetensors", ["a red heart", "tree"]
    generate_prior(tiny_llamagen.text_pipeline(), words, file, seed=0)
    generate_prior(tiny_llamagen.text_pipeline(), words, file, seed=1)
    before = file.read_bytes()
    (tmp_path / "checkpoint.pt").touch()
    with pytest.raises(ValueError, match="prior.safetensors says seed = 1 and you ask for 0"):
        generate_prior(tiny_llamagen.text_pipeline(), words, file, seed=0)
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    "error", [RuntimeError("DefaultCPUAllocator: can't allocate memory"), torch.OutOfMemoryError("CUDA out of memory")]
)
def test_a_step_that_needs_too_much_memory_is_one_sentence(tmp_path, error):
    task = Line()
    task.loss = lambda step: (_ for _ in ()).throw(error)
    with pytest.raises(ValueError, match="batch_size"):
        fit(task, LINE, tmp_path)


# What another command does.
HOLD = """
import sys
from filelock import FileLock
with FileLock(sys.argv[1] + "/.lock"):
    print("held", flush=True)
    sys.stdin.readline()
"""


def test_two_processes_do_not_train_in_one_folder(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None and other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match="another command uses .*another --out"):
            fit(Line(), LINE, tmp_path)
        assert not (tmp_path / "checkpoint.pt").exists()
        other.stdin.write("\n")
        other.stdin.flush()
        assert other.wait() == 0
    fit(Line(), LINE, tmp_path)
