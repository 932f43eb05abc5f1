"""Every entrance for texts and folders: encodings, ends of lines, hidden files, and accents in names."""

import json
import unicodedata

import pytest
from PIL import Image

from arimage.cli.options import prompt_lines
from arimage.eval.metrics.features import image_paths
from arimage.eval.runs.manifest import make_manifest
from arimage.eval.runs.prompts import read_prompts
from arimage.media.folders import finder
from arimage.media.texts import parse_json, read_text
from arimage.training.adapters.pairs import load_pairs
from arimage.training.pixels import open_pixels


CAPTIONS = ["a château,\u2028on\x85paper", "a red\x0cheart"]
COMPOSED, APART = (unicodedata.normalize(form, "château") for form in ("NFC", "NFD"))


def picture(path, colour="red"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), colour).save(path)


def through_pairs(folder, data):
    """The captions in a metadata.jsonl."""
    for name in ("0.png", "1.png"):
        picture(folder / name)
    (folder / "metadata.jsonl").write_bytes(data(rows([{"file_name": f"{i}.png"} for i in range(2)]), "text"))
    return load_pairs(folder, (8, 8)).captions


def rows(others):
    def lines(field):
        found = [{**more, field: caption} for more, caption in zip(others, CAPTIONS, strict=True)]
        return "".join(json.dumps(row, ensure_ascii=False) + "\r\n" for row in found)

    return lines


def through_notes(folder, data):
    """The captions in files next to pictures."""
    for i, caption in enumerate(CAPTIONS):
        picture(folder / f"{i}.png")
        (folder / f"{i}.txt").write_bytes(data(lambda _, caption=caption: f"{caption}\r\n", ""))
    return load_pairs(folder, (8, 8)).captions


def through_table(folder, data):
    (folder / "a.jsonl").write_bytes(data(rows([{}, {}]), "prompt"))
    return [row["prompt"] for row in read_prompts(folder / "a.jsonl")]


def through_lines(folder, data):
    (folder / "a.txt").write_bytes(data(lambda _: "\r\n\r\n".join(CAPTIONS), ""))
    found = prompt_lines("--validation-prompts", folder / "a.txt")
    assert [row["prompt"] for row in read_prompts(folder / "a.txt")] == found
    return found


ENTRANCES = [
    through_pairs,
    through_notes,
    through_table,
    through_lines,
]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("entrance", ENTRANCES)
def test_texts_are_read_as_editors_write_them(entrance, encoding, tmp_path):
    assert entrance(tmp_path, lambda text, field: text(field).encode(encoding)) == CAPTIONS


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("entrance", ENTRANCES)
def test_other_encodings_are_refused_by_the_name_of_the_file(entrance, encoding, tmp_path):
    with pytest.raises(ValueError) as refusal:
        entrance(tmp_path, lambda text, field: text(field).replace("\u2028", " ").encode(encoding))
    sentence = str(refusal.value)
    assert f"{tmp_path}/" in sentence and "not UTF-8 in line" in sentence and sentence.endswith("save it as UTF-8")


def test_a_wrong_character_is_named_by_its_line(tmp_path):
    for data in ("a\n\nthe man\x92s hat".encode("latin-1"), b"a\n\nb\0", "a\n\n".encode("utf-16") + b"\xd8"):
        (tmp_path / "a.txt").write_bytes(data)
        with pytest.raises(ValueError, match="a.txt is not UTF-8 in line 3"):
            read_text(tmp_path / "a.txt")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 100_000, "too deeply nested"),
        ('{"a": [{"b": 1, "b": 2}]}', "'b' is there twice"),
        ("9" * 10_000, "not valid JSON"),
        ("", "not valid JSON"),
    ],
)
def test_json_that_others_would_read_otherwise_is_refused(text, reason):
    with pytest.raises(ValueError, match=f"^line 3 of a.jsonl is .*{reason}.*: correct it$"):
        parse_json(text, "line 3 of a.jsonl", "correct it")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("[1]", "has no object in line 2"),
        ('{"file_name": "a.png", "text": "x", "score": NaN}', "not finite in line 2"),
        ('{"file_name": "a.png", "text": "x", "text": "y"}', "line 2 of .*'text' is there twice"),
        ('{"file_name": "a.png"}', "line 2 of .* has no text"),
        ('{"file_name": 3, "text": "x"}', "line 2 of .* has no file_name"),
        ('{"file_name": "b.png", "text": "x"}', "line 2 of .* names b.png, which is not there"),
        ('{"file_name": "../b.png", "text": "x"}', "line 2 of .* names ../b.png, which is outside"),
        ('{"file_name": "a.png", "text": "\\ud83d"}', "line 2 of .* holds half a surrogate pair"),
    ],
)
def test_a_wrong_row_of_a_table_of_captions_is_named(line, reason, tmp_path):
    picture(tmp_path / "a.png")
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "a.png", "text": "x"}\n' + line)
    with pytest.raises(ValueError, match=reason) as refusal:
        load_pairs(tmp_path, (8, 8))
    assert str(tmp_path / "metadata.jsonl") in str(refusal.value)


# Folders


def with_hidden_files(folder):
    """A folder as Jupyter, macOS and Windows leave it."""
    for i, caption in enumerate(CAPTIONS):
        picture(folder / "in" / f"{i}.png")
        (folder / "in" / f"{i}.txt").write_text(caption)
    for name in (".ipynb_checkpoints/0-checkpoint", "in/._0", ".hidden", "__MACOSX/0", "in/.stale"):
        picture(folder / f"{name}.png", "blue")
        (folder / f"{name}.txt").write_text("stale")
    (folder / "Thumbs.db").write_bytes(b"\xd0\xcf")
    (folder / "in" / ".DS_Store").write_bytes(b"\0")
    (folder / "folder.png").mkdir()
    return folder


def test_hidden_files_count_nowhere(tmp_path):
    # The folder itself may be hidden.
    folder = with_hidden_files(tmp_path / ".data")
    assert load_pairs(folder, (8, 8)).captions == CAPTIONS
    assert len(open_pixels(folder, 8)) == len(image_paths(folder)) == 2
    assert [row["prompt"] for row in read_prompts(folder / "in")] == CAPTIONS
    digest = make_manifest(str(folder / "in"), 1, None, 1, 0)[1]["sha256"]
    (folder / "in" / "._1.txt").write_text("other")
    assert make_manifest(str(folder / "in"), 1, None, 1, 0)[1]["sha256"] == digest


def test_files_are_found_whichever_way_their_accents_are_written(tmp_path):
    for inside, asked in ((COMPOSED, APART), (APART, COMPOSED)):
        folder = tmp_path / str(inside == APART)
        picture(folder / inside / f"{inside}.png")
        find = finder(folder)
        for name in (f"{asked}/{asked}.png", f"{inside}/../{asked}/{inside}.png"):
            assert find(name).samefile(folder / inside / f"{inside}.png")
        assert find(f"{asked}/nothing.png") is find("nothing/a.png") is find(asked) is None
        assert find(str(folder / inside / f"{asked}.png")) == folder / inside / f"{inside}.png"


@pytest.mark.parametrize(("inside", "asked"), [(COMPOSED, APART), (APART, COMPOSED)])
def test_names_with_accents_in_tables(inside, asked, tmp_path):
    picture(tmp_path / f"{inside}.png")
    row = {"file_name": f"{asked}.png", "text": "a castle"}
    (tmp_path / "metadata.jsonl").write_text(json.dumps(row, ensure_ascii=False), encoding="utf-8")
    assert load_pairs(tmp_path, (8, 8)).captions == ["a castle"]
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "x", "image": f"{asked}.png"}), encoding="utf-8")
    assert read_prompts(tmp_path / "p.jsonl")[0]["image"] == [str(tmp_path / f"{inside}.png")]
    (tmp_path / "metadata.jsonl").unlink()
    (tmp_path / f"{asked}.txt").write_text("a castle", encoding="utf-8")
    assert load_pairs(tmp_path, (8, 8)).captions == ["a castle"]


# The command
