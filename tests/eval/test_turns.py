"""`arimage bench` generates with several decodings in turn, scores and reports, and resumes after an interruption."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from pipelines.llamagen import tiny as tiny_llamagen

from arimage.eval import turns
from arimage.eval.runs.generate import prepare
from arimage.eval.runs.manifest import prompt_rows
from arimage.eval.runs.run_folder import read_results


ONE = "--decoding", "ar", "--metrics", "", "--device", "cpu"
PROMPTS = [{"prompt": "a red heart", "name": "red heart"}, {"prompt": "tree", "name": "deciduous tree"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_llamagen.text_pipeline().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    return path


@pytest.fixture
def run(command):
    """Run a command to its end; returns its output."""

    def run(*arguments):
        code, out, err = command(*arguments)
        assert code == 0, err
        return out

    return run


def prepared(pipe, out, decodings):
    rows = prompt_rows(PROMPTS, 0, 3)
    asked = {"model": "tiny", "source": {"per_prompt": 3}, "seed": 0, "batch_size": 2, "sampling": {}}
    configs, _ = turns.configure_runs(pipe, rows, decodings, **asked)
    return [prepare(config, rows, out / name) for name, config in configs.items()]


def test_the_decodings_take_turns_and_finished_images_are_reused(tmp_path, monkeypatch):
    pipe = tiny_llamagen.text_pipeline()
    generated, generate_batch = [], turns.generate_batch

    def recorded(run, pipe, index):
        if len(generated) == 3:
            generated.append("stop")
            raise KeyboardInterrupt
        generated.append((run.folder.name, index))
        return generate_batch(run, pipe, index)

    monkeypatch.setattr(turns, "generate_batch", recorded)
    decodings = ["ar", "sjd:window=4,init=left"]
    with pytest.raises(KeyboardInterrupt):
        turns.generate_in_turn(prepared(pipe, tmp_path, decodings), pipe)
    runs = prepared(pipe, tmp_path, decodings)
    turns.generate_in_turn(runs, pipe)
    names = ["ar", "sjd-window=4-init=left"]
    turns_taken = [(name, index) for index in range(3) for name in names]
    assert generated == [*turns_taken[:3], "stop", *turns_taken[3:]]
    assert [len(read_results(run.folder)) for run in runs] == [6, 6]


def test_metrics_that_cannot_be_computed_are_refused_before_anything_is_written(model, prompts, tmp_path, command):
    (tmp_path / "x.npz").touch()
    np.savez(tmp_path / "y.npz", arr_0=np.zeros((2, 4, 4, 3), np.uint8))
    for metrics, name, *more in (
        ("fid", "--ref"),
        ("clip", "clip"),
        ("clip-checks", "clip"),
        ("is", "metric"),
        ("fid", "x.npz is damaged", "--ref", tmp_path / "x.npz"),
        ("fid", "--download", "--ref", tmp_path / "y.npz"),
        ("fvd", "--download", "--ref", tmp_path),
    ):
        arguments = ["--model", model, "--prompts", prompts, "--metrics", metrics, "--out", tmp_path / "out", *more]
        code, _, err = command("bench", *arguments)
        assert code == 2 and name in err
    assert not (tmp_path / "out").exists()


def test_networks_come_from_the_environment(model, tmp_path, monkeypatch, command):
    monkeypatch.setenv("ARIMAGE_CLIP", str(tmp_path))
    assert f"{tmp_path} lacks config.json" in command("bench", "--model", model, "--metrics", "clip")[2]


def test_one_command_generates_scores_and_reports(run, model, prompts, tmp_path):
    out = tmp_path / "out"
    asked = ["--model", model, "--prompts", prompts, "--per-prompt", 2, "--batch-size", 2, "--device", "cpu"]
    asked += ["--decoding", "ar", "--decoding", "sjd", "--metrics", "emoji-kid,deviation", "--out", out]
    text = run("bench", *asked)
    assert "| ar | exact (0." in text and "| sjd | exact (0." in text and "tokens fed per pass" in text
    report = json.loads((out / "report.json").read_text())
    assert report["baseline"] == "ar" and [row["metrics"]["emoji-kid"]["count"] for row in report["rows"]] == [4, 4]
    # Both calls are timed, and 16 images are judged.
    assert [row["cost"]["timed_calls"] for row in report["rows"]] == [2, 2]
    assert [row["deviation"]["codes"] for row in report["rows"]] == [16 * 16] * 2
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.png") if path.parent.name == "images"}
    judged = (out / "sjd" / "deviation.json").stat().st_mtime_ns
    assert len(before) == 8 and run("bench", *asked, "--against", out / "report.json").startswith(text)
    assert before == {path: path.stat().st_mtime_ns for path in before}
    assert (out / "sjd" / "deviation.json").stat().st_mtime_ns == judged
    # The parts of it are commands of their own.
    assert run("eval", "report", out / "ar", out / "sjd", "--baseline", "ar", "--out", tmp_path / "again") == text
    run("eval", "export", out / "sjd", "--format", "result-jsonl", "--out", tmp_path / "results")
    assert (tmp_path / "results" / "result.jsonl").read_text().count("\n") == 4


def test_prompts_of_the_command_line_fill_five_calls(run, model):
    text = run("bench", "--model", model, "--prompt", "tree", "--prompt", "a red heart", "--batch-size", 2, *ONE)
    assert "10 images per run" in text and "calls of 2" in text and text.count("| ar | exact |") == 1
    assert "1 images per run" in run("bench", "--model", model, "--per-prompt", 1, "--batch-size", 8, *ONE)


def test_a_dry_run_estimates_every_decoding_and_writes_nothing(run, model, prompts, tmp_path, monkeypatch):
    words = ["bench", "--model", model, "--prompts", prompts, "--decoding", "sjd:window=4", *ONE]
    monkeypatch.setattr(turns, "generate_batch", None)
    out = tmp_path / "out"
    said = run(*words, "--per-prompt", 3, "--dry-run", "--out", out).splitlines()
    assert said[0] == "images: 6 of 8x8 pixels with each of 2 decodings" and not out.exists()
    assert said[1].startswith("sjd-window=4: ") and said[2].startswith("ar: 16.0 forward passes per image (all)")
    assert said[3].startswith("time: about ")


def test_a_dry_run_counts_what_is_left(tmp_path):
    pipe, rows = tiny_llamagen.text_pipeline(), prompt_rows(PROMPTS, 0, 3)
    (finished,) = prepared(pipe, tmp_path, ["ar"])
    turns.generate_in_turn([finished], pipe)
    asked = {"model": "tiny", "source": {"per_prompt": 3}, "seed": 0, "batch_size": 2, "sampling": {}}
    configs, _ = turns.configure_runs(pipe, rows, ["ar"], **asked)
    said = turns.estimate(pipe, configs, rows, tmp_path)
    assert "6 images are finished" in said and "time: about 0 seconds" in said
    with pytest.raises(ValueError, match="seed = 0 and you ask for 1"):
        turns.estimate(pipe, turns.configure_runs(pipe, rows, ["ar"], **asked | {"seed": 1})[0], rows, tmp_path)


def test_the_time_that_is_left_is_said_once_all_have_generated(tmp_path, monkeypatch, capsys):
    pipe, clock = tiny_llamagen.text_pipeline(), iter([0.0, 100.0, 200.0, 500.0, *[0.0] * 99])
    monkeypatch.setattr(turns, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    turns.generate_in_turn(prepared(pipe, tmp_path, ["ar", "sjd"]), pipe)
    # Two calls of 100 s and two of 300 s are left.
    said = capsys.readouterr().err
    assert said.count("for the other images") == 1 and "about 13 minutes" in said
    # Not a terminal: the bar is there at the start, around the message and at the end, not for every call.
    assert said.count("%|") <= 4


def test_arguments_that_not_all_models_take_are_passed_on_or_refused(run, refused, model, prompts, tmp_path):
    words = ["bench", "--model", model, "--prompts", prompts, *ONE]
    assert "--negative-prompt" in refused(*words, "--negative-prompt", "blue")
    for option in ("--num-inference-steps", "--decoder-guidance-scale"):
        assert option in refused(*words, option, 3)
