"""`diversity` and `nearest` from end to end: of runs and of folders, against folders and shards, with a sheet."""

import io
import json

import numpy as np
import pytest
from eval.score_kit import save
from PIL import Image

from arimage.eval import score_images
from arimage.eval.runs.manifest import label_rows, prompt_rows
from arimage.eval.score import read_metrics


def pictures(count, seed):
    noise = np.random.default_rng(seed).integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)
    return noise.repeat(8, 1).repeat(8, 2)


@pytest.fixture
def run(tmp_path, write_run):
    """Three images of each of 14 prompts; of the first prompt two copies of one training example."""
    rows = prompt_rows([{"prompt": f"prompt {i}"} for i in range(14)], 0, 3)
    images = pictures(42, 0)
    images[:2] = pictures(5, 1)[3]
    write_run(tmp_path / "run", rows, images)
    return tmp_path / "run"


def test_a_run_is_scored_next_to_held_out_images_with_a_sheet(run, tmp_path, command):
    train, held_out = save(tmp_path / "train", pictures(5, 1)), save(tmp_path / "held", pictures(4, 2))
    options = ["--train", train, "--held-out", held_out, "--sheet", tmp_path / "sheet.png"]
    code, _, err = command("eval", "score", run, "--metrics", "diversity,nearest", *options, "--device", "cpu")
    assert code == 0, err
    found = read_metrics(run)
    assert [*found] == [
        *("diversity", "diversity-seeds", "diversity-prompts", "nearest", "nearest-above-0.85", "nearest-above-0.95"),
        *("held-out-nearest", "held-out-nearest-above-0.85", "held-out-nearest-above-0.95"),
    ]
    assert 0.9 < found["diversity"]["value"] < 1.1 and found["diversity"]["standard_error"] > 0
    assert found["nearest-above-0.95"]["value"] == pytest.approx(2 / 42)
    assert (found["nearest"]["prompts"], found["nearest"]["count"], found["held-out-nearest"]["count"]) == (14, 42, 4)
    assert "5 training examples" in found["nearest"]["reference"]
    assert found["held-out-nearest-above-0.95"]["value"] == 0 and "held, " in found["held-out-nearest"]["reference"]
    values = json.loads((run / "scores" / "nearest.json").read_text())["values"]
    assert values[:2] == pytest.approx([1, 1], abs=1e-3) and max(values[2:]) < 0.5
    sheet = np.asarray(Image.open(tmp_path / "sheet.png"))
    # Twelve of the prompts; under each copy there is what it copies.
    assert sheet.shape[0] > 4 * 128 and (sheet[14:78, :128] == sheet[78:142, :128]).all()
    assert (sheet[14:78, 128:192] != sheet[78:142, 128:192]).any()


def test_held_out_images_that_were_trained_are_counted(tmp_path, caplog):
    train = save(tmp_path / "train", pictures(5, 1))
    score_images(save(tmp_path / "some", pictures(3, 0)), metrics="nearest", train=train, held_out=train, device="cpu")
    assert "5 of 5 images of --held-out are in --train too" in caplog.text


def test_folders_and_classes_are_compared_with_shards(tmp_path, write_run):
    import pyarrow as pa
    import pyarrow.parquet as pq

    files = []
    for array in pictures(6, 0):
        file = io.BytesIO()
        Image.fromarray(array).save(file, "PNG")
        files.append({"bytes": file.getvalue(), "path": None})
    pq.write_table(pa.table({"image": files[:3]}), tmp_path / "train-0.parquet")
    pq.write_table(pa.table({"image": files[3:]}), tmp_path / "train-1.parquet")
    folder = save(tmp_path / "folder", pictures(4, 0))
    found = score_images(folder, metrics="nearest", train=tmp_path / "train-*.parquet", held_out=folder, device="cpu")
    assert found["nearest-above-0.95"]["value"] == found["held-out-nearest-above-0.95"]["value"] == 1
    assert not (folder / "scores").exists()
    write_run(tmp_path / "run", label_rows(range(2), 0, 2), pictures(4, 0))
    assert score_images(tmp_path / "run", metrics="diversity")["diversity"]["count"] == 4


def test_what_cannot_be_compared_is_refused_before_any_work(run, tmp_path, refused):
    for message, *options in (
        ("--train is missing", "--metrics", "nearest"),
        ("--sheet is for nearest", "--metrics", "diversity", "--sheet", tmp_path / "sheet.png"),
        ("--held-out is for nearest", "--metrics", "diversity", "--held-out", tmp_path),
        ("--sheet is", "--metrics", "nearest", "--train", tmp_path, "--sheet", tmp_path / "sheet.jpg"),
        ("is not a data set", "--metrics", "nearest", "--train", tmp_path / "a" / "none"),
    ):
        assert message in refused("eval", "score", run, *options)
    folder = save(tmp_path / "folder", pictures(2, 0))
    assert "needs the prompts" in refused("eval", "score", folder, "--metrics", "diversity")
