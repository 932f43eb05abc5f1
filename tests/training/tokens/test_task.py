"""Training on a cache of tokens: batches, families, resuming, processes, fine-tuning and adapters."""

import json
import shutil
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from families import EVERY
from pipelines.arpg import tiny as tiny_arpg
from pipelines.halton_maskgit import tiny as tiny_halton
from pipelines.latent_llama import tiny as tiny_latents
from pipelines.llamagen import tiny as tiny_llamagen
from pipelines.var import tiny as tiny_var
from training.test_together import check_batches
from training.tokens.test_cache import class_folders, encode, parquet
from training.two_processes import together

from arimage import AutoPipeline, AutoregressiveDecoding
from arimage.cli import main as cli
from arimage.families import PIPELINES


pytest.importorskip("datasets", reason="the extra `train` is not installed")
from arimage.training.recipe import TokenRecipe, load_recipe, recipes  # noqa: E402
from arimage.training.tokens.batches import Epochs, TokenBatches  # noqa: E402
from arimage.training.tokens.beginning import (  # noqa: E402
    begin_training,
    check_fits,
    new_pipeline,
    plan_of,
    token_settings,
    with_classes,
)
from arimage.training.tokens.cache import TokenCache  # noqa: E402


# Of fewer than ten images none is held out.
FIGURE = "loss of trained images"
NARROW = {"hidden_size": 32, "num_layers": 2, "num_attention_heads": 2}
DECODER = {**NARROW, "intermediate_size": 48}
FAMILIES = {
    "LlamaGenPipeline": (tiny_llamagen.class_pipeline, DECODER),
    "VARPipeline": (lambda: tiny_var.pipeline("class"), NARROW),
    "ARPGPipeline": (tiny_arpg.pipeline, DECODER),
    "HaltonMaskGITPipeline": (tiny_halton.pipeline, DECODER),
    "LatentLlamaPipeline": (tiny_latents.pipeline, {**DECODER, "head_hidden_size": 16, "num_head_layers": 1}),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Folders of a tiny model of every family, and of the tokens of nine images that it made."""
    root = tmp_path_factory.mktemp("made")
    data = class_folders(root / "data")
    for name, (make, _) in FAMILIES.items():
        make().save_pretrained(root / name)
        encode(make(), data, root / f"{name}-tokens", model=str(root / name))
    return root


def recipe(folder, pipeline="LlamaGenPipeline", model=None, training="", **optimizer):
    model = FAMILIES[pipeline][1] if model is None else model
    lines = [
        f'pipeline = "{pipeline}"',
        "[model]",
        *(f"{name} = {json.dumps(value)}" for name, value in model.items()),
    ]
    optimizer = {"steps": 12, "learning_rate": 1e-2, "warmup_steps": 1, "ema_decay": 0.5, **optimizer}
    lines += ["[optimizer]", *(f"{name} = {json.dumps(value)}" for name, value in optimizer.items())]
    lines += ["[training]", "batch_size = 4", "workers = 0", training]
    path = folder / "recipe.toml"
    path.write_text("\n".join(lines))
    return str(path)


def train(path, tokens, out, *, heldout=(), start_from=None, **given):
    table = load_recipe(path, TokenRecipe)
    settings = token_settings(table, **given)
    task = begin_training(table, settings, tokens, heldout, start_from, "cpu")
    task.fit(out)
    return task


def losses_in(out):
    rows = [json.loads(line) for line in (out / "transformer" / "log.jsonl").read_text().splitlines()]
    return [row[FIGURE] for row in rows if FIGURE in row]


# Batches


def test_an_epoch_has_every_image_once(made):
    cache = TokenCache(made / "LlamaGenPipeline-tokens")
    every, _ = cache.read(list(range(9)), [0] * 9)
    rows = [tuple(row) for row in every.tolist()]
    batches = TokenBatches(cache, 3, 0.0, seed=1)
    orders = [
        [rows.index(tuple(row)) for step in range(3 * epoch, 3 * epoch + 3) for row in batches[step].tokens.tolist()]
        for epoch in range(2)
    ]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(9)) and orders[0] != orders[1]


def test_images_are_counted_beyond_32_bits(monkeypatch):
    monkeypatch.setattr(torch, "randperm", lambda count, generator: torch.tensor([count - 1]))
    assert Epochs(2**31, 0).images(range(1)) == [2**31 - 1] and Epochs(2**40, 0).images(range(1)) == [2**40 - 1]


def test_processes_take_parts_of_one_batch_and_workers_change_nothing(made):
    cache = TokenCache(made / "LlamaGenPipeline-tokens")
    whole = TokenBatches(cache, 6, 0.5, seed=3)
    halves = [TokenBatches(cache, 3, 0.5, seed=3) for _ in range(2)]
    for rank, half in enumerate(halves):
        half.rank, half.count = rank, 2
    for step in (0, 4):
        parts = [half[step] for half in halves]
        assert torch.equal(torch.cat([part.tokens for part in parts]), whole[step].tokens)
        assert parts[0].captions + parts[1].captions == whole[step].captions
        assert torch.equal(torch.cat([part.dropped for part in parts]), whole[step].dropped)
    for workers in (0, 2):
        found = list(whole.from_step(2, 5, workers))
        assert len(found) == 3 and all(torch.equal(found[i].tokens, whole[2 + i].tokens) for i in range(3))


# Families


@pytest.mark.every(2)
@pytest.mark.parametrize("pipeline", FAMILIES)
def test_every_family_learns_its_images(made, tmp_path, pipeline):
    path = recipe(tmp_path, pipeline, steps=60 if pipeline == "LatentLlamaPipeline" else 24, learning_rate=2e-2)
    train(path, made / f"{pipeline}-tokens", tmp_path / "run", dropout=0.0)
    first = new_pipeline(
        load_recipe(path, TokenRecipe),
        TokenCache(made / f"{pipeline}-tokens"),
        AutoPipeline.from_pretrained(made / pipeline, dtype=torch.float32),
    )
    trained = AutoPipeline.from_pretrained(tmp_path / "run" / "model", dtype=torch.float32)
    assert type(trained).__name__ == pipeline and trained.class_names == ["ant", "bee", "cow"]
    assert trained.transformer.config.num_classes == 3
    assert {name: value.shape for name, value in trained.transformer.state_dict().items()} == {
        name: value.shape for name, value in first.transformer.state_dict().items()
    }
    table = load_recipe(path, TokenRecipe)
    untrained = begin_training(table, token_settings(table), made / f"{pipeline}-tokens", (), None, "cpu")
    with torch.no_grad():
        before = untrained.report(0, tmp_path)[FIGURE]
    assert losses_in(tmp_path / "run")[-1] < 0.95 * before
    assert trained("bee", output_type="pt").images.isfinite().all()


@pytest.mark.every(2)
@pytest.mark.parametrize("pipeline", FAMILIES)
def test_every_family_trains_in_mixed_precision(made, tmp_path, pipeline, monkeypatch):
    path = recipe(tmp_path, pipeline, steps=2)
    train(path, made / f"{pipeline}-tokens", tmp_path / "float32")
    monkeypatch.setattr("arimage.training.tokens.task.fast_dtype", lambda device: torch.bfloat16)
    task = train(path, made / f"{pipeline}-tokens", tmp_path / "half")
    assert next(task.parameters()).dtype == torch.bfloat16
    state = state_of(tmp_path / "half")["weights"]
    assert {master.dtype for master in state["masters"]} == {torch.float32}
    assert losses_in(tmp_path / "half")[-1] == pytest.approx(losses_in(tmp_path / "float32")[-1], rel=0.05)


def test_captions_are_trained_with_the_text_encoder_of_the_tokens(tmp_path):
    pipe = tiny_llamagen.text_pipeline()
    pipe.save_pretrained(tmp_path / "model")
    parquet(tmp_path / "a.parquet", range(6), caption=[f"picture {i}" for i in range(6)])
    encode(pipe, tmp_path / "a.parquet", tmp_path / "tokens", model=str(tmp_path / "model"))
    task = train(recipe(tmp_path), tmp_path / "tokens", tmp_path / "run")
    trained = AutoPipeline.from_pretrained(tmp_path / "run" / "model")
    assert trained.transformer.config.conditioning == "text" and trained.num_classes is None
    text = trained.text_encoder.state_dict()
    assert all(torch.equal(text[name], value) for name, value in pipe.text_encoder.state_dict().items())
    assert task.frozen.network is task.transformer and trained("picture 1", output_type="pt").images.isfinite().all()


# Runs


def state_of(out):
    return torch.load(out / "transformer" / "checkpoint.pt", weights_only=True)


def check_resuming(path, tokens, tmp_path):
    """A run that is killed at step 7 and resumed ends with the weights of a whole one."""
    train(path, tokens, tmp_path / "whole")
    table = load_recipe(path, TokenRecipe)
    task = begin_training(table, token_settings(table, workers=1), tokens, (), None, "cpu")
    plain, calls = task.loss, []

    def stops(step):
        calls.append(step)
        if step == 7:
            raise RuntimeError("killed")
        return plain(step)

    task.loss = stops
    with pytest.raises(RuntimeError, match="killed"):
        # Checkpoints after every step.
        from arimage.training.loop import fit

        fit(
            task,
            task.settings.optimizer,
            tmp_path / "cut" / "transformer",
            about=task.about,
            learning_rate_scales=task.learning_rate_scales,
            checkpoint_every_seconds=0,
        )
    assert state_of(tmp_path / "cut")["step"] == 7
    train(path, tokens, tmp_path / "cut", workers=1)
    for name in ("masters", "averages"):
        one, other = (state_of(tmp_path / run)["weights"][name] for run in ("whole", "cut"))
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_resumed_run_is_the_uninterrupted_one(made, tmp_path):
    check_resuming(recipe(tmp_path), made / "LlamaGenPipeline-tokens", tmp_path)


def test_a_run_is_resumed_with_its_own_data_and_settings_only(made, tmp_path):
    tokens, path = made / "LlamaGenPipeline-tokens", recipe(tmp_path)
    train(path, tokens, tmp_path / "run")
    with pytest.raises(ValueError, match="dropout"):
        train(path, tokens, tmp_path / "run", dropout=0.5)
    # The weights are of the same shapes.
    (tmp_path / "other").mkdir()
    for name, value in (("num_attention_heads", 1), ("dropout", 0.5)):
        changed = recipe(tmp_path / "other", model={**DECODER, name: value})
        with pytest.raises(ValueError, match=f"arguments.{name} = .* and you ask for {value}"):
            train(changed, tokens, tmp_path / "run", steps=14)
    other = class_folders(tmp_path / "other-data", count=2)
    encode(tiny_llamagen.class_pipeline(), other, tmp_path / "tokens", model=str(made / "LlamaGenPipeline"))
    with pytest.raises(ValueError, match="tokens"):
        train(path, tmp_path / "tokens", tmp_path / "run")


def check_processes(path, tokens, folder, module="arimage.cli.main", options=()):
    """Two processes, which call the `main` of a module, end with the weights and the loss of one."""
    pipeline = PIPELINES[load_recipe(path, TokenRecipe).pipeline]
    train(path, tokens, folder / "run1")
    words = ["train", "model", "--tokens", tokens, "--recipe", path, "--device", "cpu", "--batch-size", 2, *options]
    modules = ["arimage.training.tokens.beginning", f"arimage.{pipeline}", module]
    together(modules, *words, "--out", folder / "run2")
    one, two = (state_of(folder / f"run{count}")["weights"]["averages"] for count in (1, 2))
    for a, b in zip(one, two, strict=True):
        # Gradients are averaged in bfloat16 where that is fast, and AdamW divides by their size.
        assert (a - b).abs().mean() < 5e-4 and (a - b).abs().max() < 1e-2
    found = [losses_in(folder / f"run{count}")[-1] for count in (1, 2)]
    assert found[0] == pytest.approx(found[1], abs=5e-3)


@pytest.mark.slow
def test_two_processes_train_as_one(made, tmp_path):
    tokens = made / "LlamaGenPipeline-tokens"
    check_processes(recipe(tmp_path, learning_rate=1e-3), tokens, tmp_path, "training.train_together")
    check_batches(tmp_path / "run2")


@pytest.mark.slow
def test_a_model_that_is_divided_over_two_processes_trains_as_one(made, tmp_path):
    tokens = made / "LlamaGenPipeline-tokens"
    path = recipe(tmp_path, learning_rate=1e-3, muon=["transformer.blocks."])
    check_processes(path, tokens, tmp_path, options=["--fsdp", "--checkpoint-every", 5])
    one, two = (AutoPipeline.from_pretrained(tmp_path / run / "model") for run in ("run1", "run2"))
    ours = two.transformer.state_dict()
    for name, weight in one.transformer.state_dict().items():
        torch.testing.assert_close(ours[name].float(), weight.float(), atol=1e-3, rtol=0)
    # A run that goes on from what was kept.
    whole = state_of(tmp_path / "run2")["weights"]["masters"]
    words = ["train", "model", "--tokens", tokens, "--recipe", path, "--device", "cpu", "--batch-size", 2, "--fsdp"]
    modules = ["arimage.training.tokens.beginning", "arimage.cli.main"]
    together(modules, *words, "--out", tmp_path / "run2", "--resume-from", "checkpoint-5")
    for a, b in zip(whole, state_of(tmp_path / "run2")["weights"]["masters"], strict=True):
        assert torch.equal(a, b)


def test_accumulated_batches_are_one_large_batch(made, tmp_path):
    tokens = made / "LlamaGenPipeline-tokens"
    settings = {"steps": 4, "learning_rate": 1e-3}
    train(recipe(tmp_path, **settings), tokens, tmp_path / "whole", batch_size=4, dropout=0.0)
    train(recipe(tmp_path, **settings, accumulate=2), tokens, tmp_path / "parts", batch_size=2, dropout=0.0)
    one, other = (state_of(tmp_path / run)["weights"]["masters"] for run in ("whole", "parts"))
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=0)


# Starting from a trained model


def test_a_trained_model_is_trained_further(made, tmp_path):
    tokens, base = made / "LlamaGenPipeline-tokens", made / "LlamaGenPipeline"
    shutil.copytree(tokens, tmp_path / "tokens")
    index = json.loads((tmp_path / "tokens" / "tokens.json").read_text())
    # As many classes as the model has: all of its weights are kept.
    index |= {"num_classes": 10, "classes": None}
    (tmp_path / "tokens" / "tokens.json").write_text(json.dumps(index))
    path = recipe(tmp_path, learning_rate=1e-6)
    train(path, tmp_path / "tokens", tmp_path / "same", start_from=str(base))
    before = AutoPipeline.from_pretrained(base)
    after = AutoPipeline.from_pretrained(tmp_path / "same" / "model", dtype=torch.float32)
    for name, weight in before.transformer.state_dict().items():
        torch.testing.assert_close(after.transformer.state_dict()[name], weight, atol=2e-3, rtol=1e-2)
    train(path, tokens, tmp_path / "new", start_from=str(base))
    new = AutoPipeline.from_pretrained(tmp_path / "new" / "model", dtype=torch.float32)
    assert new.num_classes == 3 and new.class_names == ["ant", "bee", "cow"] and new.drafter is None
    torch.testing.assert_close(new.transformer.head.weight, before.transformer.head.weight, atol=2e-3, rtol=1e-2)


def test_the_tokenizer_of_a_model_that_was_saved_in_bfloat16_is_known(made):
    pipe = AutoPipeline.from_pretrained(made / "LlamaGenPipeline", dtype=torch.bfloat16)
    check_fits(pipe, TokenCache(made / "LlamaGenPipeline-tokens"), "another one")


def test_classes_that_a_model_has_keep_their_embeddings(made, tmp_path):
    cache = TokenCache(made / "LlamaGenPipeline-tokens")
    pipe = tiny_llamagen.class_pipeline()
    pipe.name_classes(dict(enumerate(["cow", "ant", *"abcdefghi"[: pipe.num_classes - 2]])))
    pipe.decoding = "eagle"
    new = with_classes(pipe, cache)
    # Its drafter knows other classes.
    assert new.class_names == ["ant", "bee", "cow"] and isinstance(new.decoding, AutoregressiveDecoding)
    before, after = (one.transformer.state_dict() for one in (pipe, new))
    (key,) = [name for name in before if before[name].shape != after[name].shape]
    assert all(torch.equal(before[name], after[name]) for name in before if name != key)
    assert torch.equal(after[key][0], before[key][1]) and torch.equal(after[key][2], before[key][0])
    assert not (after[key][1] == before[key]).all(-1).any()
    with pytest.raises(ValueError, match="which keeps the model's 10 classes, .'cow', 'ant', "):
        with_classes(pipe, cache, adapter=True)
    # As many classes without names are its own.
    for count, names in ((pipe.num_classes, pipe.class_names), (3, None)):
        cache.index = replace(cache.index, classes=None, num_classes=count)
        assert with_classes(pipe, cache).class_names == names


def test_defaults_of_a_model_are_those_of_what_it_becomes(made, tmp_path):
    table = '[generation.sampling]\norder = "raster"\ntop_k = 3\n[generation.decoding]\nname = "ar"'
    path, tokens = recipe(tmp_path, "ARPGPipeline", training=table, steps=1), made / "ARPGPipeline-tokens"
    train(path, tokens, tmp_path / "first")
    # A recipe without defaults trains it further.
    path = recipe(tmp_path, "ARPGPipeline", steps=1)
    train(path, tokens, tmp_path / "second", start_from=str(tmp_path / "first" / "model"))
    for run in ("first", "second"):
        pipe = AutoPipeline.from_pretrained(tmp_path / run / "model")
        assert (pipe.order, pipe.generation_config["top_k"]) == ("raster", 3)


def test_samples_by_a_decoding_that_does_not_run_are_refused_before_any_step(made, tmp_path):
    path = recipe(tmp_path, training='[generation.decoding]\nname = "eagle"')
    with pytest.raises(ValueError, match="samples are generated by eagle.*, and it has no drafter"):
        train(path, made / "LlamaGenPipeline-tokens", tmp_path / "run")


def test_more_classes_than_the_memory_holds_are_refused(made, tmp_path):
    tokens = shutil.copytree(made / "LlamaGenPipeline-tokens", tmp_path / "tokens")
    index = json.loads((tokens / "tokens.json").read_text()) | {"num_classes": 2**39, "classes": None}
    (tokens / "tokens.json").write_text(json.dumps(index))
    for start_from in (None, str(made / "LlamaGenPipeline")):
        with pytest.raises(ValueError, match="the weights take .* GB, and this machine has"):
            train(recipe(tmp_path), tokens, tmp_path / "run", start_from=start_from)


@pytest.mark.parametrize("others", [["ant", "bee"], ["bee", "cow", "dog"], ["ant", "bee", "cow", "dog"], None, "text"])
def test_heldout_tokens_of_other_classes_are_refused_before_any_step(made, tmp_path, others):
    pipe, tokens = tiny_llamagen.class_pipeline(), made / "LlamaGenPipeline-tokens"
    if isinstance(others, list):
        encode(pipe, class_folders(tmp_path / "data", others), tmp_path / "held")
    else:
        column = {"caption": ["a", "b", "c"]} if others else {"label": [0, 1, 2]}
        parquet(tmp_path / "data.parquet", range(3), **column)
        encode(pipe, tmp_path / "data.parquet", tmp_path / "held")
    with pytest.raises(ValueError, match="held holds tokens of .*(classes|captions), .*: encode it with the same"):
        train(recipe(tmp_path), tokens, tmp_path / "run", heldout=[tmp_path / "held"])
    assert not (tmp_path / "run").exists()


# Each network, whole or by an adapter. Those of Emu3 and Anole are of the kind of Janus and Lumina.
QUICK = {("janus", 0), ("lumina", 2), ("randar", 0), ("lpd", 2), ("rar-class", 0)}


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("family", "rank"),
    [
        pytest.param(family, rank, marks=() if (family, rank) in QUICK else pytest.mark.slow)
        for family in ("janus", "emu3", "lumina", "anole", "randar", "lpd", "rar-class")
        for rank in (0, 2)
    ],
)
def test_other_families_are_trained_further(tmp_path, family, rank):
    pipe, base = EVERY[family](), tmp_path / "model"
    pipe.save_pretrained(base)
    classes = pipe.num_classes is not None
    if classes:
        data = class_folders(tmp_path / "data", [f"n{i}" for i in range(pipe.num_classes)], 1)
    else:
        data = tmp_path / "a.parquet"
        parquet(data, range(4), caption=["a red heart", "a cat", "a dog", "a book"])
    encode(pipe, data, tmp_path / "tokens", model=str(base))
    path = recipe(tmp_path, steps=3, learning_rate=1e-3)
    task = train(path, tmp_path / "tokens", tmp_path / "run", start_from=str(base), lora_rank=rank)
    if rank:
        pipe.load_lora_weights(tmp_path / "run" / "adapter")
    else:
        pipe = AutoPipeline.from_pretrained(tmp_path / "run" / "model", dtype=torch.float32)
    network = pipe.components[task.key].state_dict()
    before = EVERY[family]().components[task.key].state_dict()
    assert rank or any(not torch.equal(network[name], before[name].half().float()) for name in before)
    given = {"class_labels": 1} if classes else {"prompt": "a cat"}
    assert pipe(**given, output_type="pt").images.isfinite().all()


@pytest.mark.slow
def test_published_files_are_converted_and_trained_further(tmp_path, monkeypatch):
    c2i, model = tiny_llamagen.FIXTURES / "c2i", tmp_path / "model"

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["arimage", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert not end.value.code

    files = ["--tokenizer", c2i / "vq_ds4_c2i.pt", "--transformer", c2i / "c2i_tiny.pt", "--num-heads", 4]
    run("convert", "llamagen", *files, "--image-size", 24, "--out", model)
    data = class_folders(tmp_path / "data")
    run("train", "tokens", "--data", data, "--model", model, "--out", tmp_path / "tokens", "--device", "cpu")
    words = ["--recipe", recipe(tmp_path), "--start-from", model, "--out", tmp_path / "run", "--device", "cpu"]
    run("train", "model", "--tokens", tmp_path / "tokens", *words)
    trained = AutoPipeline.from_pretrained(tmp_path / "run" / "model")
    assert trained.class_names == ["ant", "bee", "cow"] and trained("cow", output_type="pt").images.isfinite().all()


def encode_ten_classes(made, tmp_path):
    """Write the tokens of as many classes as those of a tiny model, whose folder it returns."""
    base, data = made / "LlamaGenPipeline", class_folders(tmp_path / "data", list("abcdefghij"), 1)
    encode(tiny_llamagen.class_pipeline(), data, tmp_path / "tokens", model=str(base))
    return base


def test_an_adapter_is_trained_by_the_same_command(made, tmp_path, capsys, monkeypatch):
    pytest.importorskip("peft", reason="the extra `lora` is not installed")
    base = encode_ten_classes(made, tmp_path)
    words = [
        "train",
        "model",
        "--tokens",
        tmp_path / "tokens",
        "--recipe",
        recipe(tmp_path),
        "--out",
        tmp_path / "run",
    ]
    words += ["--start-from", base, "--lora-rank", 2, "--device", "cpu", "--steps", 5, "--push-to-hub", "me/adapter"]
    pushed = []
    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", lambda hub, name, **given: pushed.append((name, given)))
    monkeypatch.setattr("huggingface_hub.HfApi.upload_folder", lambda hub, **given: pushed.append(given))
    monkeypatch.setattr(sys, "argv", ["arimage", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code and capsys.readouterr().out.strip().endswith("adapter")
    made_first = ("me/adapter", {"private": False, "exist_ok": True})
    assert pushed == [made_first, {"repo_id": "me/adapter", "folder_path": tmp_path / "run" / "adapter"}]
    pipe = AutoPipeline.from_pretrained(base)
    plain = pipe(class_labels=3, generator=torch.Generator().manual_seed(0), output_type="pt").images
    pipe.load_lora_weights(tmp_path / "run" / "adapter")
    assert any(weight.abs().max() > 0 for name, weight in pipe.transformer.named_parameters() if "lora_B" in name)
    adapted = pipe(class_labels=3, generator=torch.Generator().manual_seed(0), output_type="pt").images
    assert not torch.equal(adapted, plain) and not (tmp_path / "run" / "model").exists()


@pytest.mark.slow
def test_a_compiled_training_learns_the_same(made, tmp_path):
    tokens, table = (
        made / "LlamaGenPipeline-tokens",
        load_recipe(recipe(tmp_path, steps=3, learning_rate=1e-3), TokenRecipe),
    )
    for compile in (False, True):
        task = begin_training(table, token_settings(table), tokens, (), None, "cpu", compile=compile)
        task.fit(tmp_path / f"run{compile}")
    found = [losses_in(tmp_path / f"run{compile}")[-1] for compile in (False, True)]
    assert found[0] == pytest.approx(found[1], abs=1e-3)


# Plans and refusals


@pytest.mark.parametrize("name", [name for name in recipes("pipeline") if name.startswith("imagenet")])
def test_recipes_of_the_papers_have_their_sizes(made, name, monkeypatch):
    table = load_recipe(name, TokenRecipe)
    expected = {"imagenet-llamagen-b": (111e6, 300), "imagenet-var-d16": (310e6, 200), "imagenet-arpg-l": (320e6, 400)}
    cache = TokenCache(made / f"{table.pipeline}-tokens")
    source = AutoPipeline.from_pretrained(made / table.pipeline)
    # The shape of ImageNet's tokens in the place of those of the tiny model.
    published = {"vocab_size": 4096 if "var" in name else 16384, "grid_size": 16}
    published |= {"scales": (1, 2, 3, 4, 5, 6, 8, 10, 13, 16), "codebook_dim": 32}
    config = {**source.transformer.config, **published}
    cache.index.__dict__.update(num_classes=1000, shape=(680 if "var" in name else 256,), classes=None)
    cache._ends = np.array([1_281_167])
    vq = type(source.vq).from_config(
        {**source.vq.config, "codebook_size": published["vocab_size"]}
        | ({"scales": published["scales"], "codebook_dim": 32} if "var" in name else {})
    )
    of_tokens = type(
        "Source", (), {"components": {"transformer": type("T", (), {"config": _Config(config)}), "vq": vq}}
    )
    monkeypatch.setattr(AutoPipeline, "from_pretrained", lambda name, dtype: of_tokens)
    plan = plan_of(table, token_settings(table), cache)
    parameters, epochs = expected[name]
    assert abs(plan["parameters"] / parameters - 1) < 0.02 and abs(plan["epochs"] - epochs) < 1
    images = plan["steps"] * plan["images per step and process"]
    assert plan["FLOP"] == 6 * plan["parameters"] * images * cache.index.shape[0]


def test_the_plan_of_an_adapter_counts_its_weights(made, tmp_path):
    pytest.importorskip("peft", reason="the extra `lora` is not installed")
    base = encode_ten_classes(made, tmp_path)
    table = load_recipe(recipe(tmp_path), TokenRecipe)
    settings = token_settings(table, lora_rank=2, lora_targets="all")
    plan = plan_of(table, settings, TokenCache(tmp_path / "tokens"), str(base))
    task = begin_training(table, settings, tmp_path / "tokens", (), str(base), "cpu")
    assert plan["trained parameters"] == sum(weight.numel() for weight in task.parameters())
    assert plan["parameters"] == sum(p.numel() for p in tiny_llamagen.class_pipeline().transformer.parameters())


class _Config(dict):
    __getattr__ = dict.__getitem__


def test_odd_trainings_are_refused(made, tmp_path):
    tokens = made / "LlamaGenPipeline-tokens"
    for change, message in (
        ({"pipeline": "JanusPipeline", "model": {}}, "is not trained from random weights"),
        ({"pipeline": "Nothing", "model": {}}, "pipeline is 'Nothing': give one of"),
        ({"model": {"hidden": 3}}, "hidden is not a setting"),
        ({"learning_rate": -1}, "learning_rate"),
        ({"training": "epochs = 3"}, "epochs"),
        ({"training": "lora_rank = 2"}, "needs a trained model: give --start-from"),
    ):
        with pytest.raises(ValueError, match=message):
            train(recipe(tmp_path, **change), tokens, tmp_path / "run")
    with pytest.raises(ValueError, match="unknown recipe x: give a TOML file or one of imagenet"):
        load_recipe("x", TokenRecipe)
    tiny_llamagen.text_pipeline().save_pretrained(tmp_path / "text")
    with pytest.raises(ValueError, match="the tokens have classes, and the model needs captions"):
        train(recipe(tmp_path), tokens, tmp_path / "run", start_from=str(tmp_path / "text"))
    tiny_llamagen.class_pipeline(seed=1).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="the model to start from has another one"):
        train(recipe(tmp_path), tokens, tmp_path / "run", start_from=str(tmp_path / "other"))
    with pytest.raises(ValueError, match="holds tokens of another image tokenizer or size"):
        train(recipe(tmp_path), tokens, tmp_path / "run", heldout=[made / "VARPipeline-tokens"])
