"""The files of a run: what counts as finished, and how damaged files are refused."""

import json

import numpy as np
import pytest

from arimage.eval.job import Job
from arimage.eval.report import make_report
from arimage.eval.runs.export import export
from arimage.eval.runs.manifest import prompt_rows
from arimage.eval.runs.run_folder import read_config, read_finished, read_results, read_rows
from arimage.eval.score import score


@pytest.fixture
def run(tmp_path, write_run):
    rows = prompt_rows([{"prompt": f"a tree {i}", "name": "deciduous tree"} for i in range(6)], 0)
    write_run(tmp_path / "run", rows, np.random.default_rng(0).integers(0, 255, (6, 8, 8, 3), np.uint8))
    return tmp_path / "run"


def change(path, edit):
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))


def readers(run, tmp_path):
    """Everything that reads the images of a run."""
    yield lambda: read_finished(run)
    yield lambda: export(run, "adm-npz", tmp_path / "x.npz")
    yield lambda: export(run, "result-jsonl", tmp_path / "x")
    yield lambda: score(Job(run), ["retrieval"])
    yield lambda: score(Job(run), ["emoji-kid"])
    yield lambda: make_report([run], run.name)


def test_a_finished_run_is_read(run, tmp_path):
    for read in readers(run, tmp_path):
        read()


def test_results_count_once_if_they_are_complete_and_their_image_is_there(run):
    lines = (run / "results/rank-00000.jsonl").read_text().splitlines(keepends=True)
    (run / "results/rank-00000.jsonl").write_text(lines[4] + lines[1] + lines[2] + lines[0][:-20])
    (run / "results/rank-00001.jsonl").write_text(lines[3] + lines[2] + lines[5] + lines[0][:-1])
    (run / "images/000005.png").unlink()
    assert list(read_results(run)) == [1, 2, 3, 4]


def cut(run):
    path = run / "images/000003.png"
    path.write_bytes(path.read_bytes()[:50])


def swap(run):
    results = [json.loads(line) for line in (run / "results/rank-00000.jsonl").read_text().splitlines()]
    results[3]["sha256"] = "0" * 64
    (run / "results/rank-00000.jsonl").write_text("".join(json.dumps(row) + "\n" for row in results))


def remove(run):
    (run / "images/000003.png").unlink()


@pytest.mark.parametrize("damage", [cut, swap, remove])
def test_damaged_images_are_refused_by_name(run, tmp_path, damage):
    damage(run)
    for read in readers(run, tmp_path):
        with pytest.raises(ValueError, match=r"000003.png .*1 of 6 .*arimage eval generate"):
            read()
    assert not (tmp_path / "x.npz").exists() and not (tmp_path / "x").exists()


@pytest.mark.parametrize("old", [False, True])
def test_a_shortened_manifest_is_refused(run, tmp_path, old):
    if old:
        change(run / "config.json", lambda config: config.pop("manifest"))
    path = run / "manifest.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:4]))
    for read in readers(run, tmp_path):
        with pytest.raises(ValueError, match="manifest.jsonl is not the manifest of the 6 images"):
            read()


@pytest.mark.parametrize(
    "line", ["null", "[]", "{", "{}", '{"id": 0}', '{"id": 1, "seed": 1, "path": "/etc", "prompt": ""}']
)
def test_a_damaged_row_of_an_old_manifest_is_refused(run, line):
    change(run / "config.json", lambda config: config.pop("manifest"))
    path = run / "manifest.jsonl"
    path.write_text("\n".join([*path.read_text().splitlines()[:-1], line, ""]))
    with pytest.raises(ValueError, match="line 6 of .*manifest.jsonl"):
        read_rows(run)


@pytest.mark.parametrize("line", ["null", "{", '{"id": 2}', '{"id": "2"}'])
def test_a_damaged_row_of_results_is_refused(run, line):
    path = run / "results/rank-00000.jsonl"
    path.write_text("\n".join([*path.read_text().splitlines()[:3], line, ""]))
    with pytest.raises(ValueError, match="line 4 of .*rank-00000.jsonl .*delete the line"):
        read_results(run)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("[]", "JSON object"), ("", "JSON"), ("[" * 100_000, "nested"), ("{}", "no model"), (b"\xff", "JSON")],
)
def test_a_damaged_config_is_refused(run, text, sentence):
    (run / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=f"config.json .*{sentence}"):
        read_config(run)


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("edit", "name"),
    [
        (lambda config: config.pop("machine"), "machine"),
        (lambda config: config["machine"].pop("torch"), "machine.torch"),
        (lambda config: config["machine"].update(threads=-2), "machine.threads"),
        (lambda config: config.update(images=0), "images"),
        (lambda config: config.update(batch_size="4"), "batch_size"),
        (lambda config: config["sampling"].update(top_k=None), "top_k"),
        (lambda config: config.update(seed=-1), "seed"),
        (lambda config: config.update(height=1.5), "height"),
        (lambda config: config.update(source={"per_prompt": 0}), "source.per_prompt"),
        (lambda config: config.update(source={"per_prompt": True}), "source.per_prompt"),
    ],
)
def test_a_config_with_missing_or_wrong_settings_is_refused(run, edit, name, refused):
    change(run / "config.json", edit)
    with pytest.raises(ValueError, match=f"config.json has (no|a wrong) {name}"):
        read_config(run)
    assert "config.json" in refused("eval", "export", run, "--format", "dpg", "--out", f"{run}-x")


def test_numbers_that_contradict_each_other_are_refused(run):
    def changed(**changes):
        change(run / "config.json", lambda config: config.update(changes))

    changed(source={"per_prompt": 3}, prompts=6)
    with pytest.raises(ValueError, match="config.json .*3 images for each of 6"):
        read_rows(run)
    changed(source={"classes": 2, "per_class": 2}, prompts=None)
    with pytest.raises(ValueError, match="config.json .*2 images for each of 2"):
        read_rows(run)
    changed(source={}, call_size=2)
    with pytest.raises(ValueError, match="calls are of 2 images"):
        read_results(run)


@pytest.mark.parametrize("text", ["[]", "{", '{"retrieval": 3}', '{"retrieval": {"value": 1}}'])
def test_damaged_metrics_are_refused(run, text):
    (run / "metrics.json").write_text(text)
    with pytest.raises(ValueError, match="metrics.json"):
        make_report([run], run.name)


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no run: make one with `arimage eval generate"):
        read_config(tmp_path)
