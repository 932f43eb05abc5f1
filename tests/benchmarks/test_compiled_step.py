"""`benchmarks/compiled_step.py`: what `pipe.compile()` leaves of a step on a GPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import arimage.kernels


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not arimage.kernels._TRITON, reason="triton is not installed"),
]
SCRIPT = Path(__file__).parents[2] / "benchmarks/compiled_step.py"
IN_TORCH = {"ARIMAGE_STEP_KERNELS": "0"}


def rows(*options, **environment):
    """Launches per layer, launches once and copies of the cache by model. The whole process of the script believes
    that there is a GPU."""
    command = [sys.executable, str(SCRIPT), *options]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^\| (\S+) \| \S+ \| (\S+) \| (\S+) \| (\d+) \|$", done.stdout, re.M)
    return {model: tuple(map(float, numbers)) for model, *numbers in found}


def test_a_compiled_step_of_llamagen_has_five_kernels_per_layer_and_copies_no_cache():
    ((each, once, copies),) = rows("--model", "llamagen-xl-384", "--layers", "1", "2").values()
    assert each <= 5 and once <= 7 and copies == 0


@pytest.mark.parametrize("environment", [{}, IN_TORCH], ids=["kernels", "torch"])
def test_no_compiled_step_copies_the_cache(environment):
    found = rows(**environment)
    assert len(found) == 11 and {copies for _, _, copies in found.values()} == {0}


def test_fused_projections_leave_few_launches_per_layer():
    most = {"llamagen-xl-384": 9, "janus-pro-7b": 9, "glm-image": 14}
    found = rows("--fuse", "--layers", "1", "2", "--model", *most, **IN_TORCH)
    assert found.keys() == most.keys()
    assert {model: launches for model, (launches, _, _) in found.items() if launches > most[model]} == {}


def test_views_that_a_step_makes_are_seen_to_copy_the_cache(tmp_path):
    """The count can fail."""
    script = tmp_path / "script.py"
    script.write_text(
        "import compiled_step\n"
        "from arimage.models.cache import StackedCache\n"
        "StackedCache._set_stacks = lambda self, *both: vars(self).update(stacks=both, keys=both[0], values=both[1])\n"
        "compiled_step.main()\n"
    )
    command = [sys.executable, str(script), "--model", "llamagen-xl-384", "--layers", "1", "2"]
    path = os.pathsep.join([str(SCRIPT.parent), str(SCRIPT.parents[1])])
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | IN_TORCH | {"PYTHONPATH": path})
    assert int(re.findall(r"\| (\d+) \|$", done.stdout, re.M)[-1]) >= 2 * 2, done.stderr
