"""The judge of concepts: how it is trained, what it knows of real icons, and its metric."""

import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from arimage.eval.job import Job
from arimage.eval.runs.manifest import prompt_rows
from arimage.training.loop import OptimizerSettings
from arimage_icons import metrics
from arimage_icons.judge import JudgeSettings, compare, read_icons, train_judge
from arimage_icons.judge_network import COMMON, IconJudge, concepts_of


SHAPES = {"bar": np.s_[28:36, 8:56], "post": np.s_[8:56, 28:36], "box": np.s_[16:48, 16:48]}
FEW = JudgeSettings(OptimizerSettings(steps=25, learning_rate=4e-3, warmup_steps=2, ema_decay=0.5), batch_size=16)


def icon(shape: str, seed: int) -> np.ndarray:
    """A black shape on white, one of three that are told apart by their outlines, shifted by a few pixels."""
    pixels = np.full((64, 64), 255, np.uint8)
    pixels[SHAPES[shape]] = 0
    return np.roll(pixels, tuple(np.random.default_rng(seed).integers(-3, 4, 2)), (0, 1))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for split, count in {"train": 12, "val": 6, "test": 6}.items():
        files, captions = [], []
        for number in range(count):
            file, shape = io.BytesIO(), [*SHAPES][number % 3]
            Image.fromarray(icon(shape, number + len(split))).save(file, "PNG")
            files.append({"bytes": file.getvalue(), "path": None})
            captions.append(shape)
        pq.write_table(pa.table({"image": files, "caption": captions}), folder / f"{split}.parquet")
    return folder


@pytest.fixture(scope="module")
def judge(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("judge")
    train_judge(data, out, "cpu", FEW)
    return out / "icons-judge"


@pytest.fixture
def run(tmp_path, write_run):
    """Bars, posts and boxes for the prompts of bars, posts and bars."""
    images = [np.stack([icon(shape, 0)] * 3, -1) for shape in ("bar", "post", "box")]
    prompts = [{"prompt": text} for text in ("a filled bar", "post icon", "bar")]
    write_run(tmp_path / "run", prompt_rows(prompts, 0), images)
    return tmp_path / "run"


def test_a_trained_judge_tells_shapes_apart_that_it_did_not_see(judge, data, run):
    figures = json.loads((judge / "figures.json").read_text())
    assert [*figures] == ["val", "val, from tokens", "test", "test, from tokens"]
    assert figures["test"]["all"] == {"count": 6, "right": 1.0, "top-5": 1.0}
    assert IconJudge.from_pretrained(judge).config.concepts == ["bar", "post", "box"]
    table = compare(judge, data, [run]).splitlines()
    assert len(table) == 7 and table[-1] == "| run | 3 | 0.6667 | 1.0 | 3 | 0.6667 | 1.0 |"
    assert read_icons(data / "val.parquet").pixels.shape == (6, 64, 64)


def test_an_interrupted_training_is_resumed(judge, data):
    before = (judge / "diffusion_pytorch_model.safetensors").read_bytes()
    train_judge(data, judge.parent, "cpu", FEW)
    assert (judge / "diffusion_pytorch_model.safetensors").read_bytes() == before


def test_the_metric_says_what_is_right_next_to_real_icons(judge, run):
    found = metrics.concepts(Job(run), judge)
    assert [*found] == ["concepts", "concepts-top-5", f"concepts-of-{COMMON}", f"concepts-of-{COMMON}-top-5"]
    assert found["concepts"]["value"] == pytest.approx(2 / 3) and found["concepts-top-5"]["value"] == 1
    assert "1.000" in found["concepts"]["reference"] and found["concepts"]["space"]["name"] == "icons-judge"
    assert json.loads((run / "scores" / "concepts.json").read_text())["values"] == [1, 1, 0]


def test_prompts_name_concepts_with_and_without_words_of_style():
    names = ["heart", "bold", "arrow left", "text bold", "light bulb"]
    prompts = ["a filled heart", "bold", "an outline arrow left icon", "text bold", "thin light bulb"]
    assert concepts_of(prompts, names) == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="'a wombat'"):
        concepts_of(["heart", "a wombat"], names)
