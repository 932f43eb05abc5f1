"""Data sets as users have them: nothing is guessed from words in names, nothing is left out without a word, and what
cannot be read is named in one sentence."""

import io
import json
import sys
import tarfile

import pytest
from PIL import Image


pytest.importorskip("datasets", reason="the extra `train` is not installed")
import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

from arimage.cli import main as cli
from arimage.training.adapters.pairs import load_pairs  # noqa: E402
from arimage.training.data.row import MOST_CLASSES, decode  # noqa: E402
from arimage.training.data.sources import open_source  # noqa: E402
from arimage.training.pixels import open_pixels  # noqa: E402


def png(number=0):
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (number, 90, 10)).save(file, "PNG")
    return file.getvalue()


def images(root, *names):
    for number, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number, 90, 10)).save(root / name)
    return root


def table(path, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    if "image" not in columns:
        count = len(next(iter(columns.values())))
        columns["image"] = [{"bytes": png(number), "path": None} for number in range(count)]
    pq.write_table(pa.table(columns), path)
    return path


def archive(path, *files):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def metadata(root, *rows, encoding="utf-8"):
    (root / "metadata.jsonl").write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding)


def texts(data, **options):
    return [text for where, image, text in open_source(str(data), **options).read() if decode(where, image)]


# Folders


def test_classes_are_the_first_folders_whatever_they_are_called(tmp_path):
    names = ["bus/1.png", "freight train/1.png", "steam train/deep/er/1.tif", "test tube/1.gif", "val/1.jpeg"]
    data = images(tmp_path / "photos [2024]", *names)
    (tmp_path / "linked").mkdir()
    images(tmp_path / "linked", "1.bmp")
    (data / "car").symlink_to(tmp_path / "linked")
    source = open_source(str(data))
    assert source.classes == ["bus", "car", "freight train", "steam train", "test tube", "val"]
    assert texts(data) == ["0", "1", "2", "3", "4", "5"] and source.left_out == 0
    assert [file.name for file in source.files] == sorted([*names, "car/1.bmp"])
    assert len(open_pixels(data, 8)) == 6


def test_what_is_no_row_is_named(tmp_path, caplog):
    data = images(tmp_path, "a/1.png", "b/1.png", "stray.png")
    (data / "cow").mkdir()
    (data / "b.zip").touch()
    source = open_source(str(data))
    assert source.classes == ["a", "b"] and source.left_out == 3 and len(list(source.read())) == 2
    (record,) = caplog.records
    assert all(name in record.message for name in ("stray.png", "b.zip", "cow"))


def test_images_that_metadata_does_not_list_are_named(tmp_path, caplog):
    data = images(tmp_path, "château.png", "b.png", "in/c.png")
    rows = [{"file_name": "in/c.png", "text": "see"}, {"file_name": "cha\u0302teau.png", "text": "é" * 100_000}]
    for encoding in ("utf-8", "utf-16"):
        metadata(data, *rows, encoding=encoding)
        caplog.clear()
        assert texts(data) == ["é" * 100_000, "see"] and "b.png" in caplog.text
    (data / "metadata.jsonl").write_bytes('{"file_name": "b.png", "text": "café"}'.encode("cp1252"))
    with pytest.raises(ValueError, match="metadata.jsonl is not UTF-8 in line 1"):
        open_source(str(data))


def test_captions_may_be_in_metadata_csv(tmp_path):
    data = images(tmp_path, "a.png", "in/b.png")
    (data / "metadata.csv").write_text('file_name,text\nin/b.png,"two, and\nmore"\na.png,one\n')
    assert texts(data) == ["one", "two, and\nmore"]
    for line, reason in (
        ("a.png", "metadata.csv has too few or many cells in line 2"),
        ('a.png,"x', "metadata.csv cannot be read"),
        ("c.png,x", "line 2 of .*metadata.csv names c.png"),
    ):
        (data / "metadata.csv").write_text(f"file_name,text\n{line}\n")
        with pytest.raises(ValueError, match=reason):
            open_source(str(data))
    metadata(data, {"file_name": "a.png", "text": "one"})
    with pytest.raises(ValueError, match="metadata.csv.*: keep one of the two"):
        open_source(str(data))


def test_columns_of_other_names_are_told_with_what_they_may_be_called(tmp_path):
    for opened in (texts, lambda data: load_pairs(data, (8, 8))):
        with pytest.raises(ValueError, match="columns prompt, image: call that of its captions text, .* label"):
            opened(table(tmp_path / "a.parquet", prompt=["one"]))


def test_captions_may_be_next_to_images(tmp_path):
    data = images(tmp_path, "a.png", "in/b.webp")
    (data / "a.txt").write_text("one")
    with pytest.raises(ValueError, match="b.webp has no caption"):
        open_source(str(data))
    (data / "in" / "b.txt").write_text("two")
    assert texts(data) == ["one", "two"] == load_pairs(data, (8, 8)).captions


def test_a_folder_of_another_layout_is_refused_with_the_layouts(tmp_path):
    flat = images(tmp_path / "flat", "a.png", "b.png", "thumbs/a.png")
    with pytest.raises(ValueError, match="a.png.*metadata.jsonl.*NAME.txt.*per class"):
        open_source(str(flat))
    both = images(tmp_path / "both", "cat/1.png", "dog/1.png")
    archive(both / "cats.tar", ("1.png", png()))
    for opened in (lambda: open_source(str(both)), lambda: open_pixels(both, 8)):
        with pytest.raises(ValueError, match="cats.tar"):
            opened()
    several = table(tmp_path / "several" / "a.parquet", text=["a"]).parent
    archive(several / "b.tar", ("1.png", png()))
    with pytest.raises(ValueError, match=".parquet, .tar"):
        open_source(str(several))


def test_folders_of_splits_are_chosen_by_their_whole_names(tmp_path, caplog):
    data = images(tmp_path / "data", "train/ant/1.png", "train/bee/1.png", "val/ant/1.png")
    assert open_source(str(data)).classes == ["ant", "bee"] and "val" in caplog.text
    assert open_source(str(data), split="val").classes == ["ant"]
    with pytest.raises(ValueError, match="the splits train, val"):
        open_source(str(data), split="test")
    with pytest.raises(ValueError, match="splits by their names"):
        open_source(str(images(tmp_path / "flat", "train/1.png", "test/1.png")))
    with pytest.raises(ValueError, match="has no splits"):
        open_source(str(data / "train"), split="val")


def test_a_part_of_a_folder_is_taken(tmp_path):
    data = images(tmp_path, *(f"a/{number}.png" for number in range(10)))
    assert [file.name for file in open_source(str(data), split="train[:20%]").files] == ["a/0.png", "a/1.png"]


# Shards


def test_shards_of_other_splits_are_not_read(tmp_path, caplog):
    clone = tmp_path / "clone"
    table(clone / "data" / "train-00000-of-00001.parquet", text=["a", "b"])
    table(clone / "data" / "test-00000-of-00001.parquet", text=["c"])
    (clone / "README.md").write_text("A data set.")
    assert texts(clone) == ["a", "b"] and "test-00000" in caplog.text
    assert texts(clone, split="test") == ["c"] and len(open_pixels(clone, 8, split="test")) == 1
    assert texts(clone / "data" / "*.parquet") == ["a", "b"] and len(open_pixels(clone, 8)) == 2
    with pytest.raises(ValueError, match="the splits test, train"):
        open_source(str(clone), split="validation")
    for name in ("imagenet-train-000000", "imagenet-validation-000000"):
        archive(tmp_path / "tar" / f"{name}.tar", ("1.png", png()), ("1.txt", name.encode()))
    assert texts(tmp_path / "tar", split="val") == ["imagenet-validation-000000"]


def test_words_in_names_of_shards_that_are_no_splits_choose_nothing(tmp_path):
    for name in ("bus", "freight-train", "strain"):
        table(tmp_path / f"{name}-0.parquet", text=[name])
    assert texts(tmp_path) == ["bus", "freight-train", "strain"]
    table(tmp_path / "test-0.parquet", text=["test"])
    with pytest.raises(ValueError, match="test-0.parquet, which is named after a split"):
        open_source(str(tmp_path))


def test_shards_without_rows_are_passed_over(tmp_path):
    none = {"text": pa.array([], pa.string()), "image": pa.array([], pa.binary())}
    table(tmp_path / "p" / "0.parquet", **none)
    table(tmp_path / "p" / "1.parquet", text=["a"])
    archive(tmp_path / "t" / "0.tar")
    archive(tmp_path / "t" / "1.tar", ("1.png", png()), ("1.txt", b"a"))
    for kind in ("p", "t"):
        assert texts(tmp_path / kind) == ["a"] and len(open_pixels(tmp_path / kind, 8)) == 1
    with pytest.raises(ValueError, match="has no rows"):
        open_source(str(tmp_path / "p" / "0.parquet"))


def test_rows_are_read_from_any_row_on(tmp_path):
    for shard in range(3):
        table(tmp_path / "p" / f"{shard}.parquet", text=[f"{shard}a", f"{shard}b"])
        files = [
            (f"{i}.{kind}", data) for i in "ab" for kind, data in (("png", png()), ("txt", f"{shard}{i}".encode()))
        ]
        archive(tmp_path / "t" / f"{shard}.tar", *files)
    for kind in ("p", "t"):
        rows = list(open_source(str(tmp_path / kind)).read())
        for start in range(7):
            assert list(open_source(str(tmp_path / kind)).read(start)) == rows[start:]


def cut(path, count):
    path.write_bytes(path.read_bytes()[:count])


SAMPLES = [(f"{i}.{kind}", data) for i in range(3) for kind, data in (("png", png()), ("txt", b"a"))]


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("b.parquet", lambda path: cut(path, path.stat().st_size // 2)),
        ("b.parquet", lambda path: path.write_bytes(b"")),
        ("b.parquet", lambda path: table(path, label=[1])),
        ("b.tar", lambda path: path.write_bytes(b"")),
        ("b.tar", lambda path: path.write_bytes(b"PK\3\4" * 1000)),
        # Between two samples, where tarfile sees an end.
        ("b.tar", lambda path: cut(path, 4 * 1024)),
        ("b.tar", lambda path: archive(path, ("1.png", png()), ("1.txt", b"caf\xe9"))),
        ("b.tar", lambda path: archive(path, ("1.png", png()), ("1.cls", b"9" * 30))),
        ("b.tar", lambda path: archive(path, *SAMPLES, ("9.png", png()), ("9.txt", b"a"), ("9.json", b"[" * 100_000))),
    ],
    ids=["cut", "empty", "columns", "empty-tar", "foreign-tar", "cut-tar", "latin-tar", "class-tar", "deep-tar"],
)
def test_a_shard_that_cannot_be_read_is_named(tmp_path, name, damage):
    if name.endswith("parquet"):
        table(tmp_path / "a.parquet", text=["a"])
        table(tmp_path / name, text=["a"])
    else:
        archive(tmp_path / "a.tar", *SAMPLES)
        archive(tmp_path / name, *SAMPLES)
    damage(tmp_path / name)
    with pytest.raises(ValueError, match=rf"{name}[^\n]*: [^\n]+$"):
        texts(tmp_path)


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"text": [5]}, "has the caption 5, which is not a text"),
        ({"text": [None]}, "has no text"),
        ({"image": [{"bytes": None, "path": None}]}, "has no image"),
        ({"image": [5]}, "has 5 as image"),
        ({"image": ["gone.png"]}, "names gone.png"),
        ({"image": ["s3://bucket/a.png"]}, "names s3://bucket/a.png"),
    ],
)
def test_a_wrong_row_is_named_at_every_entrance(tmp_path, columns, reason):
    path = table(tmp_path / "a.parquet", **{"text": ["a"], **columns})
    opened = [lambda: texts(path), lambda: load_pairs(path, (8, 8))]
    if "image" in columns:
        opened.append(lambda: open_pixels(path, 8).read([0]))
    for one in opened:
        with pytest.raises(ValueError, match=rf"a.parquet, row 1, {reason}[^\n]*: [^\n]+$"):
            one()


# Classes


@pytest.mark.parametrize("label", [1.5, float("nan"), float("inf"), True, [1], "²", "9" * 30, -1, MOST_CLASSES])
def test_what_is_no_class_is_refused_with_its_row(tmp_path, label):
    with pytest.raises(ValueError, match=r"row 1, has the class .*: give "):
        texts(table(tmp_path / "a.parquet", label=[label]))
    if label == label and label != float("inf"):
        data = images(tmp_path / "folder", "a.png")
        metadata(data, {"file_name": "a.png", "label": label})
        with pytest.raises(ValueError, match="line 1 of .*metadata.jsonl, has the class"):
            open_source(str(data))


def test_any_number_of_classes_is_taken(tmp_path):
    path = table(tmp_path / "a.parquet", label=[0, MOST_CLASSES - 1])
    assert texts(path) == ["0", str(MOST_CLASSES - 1)]
    assert texts(table(tmp_path / "b.parquet", label=[2.0, 0.0])) == ["2", "0"]


def test_given_classes_are_matched_by_name(tmp_path):
    data, long = images(tmp_path, "ant/1.png", "bee/1.png"), "n" * 100_000
    assert texts(data, classes=["bee", long, "ant"]) == ["2", "0"]
    # Names for folders such as n01440764.
    assert open_source(str(data), classes=["tench", "shark"]).classes == ["tench", "shark"]
    for classes, message in (
        (["ant", "cow"], "'bee', which is not in"),
        (["x"], "2 classes"),
        (["x", "x"], "'x' twice"),
    ):
        with pytest.raises(ValueError, match=message):
            open_source(str(data), classes=classes)


# The command


@pytest.mark.parametrize(
    "words",
    [
        ["train", "tokens", "--data", "", "--out", "x"],
        ["train", "tokens", "--data", "x", "--out="],
        ["train", "tokenizer", "--recipe", "imagenet-vq-16", "--data", "", "--heldout", "y", "--out", "x"],
        ["train", "lora", "--data", "", "--out", "x"],
        ["train", "tokens", "--data", "x", "--out", "y", "--model", ""],
        ["generate", "--prompts", ""],
        ["generate", "cat", "--model", ""],
        ["generate", "cat", "--model", "emoji-arpg", "--lora", ""],
        ["eval", "score", ""],
        ["eval", "score", ".", "--ref", ""],
    ],
)
def test_an_empty_path_is_not_the_current_folder(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["arimage", *words])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2 and "is empty: give a" in capsys.readouterr().err
