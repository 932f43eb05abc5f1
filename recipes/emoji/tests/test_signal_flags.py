"""The flags of the demonstration of adapters, and what the benchmark prints about runs of them."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import signal_flags

from arimage.eval.runs.manifest import prompt_rows
from arimage.eval.runs.prompts import read_prompts
from arimage.media.files import read_image


EXAMPLE = Path(__file__).parents[3] / "examples" / "signal_flags.py"


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    spec = importlib.util.spec_from_file_location("flags_example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    folder = tmp_path_factory.mktemp("flags")
    example.main(str(folder))
    return folder


def rows_of(flags):
    return [json.loads(line) for line in (flags / "metadata.jsonl").read_text().splitlines()]


def test_there_are_thirty_different_flags_with_three_captions_each(flags):
    rows, pictures = rows_of(flags), {path.name: read_image(path).tobytes() for path in flags.glob("*.png")}
    assert len(pictures) == len(set(pictures.values())) == 30 and {row["file_name"] for row in rows} == set(pictures)
    assert len({row["text"] for row in rows}) == 90 and all(row["text"] == row["prompt"] for row in rows)
    kilo = read_image(flags / "kilo.png")
    assert kilo.getpixel((20, 30)) == (255, 193, 7) and kilo.getpixel((50, 30)) == (21, 101, 192)


def test_runs_are_judged_by_their_nearest_picture(flags, tmp_path, write_run, monkeypatch, capsys):
    prompts = read_prompts(flags / "metadata.jsonl")
    pictures = [np.asarray(read_image(flags / row["file_name"])) for row in prompts]
    shifted = [*pictures[3:], *pictures[:3]]
    write_run(tmp_path / "right", prompt_rows(prompts, 0), pictures)
    write_run(tmp_path / "wrong", prompt_rows(prompts, 0), shifted)
    old = [{"prompt": "kilo", "check": "known", "parts": [["pizza", "signal flag kilo"]]}] * 10
    write_run(tmp_path / "old", prompt_rows(old, 0), [pictures[30]] * 10)
    runs = ["--new", "wrong", "right", "--old", "old", "old", "--out", "sheet.png"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["signal_flags.py", str(flags), *runs])
    signal_flags.main()
    lines = capsys.readouterr().out.splitlines()[2:]
    assert lines[0] == "| wrong | flags | 90 | 0.000 (0.000 to 0.041) | 1.0 |"
    assert lines[1] == "| right | flags | 90 | 1.000 (0.959 to 1.000) | 1.0 |"
    # Ten images of one prompt have no error.
    assert lines[2] == "| old | known | 10 | 1 | 1.0 |"
    sheet = read_image(tmp_path / "sheet.png")
    assert sheet.size == (640, 3 * (3 * 64 + 8) + 2 * 64 + 8)
    # The flag itself, then the images of both runs.
    assert sheet.crop((0, 0, 64, 64)).tobytes() == sheet.crop((0, 128, 64, 192)).tobytes()
    assert sheet.crop((0, 0, 64, 64)).tobytes() != sheet.crop((0, 64, 64, 128)).tobytes()
