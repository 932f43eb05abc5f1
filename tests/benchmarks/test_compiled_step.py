"""`benchmarks/compiled_step.py`: what `pipe.compile()` leaves of a step on a GPU."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import arimage.kernels


pytestmark = pytest.mark.skipif(not arimage.kernels._TRITON, reason="triton is not installed")
SCRIPT = Path(__file__).parents[2] / "benchmarks/compiled_step.py"
# The kernels of a layer before and after `fuse_projections`.
LAYERS = {"llamagen-xl-384": (10, 9), "janus-pro-7b": (12, 9), "glm-image": (17, 15)}


def rows(*options):
    """Launches per layer, launches once and copies of the cache by model and decoding. The whole process of the
    script believes that there is a GPU."""
    command = [sys.executable, str(SCRIPT), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^\| (\S+) \| (\S+) \| (\S+) \| (\S+) \| (\d+) \|$", done.stdout, re.M)
    return {(model, decoding): tuple(map(float, numbers)) for model, decoding, *numbers in found}


def test_a_compiled_step_of_llamagen_copies_no_cache():
    ((each, once, copies),) = rows("--model", "llamagen-xl-384", "--layers", "1", "2").values()
    assert each <= LAYERS["llamagen-xl-384"][0] and once <= 18 and copies == 0


@pytest.mark.slow
def test_no_compiled_step_copies_the_cache():
    found = rows()
    assert len(found) == 11 and {copies for _, _, copies in found.values()} == {0}
    for model, (most, _) in LAYERS.items():
        assert found[model, "ar"][0] <= most


@pytest.mark.slow
def test_fused_projections_are_fewer_launches():
    found = rows("--fuse", "--layers", "1", "2", "--model", *LAYERS)
    assert {model: each for (model, _), (each, _, _) in found.items()} == {
        model: each for model, (_, each) in LAYERS.items()
    }
