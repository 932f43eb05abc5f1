"""Files are on disk before they get their names, whole or not at all."""

import errno
import os
import re
from pathlib import Path

import pytest

from arimage.eval.runs.files import FullDisk, remove_leftovers, space_in, write_whole


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.json"
    write_whole(path, lambda file: file.write_text("old"))

    def fail(file):
        assert file.parent == tmp_path
        file.write_text("ne")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(path, fail)
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"] and path.read_text() == "old"


def test_a_file_is_on_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    calls, fsync, rename = [], os.fsync, os.replace

    def recorded_fsync(descriptor):
        calls.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def recorded_rename(source, target):
        calls.append("rename")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_rename)
    write_whole(tmp_path / "a.json", lambda file: file.write_text("new"))
    assert re.fullmatch(r"\.a\.json\.\w+\.tmp", Path(calls[0]).name) and calls[1:] == ["rename", str(tmp_path)]


def test_what_killed_commands_left_is_removed(tmp_path):
    for name in (".a.json.tmp", ".a.json.0f.tmp", "a.json", ".b.json.0f.tmp"):
        (tmp_path / name).touch()
    remove_leftovers(tmp_path / "a.json")
    assert {file.name for file in tmp_path.iterdir()} == {"a.json", ".b.json.0f.tmp"}


def test_a_full_disk_is_one_sentence_whatever_library_wrote(tmp_path):
    for error in (OSError(errno.ENOSPC, "no space"), RuntimeError("torch hides it")):
        error.__cause__ = OSError(errno.EDQUOT, "quota")
        with (
            pytest.raises(FullDisk, match=f"no space is left in {tmp_path} .*make room and repeat"),
            space_in(tmp_path),
        ):
            raise error
    with pytest.raises(RuntimeError, match="a bug"), space_in(tmp_path):
        raise RuntimeError("a bug")
