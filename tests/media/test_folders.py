"""Which files of a folder count."""

import logging
import os

from arimage.eval.metrics.features import image_paths
from arimage.media.folders import IMAGE_SUFFIXES, NAMED, list_files, say_left_out


def touch(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def test_links_are_followed_but_not_in_circles(tmp_path):
    touch(tmp_path, "data/a/1.png", "else/b/2.png", "else/3.png")
    data = tmp_path / "data"
    (data / "b").symlink_to(tmp_path / "else" / "b")
    (data / "a" / "3.png").symlink_to(tmp_path / "else" / "3.png")
    (data / "a" / "up").symlink_to(data)
    (data / "a" / "self").symlink_to("self")
    (data / "gone.png").symlink_to("nowhere.png")
    os.mkfifo(data / "pipe.png")
    found = list_files(data, IMAGE_SUFFIXES)
    assert found.files == ["a/1.png", "a/3.png", "b/2.png"]
    assert [name.partition(" ")[0] for name in found.lost] == ["a/self", "a/up", "gone.png", "pipe.png"]


def test_names_are_no_patterns_and_their_order_is_that_of_their_parts(tmp_path):
    names = ["a/z.png", "a b/?*.JPG", "a-[1]/x.tif"]
    touch(tmp_path / "[2]", *names)
    assert list_files(tmp_path / "[2]", IMAGE_SUFFIXES).files == sorted(names, key=lambda name: name.split("/"))


def test_what_is_left_out_is_counted_and_named_once(tmp_path, caplog):
    touch(tmp_path, "1.png", "2.avif", "3.zip", "notes.txt", ".hidden.png", "__MACOSX/1.png", "Thumbs.db")
    assert [path.name for path in image_paths(tmp_path)] == ["1.png", "2.avif"]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "2 files" in record.message
    assert all(name in record.message for name in ("3.zip", "notes.txt")) and "hidden" not in record.message
    caplog.clear()
    say_left_out("a folder", [f"{number}.zip" for number in range(1000)])
    assert "1000 files" in caplog.text and f"{NAMED}.zip" not in caplog.text
    caplog.clear()
    say_left_out("a folder", [])
    assert not caplog.records
