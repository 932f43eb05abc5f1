"""What other people's scorers would find in an exported run."""

import json
import shutil

import numpy as np
import pytest
import tiny
import torch
import torch.nn.functional as F
from PIL import Image
from pipelines.llamagen import tiny as tiny_llamagen

from arimage.eval.runs.export import export
from arimage.eval.runs.generate import generate, make_config, prepare
from arimage.eval.runs.manifest import label_rows, prompt_rows
from arimage.eval.runs.run_folder import read_rows


SIZE = 4 * tiny.SCALE_FACTOR


def generate_run(pipe, rows, source, out):
    config = make_config(pipe, rows, model="tiny", source=source, seed=0, batch_size=4)
    generate(prepare(config, rows, out), pipe)
    return out


@pytest.fixture(scope="module")
def of_prompts(tmp_path_factory):
    """Four images of each of two prompts that bear what GenEval and DPG-Bench need."""
    prompts = [
        {
            "prompt": "a red heart",
            "item_id": "drawtext7",
            "tag": "single_object",
            "include": [{"class": "heart", "count": 1}],
        },
        {"prompt": "a blue book ☃", "item_id": "12", "tag": "colors", "include": []},
    ]
    rows = prompt_rows(prompts, 0, 4)
    return generate_run(
        tiny_llamagen.text_pipeline(), rows, {"per_prompt": 4}, tmp_path_factory.mktemp("runs") / "prompts"
    )


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Three images of each of two prompts that bear nothing."""
    rows = prompt_rows([{"prompt": "tree"}, {"prompt": "a red heart"}], 0, 3)
    return generate_run(
        tiny_llamagen.text_pipeline(), rows, {"per_prompt": 3}, tmp_path_factory.mktemp("runs") / "plain"
    )


@pytest.fixture(scope="module")
def of_classes(tmp_path_factory):
    rows = label_rows(range(5), 0, 2)
    return generate_run(
        tiny_llamagen.class_pipeline(), rows, {"per_class": 2}, tmp_path_factory.mktemp("runs") / "classes"
    )


def pixels(run):
    return np.stack([np.asarray(Image.open(run / row["path"])) for row in read_rows(run)])


def test_the_array_of_adm_holds_every_image_once_and_not_class_by_class(of_classes, tmp_path):
    export(of_classes, "adm-npz", tmp_path / "samples.npz")
    with np.load(tmp_path / "samples.npz") as file:
        assert file.files == ["arr_0"]
        array = file["arr_0"]
    ours = pixels(of_classes)
    assert array.dtype == np.uint8 and array.shape == (10, SIZE, SIZE, 3)
    assert sorted(image.tobytes() for image in array) == sorted(image.tobytes() for image in ours)
    assert not np.array_equal(array, ours)
    export(of_classes, "adm-npz", tmp_path / "again.npz")
    assert (tmp_path / "again.npz").read_bytes() == (tmp_path / "samples.npz").read_bytes()


def test_images_are_resized_as_llamagen_resizes_them(of_classes, tmp_path):
    export(of_classes, "adm-npz", tmp_path / "samples.npz")
    export(of_classes, "adm-npz", tmp_path / "small.npz", size=5)
    large, small = (np.load(tmp_path / name)["arr_0"] for name in ("samples.npz", "small.npz"))
    images = torch.from_numpy(large).permute(0, 3, 1, 2).float() / 127.5 - 1
    expected = 127.5 * F.interpolate(images, size=(5, 5), mode="bicubic") + 128
    difference = expected.clamp(0, 255).permute(0, 2, 3, 1).byte().numpy().astype(int) - small
    # The original resizes before it rounds to bytes; on these whole values both round alike but for halves.
    assert small.shape == (10, 5, 5, 3) and abs(difference).max() <= 1 and (difference == 0).mean() > 0.98


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_a_count_that_the_manifest_contradicts_is_refused(of_prompts, tmp_path, count):
    run = shutil.copytree(of_prompts, tmp_path / "run")
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, "source": {"per_prompt": count}}))
    with pytest.raises(ValueError, match="config.json"):
        export(run, "geneval", tmp_path / "out")
    del config["prompts"]
    (run / "config.json").write_text(json.dumps({**config, "source": {"per_prompt": count}}))
    if 4 % count:
        with pytest.raises(ValueError, match="per_prompt"):
            export(run, "geneval", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_geneval_finds_a_folder_per_prompt_with_its_line(of_prompts, tmp_path):
    export(of_prompts, "geneval", tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["00000", "00001"]
    first = json.loads((tmp_path / "out" / "00000" / "metadata.jsonl").read_text())
    assert first["prompt"] == "a red heart" and first["tag"] == "single_object"
    assert first["include"] == [{"class": "heart", "count": 1}]
    for number in (0, 1):
        samples = sorted((tmp_path / "out" / f"{number:05d}" / "samples").iterdir())
        assert [path.name for path in samples] == ["00000.png", "00001.png", "00002.png", "00003.png"]
        found = np.stack([np.asarray(Image.open(path)) for path in samples])
        assert np.array_equal(found, pixels(of_prompts)[4 * number : 4 * number + 4])


def test_dpg_finds_the_four_images_of_an_item_in_one_picture(of_prompts, tmp_path):
    export(of_prompts, "dpg", tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["12.png", "drawtext7.png"]
    grid, ours = np.asarray(Image.open(tmp_path / "out" / "12.png")), pixels(of_prompts)[4:]
    assert np.array_equal(grid[:SIZE], np.concatenate([ours[0], ours[1]], axis=1))
    assert np.array_equal(grid[SIZE:], np.concatenate([ours[2], ours[3]], axis=1))


def test_result_jsonl_names_prompts_and_pictures(of_prompts, tmp_path):
    export(of_prompts, "result-jsonl", tmp_path / "out")
    rows = [json.loads(line) for line in (tmp_path / "out" / "result.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["text"] for row in rows] == ["a red heart"] * 4 + ["a blue book ☃"] * 4
    assert np.array_equal(np.stack([np.asarray(Image.open(row["image_path"])) for row in rows]), pixels(of_prompts))
    captions = (tmp_path / "out" / "captions.txt").read_text(encoding="utf-8")
    assert captions.splitlines() == [row["text"] for row in rows]


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("run", "format", "sentence"),
    [
        ("plain", "geneval", "image 0 has no tag and include for GenEval: .*evaluation_metadata.jsonl"),
        ("plain", "dpg", "image 0 has no item_id for DPG-Bench"),
        ("of_classes", "dpg", "image 0 has no item_id for DPG-Bench"),
        ("of_classes", "result-jsonl", "this run is of classes: use --format adm-npz"),
    ],
)
def test_what_a_scorer_needs_is_asked_for(run, format, sentence, request, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        export(request.getfixturevalue(run), format, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_unfinished_run_an_old_folder_and_a_size_elsewhere_are_refused(tmp_path):
    rows = prompt_rows([{"prompt": "tree"}], 0, 3)
    run = generate_run(tiny_llamagen.text_pipeline(), rows, {"per_prompt": 3}, tmp_path / "run")
    with pytest.raises(ValueError, match="--size is for adm-npz"):
        export(run, "result-jsonl", tmp_path / "out", size=4)
    with pytest.raises(ValueError, match="--out"):
        export(run, "result-jsonl", tmp_path)
    (run / rows[1]["path"]).unlink()
    with pytest.raises(ValueError, match="missing or damaged"):
        export(run, "adm-npz", tmp_path / "out.npz")


def test_an_export_that_fails_leaves_nothing(tmp_path, monkeypatch):
    rows = prompt_rows([{"prompt": "tree", "item_id": "1"}, {"prompt": "a red heart", "item_id": "2"}], 0, 4)
    run = generate_run(tiny_llamagen.text_pipeline(), rows, {"per_prompt": 4}, tmp_path / "run")

    def fail(*arguments, **options):
        raise OSError("no space")

    monkeypatch.setattr("arimage.eval.runs.export.make_image_grid", fail)
    with pytest.raises(OSError, match="no space"):
        export(run, "dpg", tmp_path / "dpg")
    assert not (tmp_path / "dpg").exists()


@pytest.mark.parametrize("item", ["no/such", "1", "", "a\0b", "x" * 252])
def test_dpg_wants_items_that_name_files(item, tmp_path):
    rows = prompt_rows([{"prompt": "tree", "item_id": "1"}, {"prompt": "a red heart", "item_id": item}], 0, 4)
    run = generate_run(tiny_llamagen.text_pipeline(), rows, {"per_prompt": 4}, tmp_path / "run")
    with pytest.raises(ValueError, match="image 4 has the item_id '.*without /"):
        export(run, "dpg", tmp_path / "dpg")
