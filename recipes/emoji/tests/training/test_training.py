"""A recipe trains on a small data set, goes on after an interruption, and leaves a model that draws."""

import collections
import copy
import functools
import io
import itertools
import json
import math
import shutil
import signal
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from arimage import AutoPipeline, LlamaGenTransformer, LlamaGenVQModel, SpeculativeJacobiDecoding
from arimage.pipelines.kinds.class_or_text import last_state
from arimage.pipelines.text.known import KnownCaptions
from arimage.training.data.pictures import to_unit_range
from arimage.training.loop import MasterWeights, OptimizerSettings, fit, save_checkpoint
from arimage.training.tokenizers import tokenizer as tokenizer_module
from arimage.training.tokenizers.quantisers import MovingCodebook, kmeans
from arimage.training.tokenizers.tokenizer import TokenizerSettings, TokenizerTask, run_tokenizer
from arimage.training.tokens.text import train_text_tokenizer
from arimage_emoji import RECIPES
from arimage_emoji.training import captions as captions_module
from arimage_emoji.training.captioned import COLUMNS, load_captioned_images
from arimage_emoji.training.recipe import load_recipe, run_transformer
from arimage_emoji.training.text import TextSettings
from arimage_emoji.training.transformers.arpg import ARPGSettings
from arimage_emoji.training.transformers.cosmos import VideoSettings
from arimage_emoji.training.transformers.latent_llama import LatentLlamaSettings
from arimage_emoji.training.transformers.llamagen import TransformerSettings, TransformerTask
from arimage_emoji.training.transformers.var import VARTransformerSettings


SIZE = 16
COLOURS = {"red": (220, 30, 30), "green": (20, 180, 60), "blue": (30, 60, 230)}

RECIPE = {
    "image_size": SIZE,
    "tokenizer": {
        "data": {"styles": ["flat"]},
        "model": {
            "channels": 8,
            "channel_multipliers": [1, 2, 2],
            "layers_per_block": 1,
            "latent_channels": 16,
            "codebook_size": 16,
            "codebook_dim": 4,
            "norm_num_groups": 4,
        },
        "optimizer": {"steps": 24, "learning_rate": 5e-3, "weight_decay": 0.0, "warmup_steps": 4, "ema_decay": 0.9},
        "training": {"batch_size": 8, "codebook_start": 4, "kmeans_batches": 2, "restart_every": 5},
    },
    "transformer": {
        "data": {"styles": ["flat"], "skin_tones": False},
        "model": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_layers": 1,
            "num_attention_heads": 2,
            "dropout": 0.1,
        },
        "optimizer": {"steps": 30, "learning_rate": 1e-2, "warmup_steps": 4, "ema_decay": 0.9},
        "training": {
            "batch_size": 8,
            "caption_length": 8,
            "text_vocab_size": 300,
            "sample_prompts": ["a red square", "a blue disc"],
        },
    },
    "text_encoder": {"d_model": 16, "d_kv": 8, "num_heads": 2, "d_ff": 32, "num_layers": 1, "dropout_rate": 0.1},
    "generation": {
        "sampling": {"guidance_scale": 2.0, "top_k": 10},
        "decoding": {"name": "sjd-coupled", "window": 8},
    },
}


def encoded(array):
    file = io.BytesIO()
    Image.fromarray(array).save(file, "PNG")
    return {"bytes": file.getvalue(), "path": None}


def rows():
    """Squares and discs of three colours in two styles, twice the size of training; half of the squares are toned."""
    y, x = np.mgrid[: 2 * SIZE, : 2 * SIZE] - SIZE + 0.5
    shapes = {"square": (abs(x) < 9) & (abs(y) < 9), "disc": x**2 + y**2 < 90}
    for style, (shape, inside), (colour, rgb) in itertools.product(("flat", "line"), shapes.items(), COLOURS.items()):
        picture = np.full((2 * SIZE, 2 * SIZE, 3), 255, np.uint8)
        picture[inside] = rgb
        toned = shape == "square" and colour == "red"
        yield {
            "image": encoded(picture),
            "alpha": encoded(inside.astype(np.uint8) * 255),
            "caption": f"a {colour} {shape}",
            "captions": [f"{shape}, {colour}", f"{colour} {shape}, {style} style"],
            "style": style,
            "group": f"{shape}s",
            "name": f"{colour} {shape}",
            "base": f"{shape}-{colour}",
            "skin_tones": ["light"] if toned else [],
            "weight": 2.0 if shape == "disc" else 1.0,
        }


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "shapes.parquet"
    pq.write_table(pa.Table.from_pylist(list(rows())), path)
    return path


def record_losses(monkeypatch, task_class):
    """Loss by step of every step that is run."""
    losses = {}
    loss = task_class.loss

    def recorded(self, step):
        value, figures = loss(self, step)
        losses[step] = float(value.detach())
        return value, figures

    monkeypatch.setattr(task_class, "loss", recorded)
    return losses


def interrupt(monkeypatch, task_class, module, at):
    """Keep a checkpoint of every step, and press Ctrl-C in the step `at`."""
    loss = task_class.loss

    def interrupted(self, step):
        if step == at:
            raise KeyboardInterrupt
        return loss(self, step)

    monkeypatch.setattr(task_class, "loss", interrupted)
    monkeypatch.setattr(module, "fit", functools.partial(fit, report_every_seconds=-1.0))


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """A finished run: its folder, and the losses of tokenizer and transformer."""
    out = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as monkeypatch:
        tokenizer_losses = record_losses(monkeypatch, TokenizerTask)
        transformer_losses = record_losses(monkeypatch, TransformerTask)
        torch.manual_seed(1)
        run_tokenizer(RECIPE, data, data, out, "cpu")
        run_transformer(RECIPE, data, data, out, "cpu")
    return out, tokenizer_losses, transformer_losses


def weights_of(out):
    """Every weight that a run leaves, by its file and name."""
    return {
        (path.relative_to(out).as_posix(), name): value
        for path in sorted(out.rglob("*.safetensors"))
        for name, value in load_file(path).items()
    }


def assert_same_weights(ours, theirs):
    ours, theirs = weights_of(ours), weights_of(theirs)
    assert ours.keys() == theirs.keys() and len(ours) > 50
    differing = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert differing == []


# Data


def test_a_data_set_is_decoded_filtered_and_resized(data):
    images = load_captioned_images(data, SIZE, styles=["flat"], skin_tones=False)
    assert len(images) == 5 and "red square" not in images.names
    assert images.images.dtype == torch.uint8 and images.images.shape == (5, 3, SIZE, SIZE)
    assert images.alpha.dtype == torch.uint8 and images.alpha.shape == (5, 1, SIZE, SIZE)
    disc = images.names.index("blue disc")
    assert images.images[disc, :, SIZE // 2, SIZE // 2].tolist() == list(COLOURS["blue"])
    assert images.images[disc, :, 0, 0].tolist() == [255, 255, 255]
    assert images.alpha[disc, 0, SIZE // 2, SIZE // 2] == 255 and images.alpha[disc, 0, 0, 0] == 0
    assert images.captions[disc] == ["a blue disc", "disc, blue", "blue disc, flat style"]
    assert images.bases[disc] == "disc-blue" and images.weights[disc] == 2
    assert len(load_captioned_images(data, SIZE)) == 12


def test_images_are_drawn_in_proportion_to_their_weights(data):
    images = load_captioned_images(data, SIZE, styles=["flat"])
    drawn = images.draw(9000, torch.Generator().manual_seed(0))
    discs = torch.tensor(["disc" in name for name in images.names])[drawn].float().mean()
    assert abs(discs - 2 / 3) < 0.03
    assert torch.equal(drawn, images.draw(9000, torch.Generator().manual_seed(0)))


def test_pixels_span_the_unit_range():
    assert to_unit_range(torch.tensor([0, 255], dtype=torch.uint8)).tolist() == [-1, 1]


@pytest.mark.parametrize("column", COLUMNS)
def test_a_missing_column_is_refused_by_name(data, tmp_path, column):
    path = tmp_path / "poor.parquet"
    pq.write_table(pq.read_table(data).drop_columns([column]), path)
    with pytest.raises(ValueError, match=rf"poor.parquet lacks the columns \['{column}'\]"):
        load_captioned_images(path, SIZE)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"none.parquet is not a file"):
        load_captioned_images(tmp_path / "none.parquet", SIZE)


def test_a_group_is_selected(data):
    images = load_captioned_images(data, SIZE, groups=["discs"])
    assert sorted(images.bases) == sorted(2 * [f"disc-{colour}" for colour in COLOURS])


def test_a_selection_without_images_is_refused(data):
    with pytest.raises(ValueError, match=r"has no row left with styles=\['noto'\] and groups=None"):
        load_captioned_images(data, SIZE, styles=["noto"])


# The loop


class Line(torch.nn.Module):
    """Fit y = 2 x + 1; a buffer counts the steps."""

    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(1, 1)
        torch.nn.init.zeros_(self.line.weight)
        torch.nn.init.zeros_(self.line.bias)
        self.register_buffer("seen", torch.zeros(()))
        self.reported = []
        self.stop_at = None

    def loss(self, step):
        if step == self.stop_at:
            raise KeyboardInterrupt
        self.seen += 1
        x = torch.linspace(-1, 1, 8)[:, None] + torch.rand(1, generator=torch.Generator().manual_seed(step))
        loss = (self.line(x) - 2 * x - 1).pow(2).mean()
        return loss, {"loss": loss.detach()}

    def report(self, step, out):
        assert not self.training
        self.reported.append((step, self.line.weight.item()))
        return {"slope": self.line.weight.item()}


LINE = OptimizerSettings(steps=300, learning_rate=0.1, weight_decay=0.0, warmup_steps=10, ema_decay=0.9)


def test_the_loop_reaches_the_minimum_and_logs_its_way(tmp_path):
    task = Line()
    fit(task, LINE, tmp_path)
    assert task.line.weight.item() == pytest.approx(2, abs=0.02)
    assert task.line.bias.item() == pytest.approx(1, abs=0.02)
    assert not task.training and task.seen == 300
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in log if "loss" in row]
    assert [row["step"] for row in log] == [*range(25, 301, 25), 300]
    assert losses[-1] < 1e-3 < losses[0]
    assert log[-1]["slope"] == pytest.approx(2, abs=0.02)


def test_a_tracker_gets_the_figures(tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    settings = OptimizerSettings(steps=4, learning_rate=0.1, warmup_steps=1)
    fit(Line(), settings, tmp_path / "run", log_every=2, log_with="tensorboard")
    found = event_accumulator.EventAccumulator(str(tmp_path / "run" / "run")).Reload()
    assert [event.step for event in found.Scalars("loss")] == [2, 4] and len(found.Scalars("slope")) == 1
    with pytest.raises(ValueError, match="unknown tracker 'x': choose among"):
        fit(Line(), settings, tmp_path / "other", log_with="x")
    with pytest.raises(ValueError, match="the tracker comet_ml is not installed"):
        fit(Line(), settings, tmp_path / "other", log_with="comet_ml")


def test_what_is_left_and_reported_are_the_averaged_weights(tmp_path):
    settings = OptimizerSettings(steps=5, learning_rate=0.1, warmup_steps=1, ema_decay=0.5)
    task, seen = Line(), []
    loss = task.loss
    task.loss = lambda step: (seen.append(task.line.bias.item()), loss(step))[1]
    fit(task, settings, tmp_path)
    final = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["weights"]["masters"][1].item()
    average = seen[0]
    for step, value in enumerate([*seen[1:], final]):
        decay = min(0.5, (step + 1) / (step + 10)) if step else 0.0
        average = decay * average + (1 - decay) * value
    assert average != pytest.approx(final, rel=1e-3)
    assert task.line.bias.item() == pytest.approx(average, rel=1e-5)
    assert task.reported == [(5, task.line.weight.item())]


def test_some_images_have_much_noise_and_the_others_little():
    settings = TransformerSettings(
        OptimizerSettings(1, 1.0), code_noise=0.02, most_noise=0.8, stages=({"start": 10, "noisy_share": 0.5},)
    )
    tokens = (1 << 20) + torch.arange(2000)[:, None].expand(-1, 256)
    task = SimpleNamespace(settings=settings)
    early, noisy = (
        TransformerTask.noisy(task, tokens, 1 << 20, step, torch.Generator().manual_seed(0)) for step in (9, 10)
    )
    assert (early != tokens).float().mean(1).max() < 0.1
    shares = (noisy != tokens).float().mean(1)
    much = shares > 0.08
    of_another = ((noisy != tokens) & (noisy >= 1 << 20)).any(1)
    assert (noisy[of_another] >= 1 << 20).all()
    assert of_another.float().mean() == pytest.approx(0.25, abs=0.03)
    assert much.float().mean() == pytest.approx(0.5 * 0.92, abs=0.04)
    assert shares[~much].mean() == pytest.approx(0.02, abs=0.005)
    assert shares[much].max() < 0.9 and shares[much].mean() == pytest.approx(0.44, abs=0.03)


def test_stages_change_settings_from_their_step_on():
    stages = ({"start": 4, "noisy_share": 0.5}, {"start": 8, "short_share": 0.1})
    settings = TransformerSettings(OptimizerSettings(1, 1.0), stages=stages)
    found = [(one.noisy_share, one.short_share) for one in map(settings.at, (3, 4, 8))]
    assert found == [(0.0, 0.75), (0.5, 0.75), (0.5, 0.1)]
    with pytest.raises(ValueError, match=r"^stages\[0\]: nosy_share is not a setting: "):
        TransformerSettings(OptimizerSettings(1, 1.0), stages=({"start": 4, "nosy_share": 0.5},))


def test_muon_moves_its_matrices_equally_far_in_every_direction():
    torch.manual_seed(0)
    module = torch.nn.ModuleDict({"layers": torch.nn.Linear(12, 8), "head": torch.nn.Linear(12, 8)})
    settings = OptimizerSettings(steps=10, learning_rate=0.1, weight_decay=0.0, warmup_steps=1, muon=("layers.",))
    weights, before = MasterWeights(module, settings), copy.deepcopy(module.state_dict())
    # One direction of the input is five times as strong as the others.
    x = torch.randn(64, 12) * torch.tensor([5.0] + [1.0] * 11)
    (module["layers"](x) + module["head"](x)).pow(2).sum().backward()
    weights.step(0)
    moved = {name: value - before[name] for name, value in module.state_dict().items()}
    values = torch.linalg.svdvals(moved["layers.weight"])
    assert values.max() < 2 * values.min()
    values = torch.linalg.svdvals(moved["head.weight"])
    assert values.max() > 4 * values.min()
    torch.testing.assert_close(moved["layers.bias"], moved["head.bias"])


def test_the_learning_rate_warms_up_and_falls_to_a_twentieth():
    settings = OptimizerSettings(steps=1000, learning_rate=2.0, warmup_steps=10)
    assert settings.learning_rate_at(0) == pytest.approx(0.2)
    assert settings.learning_rate_at(500) == pytest.approx(2 * (0.05 + 0.95 / 2))
    assert settings.learning_rate_at(1000) == pytest.approx(0.1)
    rates = [settings.learning_rate_at(step) for step in range(10, 1000)]
    again = replace(settings, steps=1500, restarts=((1000, 1.0),))
    assert [again.learning_rate_at(step) for step in range(1000)] == [
        settings.learning_rate_at(s) for s in range(1000)
    ]
    assert again.learning_rate_at(1000) == pytest.approx(0.1)
    assert again.learning_rate_at(1250) == pytest.approx(0.05 + 0.95 / 2)
    assert rates == sorted(rates, reverse=True)


@pytest.mark.every(3)
@pytest.mark.parametrize("muon", [(), ("line.",)])
@pytest.mark.parametrize("stop_at", [1, 7, 29])
def test_an_interrupted_loop_ends_as_if_it_had_never_been(tmp_path, stop_at, muon):
    settings = OptimizerSettings(steps=30, learning_rate=0.1, ema_decay=0.9, muon=muon)
    whole, first, second = Line(), Line(), Line()
    fit(whole, settings, tmp_path / "whole")
    first.stop_at = stop_at
    with pytest.raises(KeyboardInterrupt):
        fit(first, settings, tmp_path / "parts", report_every_seconds=-1.0)
    assert [step for step, _ in first.reported] == list(range(1, stop_at + 1))
    fit(second, settings, tmp_path / "parts")
    assert torch.equal(second.line.weight, whole.line.weight) and torch.equal(second.line.bias, whole.line.bias)
    assert second.seen == whole.seen == 30


@pytest.mark.parametrize("stop_at", [1, 7, 29])
def test_a_killed_loop_resumes_from_its_last_checkpoint(tmp_path, stop_at):
    settings = OptimizerSettings(steps=30, learning_rate=0.1, ema_decay=0.9)
    whole, first, second = Line(), Line(), Line()
    fit(whole, settings, tmp_path / "whole")
    first.stop_at = stop_at
    with pytest.raises(KeyboardInterrupt):
        fit(first, settings, tmp_path / "parts", checkpoint_every_seconds=-1.0)
    assert first.reported == []
    assert torch.load(tmp_path / "parts" / "checkpoint.pt", weights_only=True)["step"] == stop_at
    fit(second, settings, tmp_path / "parts")
    assert torch.equal(second.line.weight, whole.line.weight) and second.seen == 30


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_keeps_the_step_in_hand(tmp_path, number):
    settings = OptimizerSettings(steps=12, learning_rate=0.1, ema_decay=0.9)
    handler = signal.getsignal(number)
    whole, first, second = Line(), Line(), Line()
    fit(whole, settings, tmp_path / "whole")
    loss = first.loss
    first.loss = lambda step: (step == 6 and signal.raise_signal(number), loss(step))[1]
    with pytest.raises(KeyboardInterrupt):
        fit(first, settings, tmp_path / "parts")
    assert signal.getsignal(number) is handler
    assert torch.load(tmp_path / "parts" / "checkpoint.pt", weights_only=True)["step"] == 7
    fit(second, settings, tmp_path / "parts")
    assert torch.equal(second.line.weight, whole.line.weight) and second.seen == 12


def test_a_finished_run_is_not_repeated(tmp_path):
    settings = OptimizerSettings(steps=10, learning_rate=0.1)
    first, second = Line(), Line()
    fit(first, settings, tmp_path)
    second.stop_at = 0
    fit(second, settings, tmp_path)
    assert torch.equal(second.line.weight, first.line.weight) and second.reported == []


def test_a_checkpoint_is_whole_or_the_one_before(tmp_path, monkeypatch):
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(path, {"step": 1})
    save = torch.save

    def full_disk(state, file):
        save(state, file)
        file.truncate(20)
        raise OSError("no space left")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(OSError, match="no space left"):
        save_checkpoint(path, {"step": 2})
    assert torch.load(path, weights_only=True) == {"step": 1}
    monkeypatch.undo()
    save_checkpoint(path, {"step": 3})
    assert torch.load(path, weights_only=True) == {"step": 3}
    assert torch.load(tmp_path / "checkpoint-before.pt", weights_only=True) == {"step": 1}
    assert {file.name for file in tmp_path.iterdir()} == {"checkpoint.pt", "checkpoint-before.pt"}


def test_master_weights_keep_what_bfloat16_would_round_away(tmp_path):
    module = torch.nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    torch.nn.init.ones_(module.weight)
    settings = OptimizerSettings(steps=100, learning_rate=1e-4, weight_decay=0.0, warmup_steps=1)
    weights = MasterWeights(module, settings)
    for step in range(50):
        module.weight.sum().backward()
        weights.step(step)
    assert module.weight.item() < 1 and module.weight.dtype == torch.bfloat16
    assert weights.masters[0].item() == pytest.approx(1 - sum(map(settings.learning_rate_at, range(50))), rel=1e-4)


def test_learning_rates_scale_by_the_beginning_of_a_name():
    module = torch.nn.ModuleDict({"slow": torch.nn.Linear(1, 1), "fast": torch.nn.Linear(1, 1)})
    weights = MasterWeights(module, LINE, {"slow.": 0.1})
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    weights.step(0)
    rates = [group["lr"] for group in weights.optimizers[0].param_groups]
    assert rates == pytest.approx([0.1 * rates[1], rates[1]])


def test_a_run_ends_before_it_has_a_figure_to_plot(tmp_path, monkeypatch, no_plots):
    monkeypatch.setattr("arimage.training.loop.plot_log", no_plots)
    task = Line()
    task.report = lambda step, out: {}
    fit(task, OptimizerSettings(steps=2, learning_rate=0.1, warmup_steps=1), tmp_path)
    assert (tmp_path / "log.jsonl").read_text() == '{"step": 2}\n' and not (tmp_path / "log.png").exists()


def test_the_curve_is_drawn(tmp_path, no_plots):
    log = [
        {"step": 1, "seconds": 0.1, "loss": 2.0},
        {"step": 2, "seconds": 0.2, "loss": 1.0},
        {"step": 2, "psnr": 9.0},
    ]
    no_plots(log, tmp_path / "log.png")
    assert Image.open(tmp_path / "log.png").size == (700, 300)


# The tasks


def test_spherical_kmeans_finds_the_directions():
    centres = torch.nn.functional.normalize(torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, -1]]), dim=-1)
    noise = torch.randn(300, 3, generator=torch.Generator().manual_seed(0)) * 0.05
    points = torch.nn.functional.normalize(centres.repeat(100, 1) + noise, dim=-1)
    # One of several starts finds all three; none leaves a centre off the sphere.
    found = [kmeans(points, 3, torch.Generator().manual_seed(seed), spherical=True) for seed in range(8)]
    assert all(torch.allclose(one.norm(dim=-1), torch.ones(3)) for one in found)
    assert max((one @ centres.T).max(0).values.min() for one in found) > 0.99


def test_kmeans_of_a_plane_finds_the_means():
    centres = torch.tensor([[0.0, 0], [9, 0], [0, 9]])
    points = centres.repeat(100, 1) + torch.randn(300, 2, generator=torch.Generator().manual_seed(0)) * 0.1
    found = [kmeans(points, 3, torch.Generator().manual_seed(seed), spherical=False) for seed in range(8)]
    assert min(torch.cdist(one, centres).min(0).values.max() for one in found) < 0.05
    with pytest.raises(ValueError, match="300 encodings cannot start 301 codes: raise kmeans_batches or batch_size"):
        kmeans(points, 301, torch.Generator(), spherical=False)


@pytest.mark.parametrize("spherical", [True, False])
def test_codes_move_to_the_mean_of_their_points(spherical):
    points = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    codebook = MovingCodebook(torch.eye(4), spherical, decay=0.5)
    for _ in range(40):
        codebook.update(points, torch.arange(40) % 4)
    means = torch.stack([points[k::4].mean(0) for k in range(4)])
    torch.testing.assert_close(codebook.codes, torch.nn.functional.normalize(means, dim=-1) if spherical else means)


def test_codes_that_nothing_uses_are_put_on_encodings():
    model = LlamaGenVQModel(**RECIPE["tokenizer"]["model"])
    optimizer = OptimizerSettings(steps=100, learning_rate=1e-3)
    task = TokenizerTask(model, None, None, TokenizerSettings(optimizer, restart_every=5, restart_until=0.5))
    codebook = task.quantiser.codebook
    points = torch.nn.functional.normalize(torch.randn(40, 4), dim=-1)
    nearest = torch.zeros(40, dtype=torch.long)
    codebook.counts.fill_(0.1)
    before = codebook.codes.clone()
    task.update_codebook(3, points, nearest)
    assert torch.allclose(codebook.codes[1:], before[1:], atol=1e-6)
    task.update_codebook(5, points, nearest)
    assert (codebook.codes[1:] @ points.T).max(-1).values.min() > 0.9999
    assert (codebook.counts[1:] == 1).all()
    moved = codebook.codes.clone()
    codebook.counts[1:] = 0.1
    task.update_codebook(50, points, nearest)
    assert torch.allclose(codebook.codes[1:], moved[1:], atol=1e-6)


def test_a_text_tokenizer_lower_cases_ends_and_pads():
    tokenizer = train_text_tokenizer(["a red heart", "a red book"] * 5, 300, 6)
    assert tokenizer.pad_token_id == 0 and tokenizer.eos_token_id == 1 and tokenizer.model_max_length == 6
    ids = tokenizer("A Red HEART").input_ids
    assert ids == tokenizer("a red heart").input_ids and ids[-1] == 1 and len(ids) == 4
    assert tokenizer.decode(ids, skip_special_tokens=True).strip() == "a red heart"
    padded = tokenizer("a red", padding="max_length", max_length=6)
    assert padded.input_ids[3:] == [0, 0, 0] and padded.attention_mask == [1, 1, 1, 0, 0, 0]
    # Whatever is written, nothing is unknown.
    assert tokenizer.decode(tokenizer("naïve ☃").input_ids, skip_special_tokens=True).strip() == "naïve ☃"


# Recipes


@pytest.mark.parametrize("name", [path.stem for path in RECIPES.glob("*.toml")])
def test_packaged_recipes_are_complete(name):
    recipe = load_recipe(name)
    default = VARTransformerSettings if name.startswith("emoji-var") else TransformerSettings
    others = {"emoji-arpg": ARPGSettings, "emoji-latent-llama": LatentLlamaSettings}
    default = VideoSettings if name == "emoji-video-blocks" else default
    for part, settings in (("tokenizer", TokenizerSettings), ("transformer", others.get(name, default))):
        optimizer = OptimizerSettings(**recipe[part]["optimizer"])
        assert optimizer.steps > 0
        settings(optimizer, **recipe[part]["training"])
    if "text_training" in recipe:
        TextSettings(OptimizerSettings(**recipe["text_training"]["optimizer"]), **recipe["text_training"]["training"])
    assert recipe["image_size"] % 2 ** (len(recipe["tokenizer"]["model"]["channel_multipliers"]) - 1) == 0
    assert set(recipe["generation"]["sampling"]) <= {
        "guidance_scale",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "num_diffusion_steps",
    }


def test_an_unknown_recipe_is_refused_with_those_that_are_known():
    with pytest.raises(ValueError, match="unknown recipe nonesuch: give a TOML file or one of .*emoji-llamagen"):
        load_recipe("nonesuch")


def test_a_recipe_may_be_a_file(tmp_path):
    (tmp_path / "mine.toml").write_text("image_size = 32\n")
    assert load_recipe(tmp_path / "mine.toml") == {"image_size": 32}


def test_the_losses_fall(trained):
    _, tokenizer_losses, transformer_losses = trained
    assert sorted(tokenizer_losses) == list(range(24)) and sorted(transformer_losses) == list(range(30))
    for losses, factor in ((tokenizer_losses, 0.7), (transformer_losses, 0.9)):
        values = list(losses.values())
        assert sum(values[-4:]) < factor * sum(values[:4])
    # A head of zeros gives every code the same probability.
    assert transformer_losses[0] == pytest.approx(math.log(16), abs=1e-3)


def test_a_run_leaves_its_records(trained):
    out, *_ = trained
    for part, figure, picture in (
        ("tokenizer", "held-out PSNR", "reconstructions.png"),
        ("transformer", "held-out loss", "samples.png"),
    ):
        log = [json.loads(line) for line in (out / part / "log.jsonl").read_text().splitlines()]
        assert math.isfinite(log[-1][figure])
        assert Image.open(out / part / picture).size[0] >= 2 * SIZE
        assert not list(out.rglob("*partial")) and not list(out.rglob("*.old"))
    assert (out / "model" / "model_index.json").is_file()


def test_the_trained_tokenizer_keeps_the_codes_it_was_trained_with(trained, data):
    out, *_ = trained
    vq = LlamaGenVQModel.from_pretrained(out / "tokenizer" / "tokenizer")
    codes = torch.load(out / "tokenizer" / "checkpoint.pt", weights_only=True)["buffers"]["quantiser.codebook.codes"]
    assert torch.equal(vq.codebook.weight, codes)
    images = to_unit_range(load_captioned_images(data, SIZE, styles=["flat"]).images)
    with torch.no_grad():
        reconstructions = vq.decode(vq.encode(images))
    mean = images.mean((0, 2, 3), keepdim=True)
    assert (reconstructions - images).pow(2).mean() < 0.8 * (mean - images).pow(2).mean()


def test_the_trained_model_loads_by_its_folder_and_draws(trained):
    out, *_ = trained
    files = {name: value.dtype for (_, name), value in weights_of(out / "model").items()}
    assert set(files.values()) == {torch.float16}
    pipe = AutoPipeline.from_pretrained(out / "model")
    pipe.set_progress_bar_config(disable=True)
    assert pipe.decoding == SpeculativeJacobiDecoding(window=8, refresh="coupled")
    assert pipe.generation_config == {"guidance_scale": 2.0, "temperature": 1.0, "top_k": 10, "top_p": 1.0}
    assert pipe.transformer.dtype == torch.float32
    output = pipe(["a red square", "a blue disc"], generator=torch.Generator().manual_seed(0))
    assert [image.size for image in output.images] == [(SIZE, SIZE)] * 2
    # A few steps teach no more than that the background is white.
    border = [np.asarray(image)[[0, -1]].mean() for image in output.images]
    assert min(border) > 160, border


@pytest.mark.parametrize("at", [pytest.param(3, marks=pytest.mark.slow), 10])
def test_an_interrupted_tokenizer_run_ends_as_if_it_had_never_been(trained, data, tmp_path, monkeypatch, at):
    out, losses, _ = trained
    with monkeypatch.context() as broken:
        interrupt(broken, TokenizerTask, tokenizer_module, at)
        with pytest.raises(KeyboardInterrupt):
            run_tokenizer(RECIPE, data, data, tmp_path, "cpu")
    assert torch.load(tmp_path / "tokenizer" / "checkpoint.pt", weights_only=True)["step"] == at
    assert not (tmp_path / "tokenizer" / "tokenizer").exists()
    torch.manual_seed(77)
    resumed = record_losses(monkeypatch, TokenizerTask)
    run_tokenizer(RECIPE, data, data, tmp_path, "cpu")
    assert resumed == {step: loss for step, loss in losses.items() if step >= at}
    ours, theirs = (
        load_file(next((run / "tokenizer" / "tokenizer").glob("*.safetensors"))) for run in (tmp_path, out)
    )
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.slow), 0.1])
def test_an_interrupted_transformer_run_ends_as_if_it_had_never_been(trained, data, tmp_path, monkeypatch, dropout):
    recipe = copy.deepcopy(RECIPE)
    recipe["transformer"]["model"]["dropout"] = recipe["text_encoder"]["dropout_rate"] = dropout
    recipe["transformer"]["optimizer"]["steps"] = 8
    recipe["transformer"]["training"] |= {"train_text": False, "mixed_share": 0.5, "framed_share": 0.5}
    runs = [tmp_path / "whole", tmp_path / "parts"]
    for run in runs:
        run.mkdir()
        (run / "tokenizer").symlink_to(trained[0] / "tokenizer")
    losses = record_losses(monkeypatch, TransformerTask)
    run_transformer(recipe, data, data, runs[0], "cpu")
    undisturbed = dict(losses)
    with monkeypatch.context() as broken:
        interrupt(broken, TransformerTask, captions_module, 5)
        with pytest.raises(KeyboardInterrupt):
            run_transformer(recipe, data, data, runs[1], "cpu")
    # The interrupted run has already left a model that loads.
    assert AutoPipeline.from_pretrained(runs[1] / "model").transformer.config.vocab_size == 16
    run_transformer(recipe, data, data, runs[1], "cpu")
    assert losses == undisturbed
    assert_same_weights(runs[1], runs[0])


def test_pictures_that_are_not_learned_are_sampled_more_often(trained, data, tmp_path, monkeypatch):
    out, *_ = trained
    (tmp_path / "tokenizer").symlink_to(out / "tokenizer")
    KnownCaptions(
        {"blue disc": [], "red disc": []}, unlearned={"red disc": ["a red disc"], "green disc": ["green disc"]}
    ).save(tmp_path)
    seen = {}

    def run(task_run):
        seen.update(zip(task_run.data.names, task_run.data.weights.tolist(), strict=True))
        return AutoPipeline.from_pretrained(out / "model")

    monkeypatch.setattr(TransformerTask, "run", run)
    run_transformer(RECIPE, data, data, tmp_path, "cpu", unlearned=tmp_path)
    assert seen["green disc"] == 4 * seen["blue disc"]
    assert seen["red disc"] == seen["blue disc"]
    with pytest.raises(ValueError, match="has no known_captions.json: give the folder"):
        run_transformer(RECIPE, data, data, tmp_path, "cpu", unlearned=out)


@pytest.mark.slow
def test_short_steps_see_more_beginnings(trained, data, tmp_path, monkeypatch):
    shutil.copytree(trained[0] / "tokenizer", tmp_path / "tokenizer")
    recipe = copy.deepcopy(RECIPE)
    recipe["transformer"]["training"] |= {"short_share": 0.5, "short_tokens": 4}
    shapes = collections.Counter()
    logits = TransformerTask.logits

    def recorded(task, captions, codes, unconditional):
        if task.training:
            shapes[len(captions), *codes.shape] += 1
        return logits(task, captions, codes, unconditional)

    monkeypatch.setattr(TransformerTask, "logits", recorded)
    run_transformer(recipe, data, data, tmp_path, "cpu")
    assert shapes.keys() == {(8, 8, 16), (32, 32, 4)}
    assert min(shapes.values()) > 5


def test_captions_can_be_read_by_their_last_state_alone(trained, data, tmp_path, monkeypatch):
    shutil.copytree(trained[0] / "tokenizer", tmp_path / "tokenizer")
    recipe = copy.deepcopy(RECIPE)
    recipe["transformer"]["model"]["num_condition_tokens"] = 1
    recipe["transformer"]["optimizer"]["steps"] = 4
    widths = set()
    predict = LlamaGenTransformer.predict

    def recorded(transformer, codes, *, prompt_embeds, prompt_attention_mask, **condition):
        widths.add(prompt_embeds.shape[1])
        assert prompt_attention_mask.all()
        return predict(
            transformer, codes, prompt_embeds=prompt_embeds, prompt_attention_mask=prompt_attention_mask, **condition
        )

    monkeypatch.setattr(LlamaGenTransformer, "predict", recorded)
    pipe = run_transformer(recipe, data, data, tmp_path, "cpu")
    assert widths == {1}
    images = load_captioned_images(data, SIZE, ["flat"])
    task = TransformerTask(pipe, images, images, TransformerSettings(OptimizerSettings(1, 1e-3), caption_length=8))
    prompts = ["a red square", "red"]
    condition = pipe.encode_condition(prompts, None, None, None)
    for ours, theirs in zip(task.embed(prompts), condition.values(), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert condition["prompt_embeds"].shape == (2, 1, 16)


def test_a_text_encoder_can_stay_as_it_was(trained, data, tmp_path):
    shutil.copytree(trained[0] / "tokenizer", tmp_path / "tokenizer")
    recipe = copy.deepcopy(RECIPE)
    recipe["transformer"]["optimizer"]["steps"] = 4
    recipe["transformer"]["training"]["train_text"] = False
    run_transformer(recipe, data, data, tmp_path, "cpu", start_from=trained[0] / "model")
    for part, same in (("text_encoder", True), ("transformer", False)):
        ours, theirs = (
            load_file(next((run / "model" / part).glob("*.safetensors"))) for run in (tmp_path, trained[0])
        )
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs) == same


def test_the_text_encoder_of_another_model_can_be_taken(trained, data, tmp_path):
    shutil.copytree(trained[0] / "tokenizer", tmp_path / "tokenizer")
    recipe = copy.deepcopy(RECIPE)
    recipe["transformer"]["optimizer"]["steps"] = 2
    recipe["transformer"]["training"]["train_text"] = False
    recipe["text_encoder"] = {"start_from": str(trained[0] / "model")}
    pipe = run_transformer(recipe, data, data, tmp_path, "cpu")
    theirs = AutoPipeline.from_pretrained(trained[0] / "model", dtype=torch.float32)
    for name, weight in theirs.text_encoder.state_dict().items():
        torch.testing.assert_close(pipe.text_encoder.state_dict()[name], weight, rtol=2**-8, atol=0)
    assert pipe.tokenizer.get_vocab() == theirs.tokenizer.get_vocab()


def test_another_caption_is_mixed_into_the_embeddings(trained, data):
    pipe = AutoPipeline.from_pretrained(trained[0] / "model", dtype=torch.float32)
    images = load_captioned_images(data, SIZE, ["flat"])
    settings = TransformerSettings(OptimizerSettings(1, 1e-3), caption_length=8, mixed_share=0.5)
    task = TransformerTask(pipe, images, images, settings).eval()
    prompts = ["a red square", "blue"] * 200
    # The captions differ in length, and the last state is mixed with the last one.
    alone = last_state(*task.embed(prompts))[0]
    task.train().text_encoder.eval()
    mixed = last_state(*task.embed(prompts))[0] - alone
    other = alone.roll(1, 0) - alone
    share = (mixed.norm(dim=(1, 2)) / other.norm(dim=(1, 2))).detach()
    torch.testing.assert_close(mixed, share[:, None, None] * other, rtol=0, atol=1e-5)
    assert 0.4 < (share > 1e-6).float().mean() < 0.6
    assert 0.4 < share.max() <= 0.5 + 1e-6


def test_the_transformer_needs_the_tokenizer_first(data, tmp_path):
    with pytest.raises(ValueError, match="has no trained tokenizer: run `arimage train tokenizer`"):
        run_transformer(RECIPE, data, data, tmp_path, "cpu")
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_tokenizer_run_does_not_count_as_trained(data, tmp_path, monkeypatch):
    with monkeypatch.context() as broken:
        interrupt(broken, TokenizerTask, tokenizer_module, 2)
        with pytest.raises(KeyboardInterrupt):
            run_tokenizer(RECIPE, data, data, tmp_path, "cpu")
    with pytest.raises(ValueError, match="has no trained tokenizer"):
        run_transformer(RECIPE, data, data, tmp_path, "cpu")
