"""Files of prompts, and which are refused."""

import pytest

from arimage.eval.runs.prompts import prompt_file, read_prompts


def written(tmp_path, name, text):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize(
    ("name", "text", "rows"),
    [
        ("a.txt", "a tree\r\n\n  a heart \n", [{"prompt": "a tree"}, {"prompt": "a heart"}]),
        ("a.TXT", "\ufeffé", [{"prompt": "é"}]),
        ("c.txt", "one\x0b\x0c\x85\u2028line\n", [{"prompt": "one\x0b\x0c\x85\u2028line"}]),
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
        (
            "d.jsonl",
            '{"prompt": "a tree", "alternatives": {"object": ["a tree", "a cat"]}}\n{"prompt": "a cat"}',
            [{"prompt": "a tree", "alternatives": {"object": ["a tree", "a cat"]}}, {"prompt": "a cat"}],
        ),
        (
            "meta_data.json",
            '{"8f2a": {"category": "animals", "prompt": "a cat"}, "01bc": {"category": "art", "prompt": "a heart"}}',
            [
                {"prompt": "a cat", "category": "animals", "item_id": "8f2a"},
                {"prompt": "a heart", "category": "art", "item_id": "01bc"},
            ],
        ),
    ],
)
def test_prompts_are_read_with_their_other_fields(tmp_path, name, text, rows):
    assert read_prompts(written(tmp_path, name, text)) == rows


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.csv", "prompt\na", "is not a file of prompts: give a .tsv, .json, .jsonl or .txt"),
        ("a.txt", "\n \n", "holds no prompts"),
        ("a.jsonl", '{"prompt": "a"}\n{"prompt": ', "line 2 of"),
        ("a.jsonl", '{"prompt": "a"}\n\n{"text": "a"}\n', 'has no "prompt" in line 3'),
        ("a.jsonl", '["a"]', "has no object in line 1"),
        ("a.jsonl", '{"prompt": "a", "prompt": "b"}', "'prompt' is there twice"),
        ("a.jsonl", '{"prompt": "a", "score": 1e999}', "not finite in line 1: write null"),
        ("a.tsv", "prompt\tprompt\na\tb\n", "give each another name"),
        ("a.tsv", f"prompt\n{'a' * 200_000}\n", "cannot be read in line 2"),
        ("a.jsonl", '{"prompt": 3}', 'has no "prompt" in line 1'),
        ("a.json", '{"b": {"prompt": "a", "score": -Infinity}}', "not finite in 'b'"),
        ("a.json", '{"8f2a": {"prompt": "a cat"}', "is not valid JSON"),
        ("a.json", '[{"prompt": "a cat"}]', "is not an object"),
        ("a.json", '{"8f2a": {"category": "animals"}}', "has no \"prompt\" in '8f2a'"),
        ("a.json", "{}", "holds no prompts"),
        ("a.tsv", "text\ta\nb\tc\n", "has the columns ['text', 'a']"),
        ("a.tsv", "", "has the columns []"),
        ("a.tsv", "prompt\tb\na\tb\nc\n", "has 1 cells for 2 columns in line 3"),
        ("a.jsonl", '{"prompt": "a", "alternatives": ["a", "b"]}', "the alternatives of 'a' in"),
        ("a.jsonl", '{"prompt": "a", "alternatives": {}}', "the alternatives of 'a' in"),
        ("a.json", '{"n": {"prompt": "a", "alternatives": {"c": ["a"]}}}', "c is ['a']: give a list of at least 2"),
        ("a.jsonl", '{"prompt": "a", "alternatives": {"c": ["a", "a"]}}', "c: 'a' is there twice: leave one out"),
        ("a.tsv", 'prompt\n"a tree\na heart\n', "in line 3"),
        ("a.tsv", "prompt\tb\na\tb\n\tc\n", "has no prompt in line 3"),
    ],
)
def test_other_files_are_refused(tmp_path, name, text, sentence):
    path = written(tmp_path, name, text)
    with pytest.raises(ValueError) as refusal:
        read_prompts(path)
    assert str(path) in str(refusal.value) and sentence in str(refusal.value)


def test_emoji_are_the_prompts_of_the_package(tmp_path):
    assert prompt_file("emoji").name == "prompts.jsonl"
    assert prompt_file("emoji.txt").name == "emoji.txt"


@pytest.mark.parametrize(
    "name, text", [("x.jsonl", '{"prompt": "\\ud83d"}'), ("x.json", '{"a": {"prompt": "\\udcff"}}')]
)
def test_prompts_that_are_not_utf8_are_refused(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=r"x\.json.* holds half a surrogate"):
        read_prompts(tmp_path / name)
