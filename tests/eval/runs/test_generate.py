"""What a run holds, and what is refused."""

import io
import json
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from eval.runs.run_kit import BATCH, COUNT, contents, options, part_of
from PIL import Image
from pipelines.emu3 import tiny as tiny_emu3
from pipelines.infinity import tiny as tiny_infinity
from pipelines.llamagen import tiny as tiny_llamagen
from pipelines.var import tiny as tiny_var

from arimage.decoding import SpeculativeJacobiDecoding
from arimage.eval.runs import estimate, generate
from arimage.eval.runs.generate import generate_batch, make_config, missing_batches, prepare
from arimage.eval.runs.manifest import label_rows, prompt_rows
from arimage.eval.runs.run_folder import read_config, read_results, read_rows
from arimage.pipelines import base
from arimage_emoji.known import KnownCaptions


def test_a_run_has_what_was_asked_and_what_it_cost(models, undisturbed):
    config = read_config(undisturbed)
    assert config["model"] == models["text"] and config["decoding_name"] == "ar" and config["images"] == COUNT
    assert config["source"]["prompts"] == "prompts.jsonl" and len(config["source"]["sha256"]) == 64
    assert config["sampling"] == {"guidance_scale": 1.0, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    rows = read_rows(undisturbed)
    assert [(row["id"], row["prompt"], row["metadata"]) for row in rows] == [
        (i, f"a red heart {i}", {"tag": i}) for i in range(COUNT)
    ]
    results = read_results(undisturbed)
    assert list(results) == list(range(COUNT))
    for id, row in results.items():
        assert row["batch"] == id // BATCH and row["batch_size"] == (2 if id >= 20 else 4)
        assert (row["passes"], row["batch_passes"], row["tokens_per_pass"], row["exact"]) == (16, 16, 1.0, True)
        assert row["seconds"] > 0 and row["warm"] == (id >= BATCH)
    assert len({path.read_bytes() for path in (undisturbed / "images").iterdir()}) == COUNT


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("kind", "text", "decoding", "sampling"),
    [
        ("text", "sjd-coupled:window=6", SpeculativeJacobiDecoding(window=6), {"guidance_scale": 3.0, "top_k": 9}),
        pytest.param("text", "eagle", "eagle", {"temperature": 0.5}, marks=pytest.mark.slow),
        ("text", None, None, {}),
        ("class", "zipar", "zipar", {"top_p": 0.9, "min_p": 0.05}),
        ("scales", "next-scale", "next-scale", {"guidance_scale": 2.0}),
        pytest.param("scales", "code", "code", {}, marks=pytest.mark.slow),
        ("bits", "next-scale", "next-scale", {"guidance_scale": 3.0, "temperature": 0.5}),
        pytest.param("bits", "fastvar", "fastvar", {}, marks=pytest.mark.slow),
    ],
)
def test_images_and_costs_are_those_of_the_pipeline(tmp_path, kind, text, decoding, sampling):
    build = {
        "text": tiny_llamagen.text_pipeline,
        "class": tiny_llamagen.class_pipeline,
        "bits": tiny_infinity.pipeline,
    }
    pipe = build.get(kind, lambda: tiny_var.pipeline("text"))()
    rows = (
        label_rows(range(3), 1, 2)
        if kind == "class"
        else prompt_rows([{"prompt": f"tree {i}"} for i in range(3)], 1, 2)
    )
    config = make_config(pipe, rows, model=kind, source={}, seed=1, batch_size=4, decoding=text, sampling=sampling)
    run = prepare(config, rows, tmp_path)
    for index in reversed(missing_batches(run)):
        generate_batch(run, pipe, index)
    results = read_results(tmp_path)
    assert missing_batches(run) == [] and len(results) == 6
    for some in (rows[:4], rows[4:]):
        key, name = ("class_labels", "class_label") if kind == "class" else ("prompt", "prompt")
        expected = pipe(
            **{key: [row[name] for row in some]},
            generator=[torch.Generator().manual_seed(row["seed"]) for row in some],
            decoding=decoding,
            **sampling,
        )
        passes = (expected.stats.accepted > 0).sum(0)
        tokens = expected.stats.accepted.sum(0)
        for i, row in enumerate(some):
            np.testing.assert_array_equal(Image.open(tmp_path / row["path"]), np.asarray(expected.images[i]))
            result = results[row["id"]]
            assert result["passes"] == passes[i] and result["batch_passes"] == expected.stats.forward_passes
            assert result["tokens_per_pass"] == pytest.approx(float(tokens[i] / passes[i]))
            assert result["exact"] == expected.stats.exact


def test_the_pipeline_and_the_process_stay_as_they_are(tmp_path, monkeypatch):
    pipe, rows = tiny_llamagen.text_pipeline(), prompt_rows([{"prompt": "a tree"}], 0)
    pipe.set_progress_bar_config(desc="mine")
    pipe.known_captions = known = KnownCaptions({"red heart": []})
    seen, warned, threads = [], [], torch.get_num_threads()
    monkeypatch.setattr(base, "_warn_once", warned.append)
    decode_tokens = pipe.decode_tokens
    monkeypatch.setattr(
        type(pipe), "decode_tokens", lambda _, *given: seen.append(torch.get_num_threads()) or decode_tokens(*given)
    )
    config = make_config(pipe, rows, model="m", source={}, seed=0, batch_size=1, decoding="ar")
    config["machine"]["threads"] = threads + 1
    run = prepare(config, rows, tmp_path)
    assert torch.get_num_threads() == threads
    generate_batch(run, pipe, 0)
    estimate.measure_batch(pipe, config, rows)
    assert seen[0] == threads + 1 and torch.get_num_threads() == threads and not warned
    assert pipe.known_captions is known and pipe._progress_bar_config == {"desc": "mine"}
    with pytest.raises(RuntimeError):
        monkeypatch.setattr(type(pipe), "decode_tokens", None)
        monkeypatch.setattr(type(pipe), "__call__", fail)
        generate_batch(run, pipe, 0)
    assert torch.get_num_threads() == threads


def fail(*arguments, **options):
    raise RuntimeError


def test_size_and_negative_prompt_reach_the_model(tmp_path):
    pipe = tiny_emu3.pipeline()
    rows = prompt_rows([{"prompt": "a tree"}] * 2, 0)
    asked = {"model": "m", "source": {}, "seed": 0, "batch_size": 2, "height": 16, "width": 40}
    asked["sampling"] = {"guidance_scale": 4.0}
    images = {}
    for name in (None, "lowres", "bright red"):
        config = make_config(pipe, rows, **asked, negative_prompt=name)
        assert config.get("negative_prompt") == name
        run = prepare(config, rows, tmp_path / str(name))
        generate_batch(run, pipe, 0)
        images[name] = [(run.folder / row["path"]).read_bytes() for row in rows]
    generators = [torch.Generator().manual_seed(row["seed"]) for row in rows]
    expected = pipe(
        ["a tree"] * 2, negative_prompt="lowres", guidance_scale=4.0, height=16, width=40, generator=generators
    ).images
    for row, image in zip(rows, expected, strict=True):
        assert np.array_equal(np.asarray(image), np.asarray(Image.open(tmp_path / "lowres" / row["path"])))
    assert images["lowres"] != images["bright red"] != images[None]
    with pytest.raises(ValueError, match="negative_prompt = 'lowres' .* 'bright red'"):
        prepare(make_config(pipe, rows, **asked, negative_prompt="bright red"), rows, tmp_path / "lowres")
    with pytest.raises(ValueError, match="says steps = None and you ask for 'compiled'"):
        prepare(
            make_config(pipe, rows, **asked, negative_prompt="lowres", steps="compiled"), rows, tmp_path / "lowres"
        )


def test_progress_counts_the_images_of_all_processes(command, models, undisturbed, tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    run = part_of(undisturbed, tmp_path / "run", 2)
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert command(*options(models, run))[0] == 0
    first, last = (sys.stderr.getvalue().split("\r")[i] for i in (1, -1))
    assert "8/22" in first and "22/22" in last and "image/s" in last


def test_the_time_that_is_left_is_said_after_the_first_timed_call(command, models, tmp_path, monkeypatch):
    # The first call includes one-time setup, the second takes 100 s, and four are left.
    clock = iter([0.0, 0.0, 100.0, *[0.0] * 9])
    monkeypatch.setattr(generate, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    code, said = command(*options(models, tmp_path / "run"))
    assert code == 0 and said.count("about 6.7 minutes for the other images\n") == 1


# Refusals


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--seed", "1"], "seed = 0 and you ask for 1"),
        (["--batch-size", "5"], "batch_size = 4 and you ask for 5"),
        (["--top-k", "3"], "sampling.top_k = 0 and you ask for 3"),
        (["--per-prompt", "2"], "source.per_prompt = 1 and you ask for 2"),
        (["--decoding", "sjd:window=4"], "decoding_name = 'ar' and you ask for 'sjd:window=4'"),
        (["--dtype", "bfloat16"], "weights = "),
    ],
)
def test_another_run_in_the_same_folder_is_refused(command, models, undisturbed, more, sentence):
    before = contents(undisturbed)
    code, said = command(*options(models, undisturbed), *more)
    assert code == 2 and said.startswith(f"arimage: {undisturbed / 'config.json'} says ") and sentence in said
    assert said.count("\n") == 1 and said.endswith(": ask for the same, or give another --out\n")
    assert contents(undisturbed) == before


def test_another_model_or_manifest_in_the_same_place_is_refused(command, models, undisturbed, tmp_path):
    run = shutil.copytree(undisturbed, tmp_path / "run")
    path = run / "manifest.jsonl"
    path.write_text(path.read_text().replace("heart 7", "book 7"))
    code, said = command(*options(models, run))
    assert code == 2 and str(path) in said
    path.write_text("".join(path.read_text().replace("book 7", "heart 7").splitlines(keepends=True)[:-1]))
    assert str(path) in command(*options(models, run))[1]
    path.write_bytes((undisturbed / "manifest.jsonl").read_bytes())
    config = read_config(run)
    (run / "config.json").write_text(json.dumps({**config, "machine": {**config["machine"], "device": "abacus"}}))
    assert "machine.device = 'abacus' and you ask for" in command(*options(models, run))[1]
    # Trained on, it generates something else.
    trained = shutil.copytree(models["text"], tmp_path / "trained")
    assert command("--model", trained, "--prompts", models["prompts.jsonl"], "--out", tmp_path / "new")[0] == 0
    tiny_llamagen.text_pipeline(seed=1).save_pretrained(trained)
    code, said = command("--model", trained, "--prompts", models["prompts.jsonl"], "--out", tmp_path / "new")
    assert code == 2 and "config.json says weights = " in said


def test_what_cannot_be_generated_leaves_no_folder(command, models, tmp_path):
    out, prompts = tmp_path / "run", models["prompts.jsonl"]
    for arguments, sentence in (
        (["--model", models["text"]], "give either --prompts or --classes"),
        (["--model", models["text"], "--prompts", prompts, "--classes", 3], "give either --prompts or --classes"),
        (["--model", models["text"], "--classes", 3], "class_labels"),
        (["--model", models["class"], "--prompts", prompts], "class_labels"),
        (["--model", models["class"], "--classes", 11], "ids from 0 to 9"),
        (["--model", models["text"], "--prompts", tmp_path / "absent.txt"], "No such file"),
        (["--model", models["text"], "--prompts", prompts, "--batch-size", 0], "--batch-size is 0"),
        (["--model", models["text"], "--prompts", prompts, "--decoding", "next-scale"], "next-scale"),
        (["--model", models["text"], "--prompts", prompts, "--top-p", 2], "top_p"),
        (["--model", models["text"], "--prompts", prompts, "--min-p", 2], "min_p"),
        (["--model", models["text"], "--prompts", prompts, "--height", 7], "height"),
        (["--model", models["text"], "--prompts", prompts, "--width", 0], "--width"),
        (["--model", models["text"], "--prompts", prompts, "--negative-prompt", "x"], "leave out --negative-prompt"),
        (["--model", models["text"], "--prompts", prompts, "--per-prompt", 10**12], "000,000 images are asked for"),
    ):
        code, said = command(*arguments, "--out", out)
        assert code == 2 and sentence in said and said.count("\n") == 1
    assert not out.exists()


def test_images_without_a_run_are_left_alone(command, models, tmp_path):
    (tmp_path / "run/images").mkdir(parents=True)
    (tmp_path / "run/images/000000.png").write_bytes(b"mine")
    code, said = command(*options(models, tmp_path / "run"))
    assert code == 2 and "images holds images" in said
    assert (tmp_path / "run/images/000000.png").read_bytes() == b"mine"


def test_a_default_decoding_is_named_with_its_settings():
    pipe = tiny_llamagen.text_pipeline()
    rows = prompt_rows([{"prompt": "tree"}], 0)
    for decoding, name in (
        (SpeculativeJacobiDecoding(window=5), "sjd-coupled:window=5"),
        (SpeculativeJacobiDecoding(), "sjd-coupled"),
    ):
        pipe.decoding = decoding
        assert make_config(pipe, rows, model="m", source={}, seed=0, batch_size=1)["decoding_name"] == name
