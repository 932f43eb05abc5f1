"""`arimage train lora`: captions, losses of every family, reports, and resuming."""

import json
import sys

import numpy as np
import pytest
import torch
from families import EVERY, having, quick, seeded
from PIL import Image
from profiles import WIDE, as_shown
from safetensors.torch import load_file

from arimage.cli import main as cli
from arimage.training.adapters import generated
from arimage.training.adapters.generated import generate_prior
from arimage.training.adapters.pairs import Pairs, load_pairs
from arimage.training.losses import losses_of


pytest.importorskip("peft", reason="the extra `lora` is not installed")
pytest.importorskip("matplotlib", reason="the extra `train` is not installed")
from arimage.training.adapters.lora import (  # noqa: E402
    LOOKS,
    LoraSettings,
    LoraTask,
    looks_of,
    target_names,
    warning_of_poor_pictures,
)


LANGUAGE = ["janus", "emu3", "lumina", "anole"]
# Language models whose losses are those of Lumina, as `test_teacher_forced_logits_of_language_models` says of each.
ALIKE = ("janus", "emu3", "anole")
QUICK = LoraSettings(steps=6, batch_size=3, learning_rate=1e-2, rank=4)


def pairs(pipe, count=4, seed=0):
    height, width = pipe.image_sizes[0]
    images = torch.randint(256, (count, 3, height, width), dtype=torch.uint8, generator=seeded(seed))
    names = ["a red heart", "cat", "tree", "a blue book", "house"] if pipe.num_classes is None else list("31479")
    return Pairs(images, [names[i % 5] for i in range(count)])


def task_of(pipe, settings=QUICK, **more):
    return LoraTask(pipe, pairs(pipe), settings, base="tiny", **more)


# Pictures and captions


def write_pictures(folder, names=("one", "two")):
    folder.mkdir()
    for i, name in enumerate(names):
        Image.fromarray(np.full((8, 8, 3), 40 * i, np.uint8)).save(folder / f"{name}.png")
    return folder


def test_folders_of_both_layouts_and_parquet(tmp_path):
    notes, listed = write_pictures(tmp_path / "notes"), write_pictures(tmp_path / "listed")
    for name in ("one", "two"):
        (notes / f"{name}.txt").write_text(f" {name} \n")
    rows = [{"file_name": f"{name}.png", "text": name} for name in ("two", "one")]
    (listed / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    import pyarrow as pa
    import pyarrow.parquet as pq

    data = {"image": [{"bytes": (notes / f"{name}.png").read_bytes()} for name in ("one", "two")]}
    pq.write_table(pa.table(data | {"text": ["one", "two"]}), tmp_path / "set.parquet")
    for path in (notes, listed, tmp_path / "set.parquet"):
        found = load_pairs(path, (4, 6))
        assert found.captions == ["one", "two"]
        assert found.images.shape == (2, 3, 4, 6) and found.images[1].unique().tolist() == [40]
    assert load_pairs(notes, (4, 4), "{} in ink").captions == ["one in ink", "two in ink"]


def test_colours_of_pictures_are_those_of_their_profile(tmp_path):
    colours = Image.new("RGB", (8, 8), (60, 200, 60))
    colours.save(tmp_path / "a.jpg", quality=100, subsampling=0, icc_profile=WIDE)
    shown = as_shown(Image.open(tmp_path / "a.jpg"), WIDE)
    assert torch.equal(load_pairs(tmp_path, (8, 8), "x").images[0], torch.from_numpy(np.array(shown)).permute(2, 0, 1))


def test_a_picture_of_several_captions_is_learned_with_each(tmp_path):
    folder = write_pictures(tmp_path / "some")
    rows = [("one.png", "one"), ("two.png", "two"), ("one.png", "the first")]
    lines = [json.dumps({"file_name": file, "text": text}) + "\n" for file, text in rows]
    (folder / "metadata.jsonl").write_text("".join(lines))
    found = load_pairs(folder, (4, 4))
    assert found.captions == ["one", "the first", "two"]
    assert [int(image.max()) for image in found.images] == [0, 0, 40]
    (folder / "metadata.jsonl").write_text("".join([*lines, '{"file_name": "two.png", "text": ""}\n']))
    with pytest.raises(ValueError, match="has an empty caption"):
        load_pairs(folder, (4, 4))


def test_missing_captions_and_pictures_are_named(tmp_path, caplog):
    folder = write_pictures(tmp_path / "some")
    for caption in (None, "{} in ink"):
        with pytest.raises(ValueError, match="images without captions or classes .one.png"):
            load_pairs(folder, (4, 4), caption)
    assert load_pairs(folder, (4, 4), "ink").captions == ["ink", "ink"]
    (folder / "three.heic").touch()
    (folder / "four.png").symlink_to(folder / "nowhere.png")
    assert load_pairs(folder, (4, 4), "ink").captions == ["ink", "ink"]
    assert "three.heic" in caplog.text and "four.png" in caplog.text
    (folder / "four.png").unlink()
    (folder / "metadata.jsonl").write_text('{"file_name": "none.png", "text": "x"}\n')
    with pytest.raises(ValueError, match="line 1 of .* names none.png"):
        load_pairs(folder, (4, 4))
    (folder / "one.txt").write_text("one")
    with pytest.raises(ValueError, match="keep one of the two"):
        load_pairs(folder, (4, 4))
    with pytest.raises(ValueError, match="is not a data set"):
        load_pairs(tmp_path / "nowhere", (4, 4))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no images"):
        load_pairs(tmp_path / "empty", (4, 4))


# Losses


@pytest.mark.every(2)
@pytest.mark.parametrize("family", LANGUAGE)
def test_teacher_forced_logits_of_language_models(family):
    pipe = EVERY[family]()
    with torch.no_grad():
        model = pipe.prepare(prompt=["a red heart", "cat"], guidance_scale=2.0).model
        tokens = torch.randint(model.vocab_size, (2, model.num_tokens), generator=seeded(0))
        cache, first = model.prefill(2)
        places = torch.arange(model.num_tokens - 1).expand(2, -1)
        logits = torch.cat([first[:, :, None], model.forward(tokens[:, :-1], places, cache)], dim=2)
        for unconditional in ([False, False], [True, False]):
            rows = torch.stack([logits[int(flag), i] for i, flag in enumerate(unconditional)])
            found = model.predict(tokens, torch.tensor(unconditional))
            torch.testing.assert_close(found, rows.float(), rtol=1e-4, atol=1e-4)


# Not Emu3.5, which gives its tokens positions of their own, nor Infinity, whose tokens are bits.
@pytest.mark.every(3)
@pytest.mark.parametrize("family", [*quick(having("trained"), ALIKE), "latent-llama"])
def test_every_family_learns_its_pictures(family, tmp_path):
    pipe = EVERY[family]()
    task = task_of(pipe, LoraSettings(steps=12, batch_size=3, learning_rate=3e-2, rank=4, caption_dropout=0.0))
    frozen = {name: value.clone() for name, value in task.component.it.state_dict().items() if "lora_" not in name}

    def loss():
        count, generator = task.tokens.shape[1], seeded(0)
        dropped = torch.zeros(len(task.data), dtype=torch.bool)
        with torch.no_grad():
            return float(task.frozen.losses(task.data.captions, task.tokens, dropped, count, generator).mean())

    before = loss()
    task.fit(tmp_path)
    assert loss() < before - 0.1
    for name, value in frozen.items():
        assert torch.equal(value, task.component.it.state_dict()[name])
    # The files hold what was trained, its scale included.
    again = EVERY[family]()
    again.load_lora_weights(tmp_path / "last")
    with torch.no_grad():
        other = losses_of(again, task.data.captions[0])(
            task.data.captions,
            task.tokens,
            torch.zeros(len(task.data), dtype=torch.bool),
            task.tokens.shape[1],
            seeded(0),
        )
    assert float(other.mean()) == pytest.approx(loss(), abs=1e-4)
    assert (tmp_path / "best" / "pytorch_lora_weights.safetensors").is_file()
    assert Image.open(tmp_path / "samples.png").size[0] > 0


@pytest.mark.every(2)
@pytest.mark.parametrize("family", ["mar", "infinitystar", "infinity", "glm-image", "mammothmoda2"])
def test_families_that_cannot_be_trained_are_named(family):
    pipe = EVERY[family]()
    with pytest.raises(ValueError, match="cannot be trained here"):
        losses_of(pipe, "3" if pipe.num_classes else "a red heart")


def test_an_interrupted_prior_goes_on_and_another_model_begins_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(generated, "CHUNK", 2)
    pipe, file = EVERY["llamagen-text"](), tmp_path / "prior.safetensors"
    captions, calls, most = ["red heart", "blue book", "tree", "cat", "book"], [], 1
    whole = generate_prior(pipe, captions, tmp_path / "whole.safetensors", seed=0)

    def counted(**arguments):
        if len(calls) == most:
            raise KeyboardInterrupt
        calls.append(arguments["prompt"][0])
        return pipe(**arguments)

    monkeypatch.setattr(generated, "quiet", lambda pipe: counted)
    with pytest.raises(KeyboardInterrupt):
        generate_prior(pipe, captions, file, seed=0)
    most = 9
    # The second finds all of them.
    for _ in range(2):
        assert torch.equal(generate_prior(pipe, captions, file, seed=0).tokens, whole.tokens)
    assert calls == ["red heart", "tree", "book"]
    with torch.no_grad():
        next(pipe.transformer.parameters()).add_(1)
    generate_prior(pipe, captions, file, seed=0)
    assert calls[3:] == ["red heart", "tree", "book"]
    file.write_bytes(b"damaged")
    with pytest.raises(ValueError, match="delete it, and its pictures are generated again"):
        generate_prior(pipe, captions, file, seed=0)


def test_prior_pictures_of_continuous_tokens_are_refused(tmp_path):
    with pytest.raises(ValueError, match="give pictures as --prior"):
        generate_prior(EVERY["latent-llama"](), ["3"], tmp_path / "prior.safetensors", seed=0)


@pytest.mark.every(2)
@pytest.mark.parametrize("family", quick(having("trained"), ALIKE))
def test_what_a_model_generated_is_what_its_losses_know(family, tmp_path):
    pipe = EVERY[family]()
    pipe.generation_config.update(guidance_scale=1.0)
    captions = pairs(pipe).captions[:3]
    prior = generate_prior(pipe, captions, tmp_path / "prior.safetensors", seed=0)
    assert torch.equal(generate_prior(pipe, captions, tmp_path / "prior.safetensors", seed=0).tokens, prior.tokens)
    losses, count = losses_of(pipe, captions[0]), prior.tokens.shape[1]

    def likely(tokens):
        """The loss of greedy tokens is the smallest that any tokens have, place by place, given those before."""
        with torch.no_grad():
            return losses(captions, tokens, torch.zeros(3, dtype=torch.bool), count, seeded(0))

    encoded = losses.tokens(torch.zeros(3, 3, *pipe.image_sizes[0]))
    assert prior.tokens.shape == encoded.shape and prior.tokens.dtype == encoded.dtype
    pipe.generation_config.update(temperature=1e-3)
    sharp = generate_prior(pipe, captions, tmp_path / "sharp.safetensors", seed=0).tokens
    assert likely(sharp).mean() < likely(prior.tokens).mean() - 0.1
    # In another order than that of generation, greedy tokens are no longer the likeliest ones.
    if not pipe.abilities.accepts("order") and pipe.abilities.kind != "masked_tokens":
        others = (sharp + 1) % (int(sharp.max()) + 1)
        assert (likely(sharp)[:, 0] < likely(others)[:, 0]).all()


def test_targets_leave_out_what_generates_no_images():
    names = target_names(EVERY["janus"]().model, "attention")
    assert names and all("language_model" in name for name in names)
    attention, every = (target_names(EVERY["llamagen-text"]().transformer, each) for each in ("attention", "all"))
    assert set(attention) < set(every) and "caption_projection.fc1" in every and "head" in every


# Runs


def run(pipe, out, settings, stop_at=None):
    task = task_of(pipe, settings, prior=pairs(pipe, seed=1))
    if stop_at is not None:
        loss = task.loss

        def stopped(step):
            if step == stop_at:
                import os
                import signal

                os.kill(os.getpid(), signal.SIGTERM)
            return loss(step)

        task.loss = stopped
        with pytest.raises(KeyboardInterrupt):
            task.fit(out)
    else:
        task.fit(out)
    return {name: value for name, value in task.component.it.state_dict().items() if "lora_" in name}


@pytest.mark.slow
def test_a_resumed_run_ends_as_an_uninterrupted_one(tmp_path):
    settings = LoraSettings(steps=6, batch_size=3, learning_rate=1e-2, rank=4)
    whole = run(EVERY["llamagen-text"](), tmp_path / "whole", settings)
    run(EVERY["llamagen-text"](), tmp_path / "parts", settings, stop_at=2)
    parts = run(EVERY["llamagen-text"](), tmp_path / "parts", settings)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert any(value.abs().sum() > 0 for name, value in whole.items() if "lora_B" in name)


def test_the_best_adapter_is_kept(tmp_path):
    task = task_of(EVERY["llamagen-text"]())
    file = tmp_path / "best" / "pytorch_lora_weights.safetensors"
    task.frozen.losses = lambda captions, *_: torch.full((len(captions), 4), 1.0)
    task.report(1, tmp_path)
    first = file.read_bytes()
    with torch.no_grad():
        for weight in task.weights:
            weight += 1
    task.frozen.losses = lambda captions, *_: torch.full((len(captions), 4), 1.5)
    task.report(2, tmp_path)
    assert file.read_bytes() == first != (tmp_path / "last" / file.name).read_bytes()
    assert task.best[1] == 1


def test_what_the_tokenizer_cannot_draw_is_said(tmp_path):
    pipe = EVERY["llamagen-text"]()
    task = task_of(pipe, prior=pairs(pipe, seed=1))
    psnr, own = task.report_reconstructions(tmp_path)
    assert psnr > 0 and own is not None and own > 0
    assert {path.name for path in tmp_path.iterdir()} == {
        "reconstructions-pictures.png",
        "reconstructions-prior.png",
    }
    assert warning_of_poor_pictures(20.0, 23.9) is None and warning_of_poor_pictures(20.0, None) is None
    assert "20.0 dB" in str(warning_of_poor_pictures(20.0, 24.1))
    assert len({looks_of(psnr) for psnr in (-5.0, 19.9, 20.0, 26.9, 27.0, 60.0)}) == 3


def test_names_of_classes_may_be_numbers_or_lists_of_synonyms(tmp_path):
    pipe = EVERY["llamagen-class"]()
    # Folders with numbers, in the order of their names.
    names = sorted(map(str, range(pipe.num_classes)), reverse=True)[:-1] + ["tench, Tinca tinca"]
    pipe.name_classes(dict(enumerate(names)))
    data = pairs(pipe, count=6)
    data.captions = [*names[:5], names[-1]]
    task = LoraTask(pipe, data, QUICK, base="tiny", prompts=["tench", names[1]])
    given = dict(zip(map(bytes, data.pictures()), range(6), strict=True))
    for part in (task.data, task.heldout):
        ids = [given[picture] for picture in part.pictures()]
        assert part.captions == [str(len(names) - 1 if one == 5 else one) for one in ids]
    task.save(tmp_path / "best")
    card = (tmp_path / "best" / "README.md").read_text()
    assert any(f'"{name}"' in card for name in data.captions)
    for captions, prompts in ((["none"] * 6, []), (data.captions, ["none"]), (["1234"] * 6, [])):
        with pytest.raises(ValueError, match="give class_labels|give one or more ids"):
            LoraTask(EVERY["llamagen-class"](), Pairs(data.images, captions), QUICK, base="tiny", prompts=prompts)


def test_classes_without_names_are_no_captions(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    write_pictures(tmp_path / "data")
    images = [{"bytes": (tmp_path / "data" / f"{name}.png").read_bytes()} for name in ("one", "two")]
    pq.write_table(pa.table({"image": images, "label": [3, 1]}), tmp_path / "set.parquet")
    assert load_pairs(tmp_path / "set.parquet", (4, 4), numbers=True).captions == ["3", "1"]
    assert load_pairs(tmp_path / "set.parquet", (4, 4), "ink").captions == ["ink", "ink"]
    for caption in (None, "{} in ink"):
        with pytest.raises(ValueError, match="classes without names"):
            load_pairs(tmp_path / "set.parquet", (4, 4), caption)


def test_a_rank_wider_than_the_layers_and_a_decoding_that_does_not_run_are_refused_before_training():
    for settings, more, name in (
        (LoraSettings(rank=1000), {}, "rank is 1000"),
        (QUICK, {"decoding": "next-scale"}, "next-scale"),
        (QUICK, {"decoding": "sjd:window=0"}, "window is 0"),
    ):
        with pytest.raises(ValueError, match=name):
            task_of(EVERY["llamagen-text"](), settings, **more)


def test_the_command_trains_an_adapter_that_generates(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    EVERY["llamagen-text"]().save_pretrained("model")
    folder = write_pictures(tmp_path / "data", ("one", "two", "three"))
    arguments = ["train", "lora", "--model", "model", "--data", str(folder), "--caption", "cat", "--out", "run"]

    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["arimage", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        found = capsys.readouterr()
        return end.value.code, found.out + found.err

    small = ["--steps", "2", "--rank", "2", "--device", "cpu", "--dtype", "float32", "--batch-size", "2"]
    code, out = command(*arguments, *small)
    assert code == 0 and "dB: see run/reconstructions-pictures.png" in out and "held-out loss" in out
    assert any(f"these pictures {words}, at" in out for words in LOOKS.values())
    assert command("generate", "cat", "--model", "model", "--lora", "run/best:0.5", "--out", "cat.png")[0] == 0
    for option, value, name in (
        ("--rank", "0", "rank"),
        ("--alpha", "nan", "alpha"),
        ("--lr", "inf", "learning_rate"),
        ("--report-every", "nan", "--report-every"),
        ("--report-every", "-1", "--report-every"),
        ("--out", "cat.png", "--out"),
    ):
        code, said = command(*arguments, *small, option, value)
        assert code == 2 and said.startswith(f"arimage: {name}") and said.count("\n") == 1
    # The run above is over.
    before = (tmp_path / "run" / "checkpoint.pt").read_bytes()
    for option, value, name in (
        ("--lr", "0.5", "learning_rate"),
        ("--seed", "3", "seed"),
        ("--alpha", "5", "alpha"),
        ("--caption", "house", "data.captions"),
        ("--dtype", "bfloat16", "dtype"),
        ("--batch-size", "3", "batch_size"),
        ("--steps", "1", "steps"),
    ):
        code, said = command(*arguments, *small, option, value)
        assert code == 2 and name in said and "another --out" in said and "dB" not in said
    assert (tmp_path / "run" / "checkpoint.pt").read_bytes() == before
    assert "at step" in command(*arguments, *small, "--steps", "3", "--report-every", "7", "--decoding", "ar")[1]
    assert torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["step"] == 3
    (tmp_path / "old.txt").write_text("cat\nhouse\n")
    old = ["--prior-prompts", "old.txt", "--out", "next-to-old"]
    assert command(*arguments, *small, *old)[0] == 0
    rows = [json.loads(line) for line in (tmp_path / "next-to-old" / "log.jsonl").read_text().splitlines()]
    assert "held-out loss" in rows[-1] and (tmp_path / "next-to-old" / "prior.safetensors").is_file()
    assert command(*arguments, *small, *old, "--prior", str(folder))[0] == 2


def test_the_options_of_the_command(tmp_path, monkeypatch):
    EVERY["llamagen-text"]().save_pretrained(tmp_path / "model")
    folder, asked = write_pictures(tmp_path / "data", ("one", "two", "three")), []
    (tmp_path / "prompts.txt").write_text("one\ntwo\n")
    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", lambda hub, name, **given: asked.append((name, given)))
    monkeypatch.setattr("huggingface_hub.HfApi.upload_folder", lambda hub, **given: asked.append(hub.token))
    given = {
        **{"model": tmp_path / "model", "data": folder, "caption": "cat", "prior": folder, "prior-share": 0.25},
        **{"steps": 4, "rank": 2, "alpha": 4, "targets": "all", "lr": 1e-2, "batch-size": 2, "caption-dropout": 0},
        **{"short-share": 0, "gradient-accumulation": 2, "max-grad-norm": 0.5, "seed": 3, "device": "cpu"},
        **{"checkpoint-every": 1, "checkpoints-total-limit": 2, "validation-prompts": tmp_path / "prompts.txt"},
        **{"push-to-hub": "me/adapter", "hub-token": "hf_x", "dtype": "float32", "out": tmp_path / "run"},
    }

    def command(**changes):
        words = [f"--{name}={value}" for name, value in (given | changes).items()]
        monkeypatch.setattr(sys, "argv", ["arimage", "train", "lora", *words, "--private"])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return end.value.code

    write_pictures(tmp_path / "old", ("a", "b", "c", "d"))
    given["prior"], given["prior-prompts"] = tmp_path / "old", tmp_path / "prompts.txt"
    assert command() == 2 and not asked
    del given["prior"]
    assert command() == 0 and asked == [("me/adapter", {"private": True, "exist_ok": True}), "hf_x"]
    said = json.loads((tmp_path / "run" / "settings.json").read_text())
    assert (said["rank"], said["alpha"], said["targets"], said["prior_share"]) == (2, 4.0, "all", 0.25)
    assert (said["optimizer"]["accumulate"], said["optimizer"]["gradient_clip"]) == (2, 0.5)
    # A column for each prompt, a row for the base and each scale.
    sheet = Image.open(tmp_path / "run" / "best" / "samples.png")
    assert 3 * sheet.width == 2 * sheet.height
    kept = sorted(path.stem for path in (tmp_path / "run").glob("checkpoint-[0-9]*.pt"))
    assert kept == ["checkpoint-3", "checkpoint-4"]
    weights = tmp_path / "run" / "last" / "pytorch_lora_weights.safetensors"
    whole = load_file(weights)
    assert command(**{"resume-from": "checkpoint-3"}) == 0
    again = load_file(weights)
    assert whole and all(torch.equal(again[name], weight) for name, weight in whole.items())
