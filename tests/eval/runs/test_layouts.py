"""Prompts and layouts of WISE, T2I-CompBench and DPG-Bench, with what their scorers get wrong without a word."""

import json

import pytest
from PIL import Image

from arimage.eval.runs.export import write_dpg, write_t2i_compbench, write_wise
from arimage.eval.runs.manifest import make_manifest, prompt_rows
from arimage.eval.runs.prompts import read_prompts


def groups_of(folder, prompts, per_prompt=1):
    """The images of `prompts` as an export gets them, each of another grey."""
    rows = prompt_rows(prompts, 0, per_prompt)
    for row in rows:
        Image.new("RGB", (4, 4), (row["id"],) * 3).save(folder / f"{row['id']}.png")
    pairs = [(row, folder / f"{row['id']}.png") for row in rows]
    return [pairs[start : start + per_prompt] for start in range(0, len(pairs), per_prompt)]


def grey(path):
    return Image.open(path).getpixel((0, 0))[0]


def test_wise_reads_prompts_and_names_pictures_by_their_number(tmp_path):
    items = [{"Prompt": "a red heart", "prompt_id": 7, "Category": "x"}, {"Prompt": "cat", "prompt_id": 1}]
    (tmp_path / "wise.json").write_text(json.dumps(items))
    prompts = read_prompts(tmp_path / "wise.json")
    assert prompts == [{"prompt": "a red heart", "prompt_id": 7, "Category": "x"}, {"prompt": "cat", "prompt_id": 1}]
    write_wise(groups_of(tmp_path, prompts), tmp_path / "out")
    assert {path.name: grey(path) for path in (tmp_path / "out").iterdir()} == {"7.png": 0, "1.png": 1}
    with pytest.raises(ValueError, match="WISE needs 1"):
        write_wise(groups_of(tmp_path, prompts, 2), tmp_path / "two")
    for wrong in ({"prompt": "cat"}, {"prompt": "cat", "prompt_id": "7"}):
        with pytest.raises(ValueError, match="prompt_id"):
            write_wise(groups_of(tmp_path, [wrong]), tmp_path / "three")
    with pytest.raises(ValueError, match="not unique"):
        write_wise(groups_of(tmp_path, [prompts[0], prompts[0]]), tmp_path / "four")
    with pytest.raises(ValueError, match='no "prompt" in entry 1'):
        (tmp_path / "bad.json").write_text('[{"Prompt": " ", "prompt_id": 1}]')
        read_prompts(tmp_path / "bad.json")


def test_t2i_compbench_numbers_pictures_without_gaps(tmp_path):
    prompts = [{"prompt": "a red heart"}, {"prompt": "a blue book."}]
    write_t2i_compbench(groups_of(tmp_path, prompts, 2), tmp_path / "out")
    found = {path.name: grey(path) for path in (tmp_path / "out" / "samples").iterdir()}
    assert found == {
        "a red heart_000000.png": 0,
        "a red heart_000001.png": 1,
        "a blue book._000002.png": 2,
        "a blue book._000003.png": 3,
    }
    for prompt in ("a_b", "a/b", "x" * 300):
        with pytest.raises(ValueError, match="T2I-CompBench"):
            write_t2i_compbench(groups_of(tmp_path, [{"prompt": prompt}]), tmp_path / "no")
        assert not (tmp_path / "no").exists()


def test_dpg_reads_a_folder_and_refuses_names_that_its_scorer_cuts(tmp_path):
    folder = tmp_path / "prompts"
    folder.mkdir()
    (folder / "b.txt").write_text("a red heart\n")
    (folder / "a12.txt").write_text("cat")
    expected = [{"prompt": "cat", "item_id": "a12"}, {"prompt": "a red heart", "item_id": "b"}]
    assert read_prompts(folder) == expected
    rows, source = make_manifest(str(folder), 4, None, 1, 0)
    assert len(rows) == 8 and len({row["seed"] for row in rows}) == 8 and source["prompts"] == "prompts"
    with pytest.raises(ValueError, match="without / and dots"):
        write_dpg(groups_of(tmp_path, [{"prompt": "cat", "item_id": "a.1"}], 4), tmp_path / "out")
    (folder / "empty.txt").write_text(" ")
    with pytest.raises(ValueError, match="empty.txt"):
        read_prompts(folder)
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="no .txt files"):
        read_prompts(tmp_path / "none")
