"""The loop goes on after an interruption as if it had never been; codebooks and text tokenizers are fitted."""

import copy
import json
import signal
from dataclasses import replace

import pytest
import torch
from PIL import Image
from training.images import Images

from arimage import LlamaGenVQModel
from arimage.training.loop import MasterWeights, OptimizerSettings, fit
from arimage.training.tokenizers.quantisers import MovingCodebook, kmeans
from arimage.training.tokenizers.tokenizer import TokenizerSettings, TokenizerTask
from arimage.training.tokens.text import train_text_tokenizer


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
@pytest.mark.parametrize("often", ["report_every_seconds", "checkpoint_every_seconds"])
def test_an_interrupted_loop_ends_as_if_it_had_never_been(tmp_path, stop_at, muon, often):
    settings = OptimizerSettings(steps=30, learning_rate=0.1, ema_decay=0.9, muon=muon)
    whole, first, second = Line(), Line(), Line()
    fit(whole, settings, tmp_path / "whole")
    first.stop_at = stop_at
    with pytest.raises(KeyboardInterrupt):
        fit(first, settings, tmp_path / "parts", **{often: -1.0})
    assert [step for step, _ in first.reported] == (list(range(1, stop_at + 1)) if "report" in often else [])
    assert torch.load(tmp_path / "parts" / "checkpoint.pt", weights_only=True)["step"] == stop_at
    fit(second, settings, tmp_path / "parts")
    assert torch.equal(second.line.weight, whole.line.weight) and torch.equal(second.line.bias, whole.line.bias)
    assert second.seen == whole.seen == 30


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
    model = LlamaGenVQModel(
        channels=8,
        channel_multipliers=[1, 2, 2],
        layers_per_block=1,
        latent_channels=16,
        codebook_size=16,
        codebook_dim=4,
        norm_num_groups=4,
    )
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


def test_a_tokenizer_counts_steps_whatever_their_parts(monkeypatch):
    model = LlamaGenVQModel(
        channels=8, channel_multipliers=[1, 2], layers_per_block=1, codebook_size=8, norm_num_groups=4
    )
    optimizer = OptimizerSettings(steps=10, learning_rate=1e-3, accumulate=3)
    settings = TokenizerSettings(optimizer, batch_size=2, codebook_start=2, restart_every=2, restart_until=0.8)
    images = Images(torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.zeros(2, 1, 8, 8, dtype=torch.uint8))
    task, started, restarted = TokenizerTask(model, images, images, settings), [], []
    monkeypatch.setattr(task, "start_codebook", started.append)
    monkeypatch.setattr(task.quantiser.codebook, "restart", lambda *_: restarted.append(part))
    quantised = []
    for part in range(30):
        quantised += [part] if "codes used" in task.loss(part)[1] else []
    assert started == [6] and quantised == [*range(6, 30)] and restarted == [6, 12, 18]


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
