"""Files are on disk before they get their names, whole or not at all."""

import os

import pytest

from arimage.eval.runs.files import replace


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
    replace(tmp_path / "a.json", lambda file: file.write_text("new"))
    assert calls == [str(tmp_path / ".a.json.tmp"), "rename", str(tmp_path)]
