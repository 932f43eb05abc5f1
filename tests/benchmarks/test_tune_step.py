"""`benchmarks/tune_step.py`: how it chooses, and all of it in Triton's interpreter, in processes of their own since
Triton asks for it when it is imported."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from arimage.kernels.operation import DEVICES


if not DEVICES:
    pytest.skip("triton is not installed", allow_module_level=True)

import tune_step


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


@pytest.mark.slow
def test_every_operation_is_searched_and_no_setting_changes_a_result(folder):
    found = rows(folder)
    assert not [row for row in found if "error" in row]
    keys = {row["key"] for row in found}
    assert {key.split()[1] for key in keys} == {"linear", "qkv", "attention", "norm_and_add", "modulated"}
    assert all(sum(row["key"] == key for row in found) >= 2 for key in keys)


@pytest.mark.slow
def test_the_table_has_sums_that_do_not_depend_on_the_number_of_rows(folder):
    table = json.loads((folder / "tuned.json").read_text())
    sums = {}
    for key, settings in table.items():
        sums.setdefault(key.rpartition(" ")[0], []).append({n: v for n, v in settings.items() if n in SUMS})
    assert table and all(each == of_shape[0] for of_shape in sums.values() for each in of_shape)
    assert all(len(of_shape) == 4 for of_shape in sums.values() if of_shape[0])


@pytest.mark.slow
def test_what_was_searched_is_not_searched_again(folder):
    before = rows(folder)
    assert run(folder)[-1] == "nothing is left"
    assert rows(folder) == before


class Timed:
    """Trials whose microseconds a function says."""

    def __init__(self, us):
        self.us = us

    def measure(self, key, case, many):
        return [self.us(int(key.split()[-1]), settings) for settings in many]


def searched(us, timed):
    plan = tune_step.Plan(torch.device("cpu"), tune_step.SETTINGS, {}, (), 1)
    case = tune_step.Case("linear", {})
    found = tune_step.search({f"9.0 linear 64 {rows}": case for rows in timed}, plan, Timed(us))
    return {int(key.split()[-1]): settings for key, settings in found.items()}


def us(rows, settings):
    """Eight parts halve the time, but not of 64 rows, which fail with blocks of 512; 64 rows gain by three stages, and
    8 rows by blocks of 64."""
    if settings.get("block_width") == 512 and rows == 64:
        return math.inf
    time = 50.0 if settings.get("parts") == 8 and rows < 64 else 40.0 if settings.get("block_width") == 512 else 100.0
    return time - 10 * (settings.get({64: "stages", 8: "block_out"}.get(rows, "")) in (3, 64))


def test_what_sums_depend_on_is_chosen_for_all_numbers_of_rows():
    tuned = searched(us, (8, 32, 64))
    assert tuned[8] == {"parts": 8, "block_out": 64} and tuned[32] == {"parts": 8}
    assert tuned[64] == {"parts": 8, "stages": 3} and tuned[16] == tuned[32]


def test_what_sums_depend_on_stays_where_64_rows_were_not_timed():
    assert searched(us, (8, 32)) == {8: {"block_out": 64}}


def test_a_hundredth_is_no_gain():
    assert searched(lambda rows, settings: 100 - bool(settings), (8, 64)) == {}
