"""The metadata of all distributions agree with each other and with the workflows, which run what exists, pinned."""

import re
import subprocess
import tomllib
from pathlib import Path

import lowest
import pytest
import yaml

import arimage_emoji
import arimage_icons
from arimage import __version__
from arimage.cli import main as cli


ROOT = Path(cli.__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
RECIPES = [tomllib.loads(path.read_text("utf-8"))["project"] for path in sorted(ROOT.glob("recipes/*/pyproject.toml"))]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
CI = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text("utf-8"))
CHECKS = CI["jobs"]["check"]["strategy"]["matrix"]["include"]


def test_all_distributions_have_one_version_and_say_the_same_of_themselves():
    assert arimage_emoji.__version__ == arimage_icons.__version__ == __version__
    for recipe in RECIPES:
        for key in ("requires-python", "license", "authors"):
            assert recipe[key] == PROJECT[key]
        assert set(recipe["classifiers"]) <= set(PROJECT["classifiers"])


def test_every_distribution_is_an_extra_in_the_container_and_published():
    names = [recipe["name"].removeprefix("arimage-") for recipe in RECIPES]
    assert names == ["emoji", "icons"]
    extras = PROJECT["optional-dependencies"]
    assert [extras[name] for name in names] == [[f"arimage-{name}>=0.1,<0.2"] for name in names]
    assert set(names) <= set(re.findall(r"[\w-]+", extras["all"][0]))
    release = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text("utf-8"))["jobs"]
    published = [row["project"] for row in release["publish"]["strategy"]["matrix"]["include"]]
    assert published == ["arimage", *(f"arimage-{name}" for name in names)]
    checked = str(release["build"]["steps"])
    dockerfile = (ROOT / "Dockerfile").read_text("utf-8")
    assert all(f"dist/arimage_{name}-" in checked and f"/src/recipes/{name}" in dockerfile for name in names)


def test_the_classifiers_name_the_versions_of_python_that_the_workflow_tries():
    named = re.findall(r"Python :: (3\.\d+)'", str(PROJECT["classifiers"]))
    assert named == sorted({row["python"] for row in CHECKS}, key=lambda version: int(version[2:]))
    assert PROJECT["requires-python"] == f">={named[0]}"
    assert {row["python"] for row in CHECKS if "lowest" in row["run"]} == {named[0]}


def test_all_that_users_install_has_a_lower_bound(monkeypatch):
    found = lowest.lowest()
    assert found["torch"] == "2.10" and found["ray"] == "2.60" and "pytest" not in found
    monkeypatch.setitem(lowest.PROJECT, "dependencies", ["numpy"])
    with pytest.raises(ValueError, match="'numpy' has no lower bound"):
        lowest.lowest()
    monkeypatch.setitem(lowest.PROJECT, "dependencies", ["numpy>=1", "numpy>=2"])
    with pytest.raises(ValueError, match="numpy has two lower bounds, 1 and 2"):
        lowest.lowest()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_pins_its_actions_and_limits_its_jobs(path):
    used = re.findall(r"uses: (.+)", path.read_text("utf-8"))
    assert used and all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v[\d.]+", action) for action in used)
    workflow = yaml.safe_load(path.read_text("utf-8"))
    assert workflow["permissions"] in ({}, {"contents": "read"}) and "concurrency" in workflow
    assert all("timeout-minutes" in job for job in workflow["jobs"].values())


def test_the_workflows_run_what_exists():
    commands = {row["run"] for row in CHECKS} | {CI["jobs"]["slow"]["steps"][-1]["run"]}
    release = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text("utf-8"))
    commands |= {step["run"] for step in release["jobs"]["build"]["steps"] if step.get("run", "").startswith("make")}
    for command in commands:
        program, *targets = command.split()
        if program == "make":
            asked = subprocess.run(["make", "--dry-run", *targets], cwd=ROOT, capture_output=True, text=True)
            assert asked.returncode == 0, asked.stderr
        else:
            assert (ROOT / program).stat().st_mode & 0o100
