"""`benchmarks/tune_step.py` in the interpreter of Triton, which asks for it when it is imported: hence processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from arimage.kernels.operation import DEVICES


pytestmark = [pytest.mark.slow, pytest.mark.skipif(not DEVICES, reason="triton is not installed")]
SCRIPT = Path(__file__).parents[2] / "benchmarks/tune_step.py"
# Settings of which no sum may depend on the number of rows.
SUMS = {"block_width", "parts", "num_warps", "block_keys"}


def run(folder, *options):
    command = [sys.executable, str(SCRIPT), "--out", str(folder), "--tiny", *options]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def rows(folder):
    return [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tuned")
    assert run(folder, "--minutes", "0")[-1] == "there was no time for more: start the command again"
    assert run(folder)[-1] == "nothing is left"
    return folder


def test_every_operation_is_searched_and_no_setting_changes_a_result(folder):
    found = rows(folder)
    assert not [row for row in found if "error" in row]
    keys = {row["key"] for row in found}
    assert {key.split()[1] for key in keys} == {"linear", "qkv", "attention", "norm_and_add", "modulated"}
    assert all(sum(row["key"] == key for row in found) >= 2 for key in keys)


def test_the_table_has_sums_that_do_not_depend_on_the_number_of_rows(folder):
    table = json.loads((folder / "tuned.json").read_text())
    sums = {}
    for key, settings in table.items():
        sums.setdefault(key.rpartition(" ")[0], []).append({n: v for n, v in settings.items() if n in SUMS})
    assert table and all(each == of_shape[0] for of_shape in sums.values() for each in of_shape)
    assert all(len(of_shape) == 4 for of_shape in sums.values() if of_shape[0])


def test_what_was_searched_is_not_searched_again(folder):
    before = rows(folder)
    assert run(folder)[-1] == "nothing is left"
    assert rows(folder) == before
