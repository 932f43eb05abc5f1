"""Runs of prompts with reference images."""

import json

import numpy as np
import pytest
from families import seeded
from PIL import Image
from pipelines.emu35 import tiny as tiny_emu35
from pipelines.emu35.tiny import REFERENCES
from pipelines.llamagen import tiny as tiny_llamagen

from arimage.eval.runs.generate import generate, make_config, prepare
from arimage.eval.runs.manifest import make_manifest
from arimage.eval.runs.prompts import read_prompts
from arimage.eval.runs.run_folder import read_config, read_rows
from arimage.eval.turns import configure_runs


@pytest.fixture
def prompts(tmp_path):
    """Write a file of prompts, and the pictures 0.png and 1.png in a folder next to it."""
    (tmp_path / "pictures").mkdir()
    for i, image in enumerate(REFERENCES):
        image.save(tmp_path / "pictures" / f"{i}.png")

    def prompts(*images):
        rows = [
            {"prompt": f"make it {colour}", "tag": colour} | ({} if image is None else {"image": image})
            for colour, image in zip(("blue", "red"), images, strict=True)
        ]
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return prompts


def run_of(pipe, prompts, folder, **settings):
    rows, source = make_manifest(str(prompts), 1, None, 1, 0)
    run = prepare(make_config(pipe, rows, model="m", source=source, seed=0, batch_size=2, **settings), rows, folder)
    generate(run, pipe)
    assert run.lock is not None
    run.lock.release()
    return run


def test_references_reach_the_model_with_its_guidance_for_them(tmp_path, prompts):
    pipe = tiny_emu35.pipeline()
    run = run_of(
        pipe, prompts("pictures/0.png", ["pictures/1.png", "pictures/0.png"]), tmp_path / "run", height=64, width=64
    )
    rows = read_rows(run.folder)
    assert [row["metadata"] for row in rows] == [{"tag": "blue"}, {"tag": "red"}]
    assert read_config(run.folder)["sampling"]["guidance_scale"] == pipe.reference_guidance_scale
    expected = pipe(
        ["make it blue", "make it red"],
        image=[REFERENCES[:1], REFERENCES[::-1]],
        height=64,
        width=64,
        generator=[seeded(row["seed"]) for row in rows],
    ).images
    for row, image in zip(rows, expected, strict=True):
        np.testing.assert_array_equal(Image.open(run.folder / row["path"]), np.asarray(image))


def test_a_run_is_not_resumed_with_other_references(tmp_path, prompts):
    pipe, file = tiny_emu35.pipeline(), prompts("pictures/0.png", "pictures/0.png")
    for _ in range(2):
        run_of(pipe, file, tmp_path / "run")
    REFERENCES[1].save(tmp_path / "pictures" / "0.png")
    with pytest.raises(ValueError, match=r"source\.images_sha256"):
        run_of(pipe, file, tmp_path / "run")


@pytest.mark.parametrize(
    ("images", "sentence"),
    [
        (("pictures/0.png", None), "has no image for 'make it red': give all prompts reference images, or none"),
        ((None, "pictures/2.png"), "names pictures/2.png in line 2, which is not there"),
        (([], None), 'has a wrong "image" in line 1'),
        ((None, [3]), 'has a wrong "image" in line 2'),
    ],
)
def test_wrong_images_are_named(prompts, images, sentence):
    with pytest.raises(ValueError) as refusal:
        read_prompts(prompts(*images))
    assert sentence in str(refusal.value)


def test_models_that_read_fewer_are_named(tmp_path, prompts):
    rows, _ = make_manifest(str(prompts("pictures/0.png", ["pictures/0.png"] * 4)), 1, None, 1, 0)
    with pytest.raises(ValueError, match="m reads 3 .*: give at most 3"):
        make_config(tiny_emu35.pipeline(), rows, model="m", source={}, seed=0, batch_size=1)
    with pytest.raises(ValueError, match="m reads no reference images"):
        configure_runs(tiny_llamagen.text_pipeline(), rows, ["ar"], model="m", sampling={})
