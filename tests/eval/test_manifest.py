"""Files of prompts, seeds, and what the files of a run say after whatever happened to them."""

import json

import pytest

from arimage.eval.manifest import (
    class_rows,
    image_seed,
    prompt_file,
    prompt_rows,
    read_config,
    read_prompts,
    read_results,
    replace,
)


def written(tmp_path, name, text):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


# Prompts


@pytest.mark.parametrize(
    ("name", "text", "rows"),
    [
        ("a.txt", "a tree\r\n\n  a heart \n", [{"prompt": "a tree"}, {"prompt": "a heart"}]),
        ("a.TXT", "\ufeffé", [{"prompt": "é"}]),
        (
            "a.jsonl",
            '{"prompt": "a\\ttree", "tag": "x", "include": [{"count": 1}]}\n\n{"prompt": "a\u2028b"}',
            [{"prompt": "a\ttree", "tag": "x", "include": [{"count": 1}]}, {"prompt": "a\u2028b"}],
        ),
        (
            "a.tsv",
            'Category\tPrompt\nplants\ta "big" tree\n\n\t"a ""red"" heart"\r\n',
            [{"prompt": 'a "big" tree', "Category": "plants"}, {"prompt": 'a "red" heart', "Category": ""}],
        ),
        ("b.tsv", "prompt\tPrompt\na\tb\n", [{"prompt": "a", "Prompt": "b"}]),
    ],
)
def test_prompts_are_read_with_all_that_stands_beside_them(tmp_path, name, text, rows):
    assert read_prompts(written(tmp_path, name, text)) == rows


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.csv", "prompt\na", "is no file of prompts: give a .tsv, .jsonl or .txt"),
        ("a.txt", "\n \n", "holds no prompts"),
        ("a.txt", b"a\xff", "is not UTF-8 (invalid start byte at byte 1)"),
        ("a.jsonl", '{"prompt": "a"}\n{"prompt": ', "is no JSON in line 2"),
        ("a.jsonl", '{"prompt": "a"}\n\n{"text": "a"}\n', 'has no "prompt" in line 3'),
        ("a.jsonl", '["a"]', 'has no "prompt" in line 1'),
        ("a.jsonl", '{"prompt": 3}', 'has no "prompt" in line 1'),
        ("a.tsv", "text\ta\nb\tc\n", "has the columns ['text', 'a']"),
        ("a.tsv", "", "has the columns []"),
        ("a.tsv", "prompt\tb\na\tb\nc\n", "has 1 cells for 2 columns in line 3"),
        ("a.tsv", 'prompt\n"a tree\na heart\n', "in line 3"),
        ("a.tsv", "prompt\tb\na\tb\n\tc\n", "has no prompt in line 3"),
    ],
)
def test_what_is_no_file_of_prompts_is_refused(tmp_path, name, text, sentence):
    path = written(tmp_path, name, text)
    with pytest.raises(ValueError) as refusal:
        read_prompts(path)
    assert str(refusal.value).startswith(f"{path} ") and sentence in str(refusal.value)


def test_emoji_are_the_prompts_of_the_package(tmp_path):
    assert prompt_file("emoji").name == "prompts.jsonl"
    assert prompt_file("emoji.txt").name == "emoji.txt"


# Rows


def test_a_seed_depends_on_the_run_and_the_image_alone():
    # A change here draws other images for every run that was begun.
    assert (image_seed(0, 0), image_seed(1, 10)) == (6213027144842677344, 6466448468994320724)
    seeds = [image_seed(seed, id) for seed in range(10) for id in range(1000)]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**63 for seed in seeds)


def test_rows_of_prompts():
    rows = prompt_rows([{"prompt": "a", "tag": 1}, {"prompt": "b"}], seed=5, per_prompt=2)
    assert [(row["id"], row["prompt"], row.get("metadata")) for row in rows] == [
        (0, "a", {"tag": 1}),
        (1, "a", {"tag": 1}),
        (2, "b", None),
        (3, "b", None),
    ]
    assert [row["path"] for row in rows] == [f"images/{id:06d}.png" for id in range(4)]
    assert [row["seed"] for row in rows] == [image_seed(5, id) for id in range(4)]
    with pytest.raises(ValueError, match="--per-prompt is 0"):
        prompt_rows([{"prompt": "a"}], 0, 0)


def test_rows_of_classes():
    rows = class_rows(3, seed=0, per_class=2)
    assert [row["class_label"] for row in rows] == [0, 0, 1, 1, 2, 2]
    with pytest.raises(ValueError, match="--classes and --per-class are 0 and 2"):
        class_rows(0, 0, 2)


# Results


def test_results_count_when_they_are_whole_and_their_picture_is_there(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "results").mkdir()
    for id in (0, 1, 3, 10):
        (tmp_path / f"images/{id:06d}.png").touch()
    lines = {0: [10, 1, 2], 1: [0, 3]}
    for rank, ids in lines.items():
        text = "".join(json.dumps({"id": id, "rank": rank}) + "\n" for id in ids)
        # The last line of either file lost its end; it was to be another for an image that has one.
        (tmp_path / f"results/rank-{rank:05d}.jsonl").write_text(text + '{"id": 1, "ra')
    assert list(read_results(tmp_path).items()) == [
        (id, {"id": id, "rank": rank}) for id, rank in ((0, 1), (1, 0), (3, 1), (10, 0))
    ]


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no run: make one with `arimage eval generate"):
        read_config(tmp_path)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.json"
    replace(path, lambda file: file.write_text("old"))

    def fail(file):
        assert file.parent == tmp_path
        file.write_text("ne")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replace(path, fail)
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"] and path.read_text() == "old"
