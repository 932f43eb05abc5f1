"""The options of `arimage train model`, and gradient checkpointing of language models."""

import json
import sys

import pytest
import torch
from families import EVERY
from huggingface_hub import ModelCard
from PIL import Image
from pipelines.llamagen import tiny as tiny_llamagen
from training.tokens.test_cache import class_folders, encode, parquet
from training.tokens.test_task import recipe
from training.two_processes import together

from arimage.cli import main as cli
from arimage.training.recipe import TokenRecipe, load_recipe
from arimage.training.tokens.beginning import plan_of, token_settings
from arimage.training.tokens.cache import TokenCache
from arimage.training.tokens.task import TokenTask


ACTIVATIONS = "and for the activations of a batch"


@pytest.fixture
def train(tmp_path, monkeypatch, capsys):
    """Runs `arimage train model` on the tokens of nine images of a tiny model."""
    pipe = tiny_llamagen.class_pipeline()
    pipe.save_pretrained(tmp_path / "base")
    data = class_folders(tmp_path / "data")
    encode(pipe, data, tmp_path / "tokens", model=str(tmp_path / "base"))
    path = recipe(tmp_path, steps=6)

    def run(*words):
        words = [
            "--tokens",
            tmp_path / "tokens",
            "--recipe",
            path,
            "--out",
            tmp_path / "run",
            "--device",
            "cpu",
            *words,
        ]
        monkeypatch.setattr(sys, "argv", ["arimage", "train", "model", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        printed = capsys.readouterr()
        return end.value.code or 0, printed.out, printed.err

    return run


def test_settings_prompts_and_kept_checkpoints(train, tmp_path):
    (tmp_path / "prompts.txt").write_text("bee\nant\n")
    words = ["--seed", 5, "--max-grad-norm", 0.5, "--gradient-accumulation", 2]
    kept = ["--validation-prompts", tmp_path / "prompts.txt", "--checkpoint-every", 2, "--checkpoints-total-limit", 2]
    assert train(*words, *kept)[0] == 0
    run = tmp_path / "run" / "transformer"
    used = json.loads((run / "settings.json").read_text())
    assert used["seed"] == 5 and used["optimizer"]["gradient_clip"] == 0.5 and used["optimizer"]["accumulate"] == 2
    names = ["checkpoint-4.pt", "checkpoint-6.pt", "checkpoint.pt"]
    assert sorted(path.name for path in run.glob("checkpoint*.pt") if "before" not in path.name) == names
    # Two pictures, one per prompt, which the card of the model shows.
    card = ModelCard.load(tmp_path / "run" / "model" / "README.md")
    assert "bee, ant" in card.text
    assert "samples.png" in str(card.data.widget) and Image.open(tmp_path / "run" / "model" / "samples.png").width
    # A run that is over makes no pictures of other prompts.
    assert train(*words)[0] == 0 and "bee, ant" in ModelCard.load(tmp_path / "run" / "model" / "README.md").text
    whole = torch.load(run / "checkpoint.pt", weights_only=True)
    assert train(*words, *kept, "--resume-from", "checkpoint-4")[0] == 0
    again = torch.load(run / "checkpoint.pt", weights_only=True)
    for one, other in zip(whole["weights"]["masters"], again["weights"]["masters"], strict=True):
        assert torch.equal(one, other)
    # A kept checkpoint becomes the model without another step.
    (model,) = (tmp_path / "run" / "model" / "transformer").glob("*.safetensors")
    last = model.read_bytes()
    assert train(*words, *kept, "--steps", 4, "--resume-from", "checkpoint-4")[0] == 0 and model.read_bytes() != last
    code, _, err = train(*words, *kept, "--resume-from", "checkpoint-2")
    assert code == 2 and "keeps checkpoint-4, checkpoint-6: give one of these" in err


def test_options_that_do_not_fit_are_refused_first(train, tmp_path):
    (tmp_path / "prompts.txt").write_text("dragon\n")
    for words, reason in [
        (["--checkpoints-total-limit", 2], "--checkpoint-every"),
        (["--checkpoint-every", 0], "--checkpoint-every"),
        (["--max-grad-norm", -1], "--max-grad-norm"),
        (["--gradient-accumulation", 0], "--gradient-accumulation"),
        (["--validation-prompts", tmp_path / "prompts.txt"], "dragon"),
        (["--fsdp"], "torchrun"),
        (["--gradient-checkpointing"], "language models"),
    ]:
        code, _, err = train(*words)
        assert code == 2 and reason in err, words
        assert not (tmp_path / "run").exists()


def test_a_dry_run_times_steps_and_counts_memory(train, tmp_path):
    code, out, _ = train("--dry-run")
    rows = dict(line.split(": ", 1) for line in out.splitlines())
    number = {name: int(value.replace(",", "")) for name, value in rows.items() if name.startswith("bytes of")}
    trained, total = (int(rows[name].replace(",", "")) for name in ("trained parameters", "bytes per process"))
    assert code == 0 and number["bytes of moments of AdamW"] == 8 * trained
    assert total == sum(number.values()) >= 20 * trained
    side = tiny_llamagen.class_pipeline().image_sizes[0][0]
    assert rows["pixels that each image is brought to"] == f"{side} x {side}"
    assert "s per step" in rows["minutes, without exchange"] and not (tmp_path / "run").exists()
    activations = [
        int(dict(line.split(": ", 1) for line in text.splitlines())[ACTIVATIONS].replace(",", ""))
        for text in (out, train("--dry-run", "--batch-size", 8)[1])
    ]
    assert 1.8 * activations[0] < activations[1] < 2.2 * activations[0]


def test_a_plan_counts_processes_and_muon(train, tmp_path, monkeypatch):
    cache = TokenCache(tmp_path / "tokens")
    alone, muon = (
        plan_of(table, token_settings(table), cache)
        for table in (
            load_recipe(recipe(tmp_path, muon=names), TokenRecipe) for names in ([], ["transformer.blocks."])
        )
    )
    matrices = muon["bytes of momentum of Muon"] // 4
    assert 0 < matrices < alone["trained parameters"]
    assert muon["bytes of moments of AdamW"] == alone["bytes of moments of AdamW"] - 8 * matrices
    monkeypatch.setattr("arimage.training.tokens.beginning.processes", lambda: (0, 4))
    table = load_recipe(recipe(tmp_path), TokenRecipe)
    copied, divided = (plan_of(table, token_settings(table), cache, sharded=sharded) for sharded in (False, True))
    assert copied["epochs"] == pytest.approx(4 * alone["epochs"], abs=0.1)
    assert copied["bytes per process"] == alone["bytes per process"]
    assert divided["bytes of moments of AdamW"] == alone["bytes of moments of AdamW"] // 4
    assert divided["bytes of other weights"] == alone["bytes of other weights"]


@pytest.mark.slow
def test_a_dry_run_of_two_processes(train, tmp_path):
    words = ["--tokens", tmp_path / "tokens", "--recipe", recipe(tmp_path), "--out", tmp_path / "run", "--dry-run"]
    said = together(["arimage.cli.main"], "train", "model", *words, "--device", "cpu", "--fsdp")
    assert said.count("processes: 2") == said.count("minutes") == 1 and not (tmp_path / "run").exists()


def test_the_hub_gets_token_and_privacy_before_the_first_step(train, tmp_path, monkeypatch):
    asked = []

    def create(hub, name, **given):
        asked.append((hub.token, name, given["private"], (tmp_path / "run" / "transformer").exists()))

    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", create)
    monkeypatch.setattr("huggingface_hub.HfApi.upload_folder", lambda hub, **given: asked.append(hub.token))
    assert train("--push-to-hub", "me/model", "--hub-token", "hf_x", "--private")[0] == 0
    assert asked == [("hf_x", "me/model", True, False), "hf_x"]


@pytest.mark.parametrize("rank", [0, 2])
def test_checkpointed_layers_have_the_same_gradients_and_keep_less(tmp_path, rank):
    if rank:
        pytest.importorskip("peft", reason="the extra `lora` is not installed")
    parquet(tmp_path / "a.parquet", range(4), caption=[f"picture {i}" for i in range(4)])
    encode(EVERY["lumina"](), tmp_path / "a.parquet", tmp_path / "tokens", batch_size=2)
    table, found = load_recipe(recipe(tmp_path), TokenRecipe), []
    for again in (False, True):
        settings = token_settings(table, dropout=0.0, lora_rank=rank)
        pipe = EVERY["lumina"]()
        pipe.components[pipe._lora_loadable_modules[0]].requires_grad_(rank == 0)
        task = TokenTask(
            pipe, TokenCache(tmp_path / "tokens"), settings, heldout={}, base="x", gradient_checkpointing=again
        ).train()
        kept = []

        def keep(tensor, kept=kept):
            kept.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss, _ = task.loss(0)
        loss.backward()
        found.append((sum(kept), [p.grad.clone() for p in task.parameters() if p.grad is not None]))
    (plain, gradients), (less, others) = found
    assert less < 0.7 * plain and len(gradients) == len(others) > 0
    for one, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(one, other, atol=1e-7, rtol=1e-5)
