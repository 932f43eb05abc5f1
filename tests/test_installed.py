"""What an installed distribution adds is found by its entry points, and what is missing is named in one sentence."""

import sys

import pytest
from commands import refusal

from arimage import AutoPipeline, auto
from arimage.app.engine.models import model_names
from arimage.cli import main as cli
from arimage.eval.job import Job
from arimage.eval.protocol import find_protocol
from arimage.eval.runs.prompts import prompt_file, prompt_metrics
from arimage.eval.score import check_metrics, metric_names
from arimage.settings.installed import KINDS, installed, installed_models, installed_packages
from arimage.training.recipe import TokenizerRecipe, load_recipe


MODULE = """
from pathlib import Path

from arimage.settings.installed import Prompts

FOLDER = Path(__file__).parent
TREES = Prompts(FOLDER / "trees.txt", ["height"])


def height(job):
    return {}


def refuse():
    raise ValueError("the tree is too high: give another")
"""
ENTRY_POINTS = """
[arimage.models]
trees = trees:FOLDER
[arimage.recipes]
trees = trees:FOLDER
[arimage.protocols]
trees = trees:FOLDER
[arimage.prompts]
trees = trees:TREES
[arimage.metrics]
height = trees:height
"""


@pytest.fixture
def forget():
    """The entry points are read again, now and after the test."""
    installed.cache_clear()
    yield
    installed.cache_clear()


@pytest.fixture
def trees(forget, monkeypatch, tmp_path):
    """A distribution with a model, a recipe, prompts and a metric, next to those that are installed."""
    (tmp_path / "trees.py").write_text(MODULE)
    (tmp_path / "trees.txt").write_text("a fir\n")
    (tmp_path / "elm.toml").write_text('tokenizer = "PatchVQModel"\nimage_size = 8\n')
    (tmp_path / "oak").mkdir()
    (tmp_path / "oak" / "model_index.json").write_text('{"_class_name": "VARPipeline"}')
    (tmp_path / "trees-1.0.dist-info").mkdir()
    (tmp_path / "trees-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: trees\nVersion: 1.0\n")
    (tmp_path / "trees-1.0.dist-info" / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("trees", None)


@pytest.fixture
def alone(forget, monkeypatch):
    """arimage without any other distribution."""
    monkeypatch.setattr("arimage.settings.installed.entry_points", lambda group: [])


def test_what_a_distribution_adds_is_found_by_name(trees):
    assert installed_models()["oak"] == trees / "oak" == auto.find_model("oak") and "oak" in auto.packaged_models()
    assert load_recipe("elm", TokenizerRecipe).image_size == 8
    assert prompt_file("trees") == trees / "trees.txt" and prompt_metrics("trees") == ["height"]
    assert "height" in metric_names() and "trees" in installed_packages()
    check_metrics(Job(trees), ["height"])


def test_a_folder_comes_before_what_is_installed_and_that_before_what_is_published(trees, monkeypatch):
    monkeypatch.setattr(auto, "installed_models", lambda: {"oak": trees / "oak", "var-d16-256": trees / "oak"})
    assert auto.find_model("var-d16-256") == trees / "oak" and auto.find_model("var-d20-256") is None
    monkeypatch.chdir(trees)
    (trees / "var-d16-256").mkdir()
    (trees / "var-d16-256" / "model_index.json").write_text('{"_class_name": "VARPipeline"}')
    assert auto.find_model("var-d16-256").resolve() == trees / "var-d16-256"


def test_what_a_distribution_refuses_is_a_sentence_of_the_command(trees, capsys):
    import trees as module

    with pytest.raises(SystemExit) as end:
        cli.main(module.refuse)
    assert end.value.code == 2 and capsys.readouterr().err == "arimage: the tree is too high: give another\n"


NEEDED = r'emoji-.* belongs to arimage-emoji, which is not installed: run `pip install "arimage\[emoji\]"`'


@pytest.mark.usefixtures("alone")
def test_without_the_models_of_emoji_everything_that_needs_them_says_what_to_install(capsys):
    assert all(not installed(kind) for kind in KINDS) and auto.packaged_models() == []
    for call in (
        lambda: AutoPipeline.from_pretrained("emoji-llamagen"),
        lambda: load_recipe("emoji-var", TokenizerRecipe),
        lambda: find_protocol("emoji-arpg"),
        lambda: model_names(None),
    ):
        with pytest.raises(ValueError, match=f"^{NEEDED}[^\n]*$"):
            call()
    error = refusal(capsys, "generate", "a red heart")
    assert error.startswith("arimage: emoji-arpg belongs to arimage-emoji") and error.endswith("with --model")
    with pytest.raises(ValueError, match="unknown metric 'retrieval': choose among fid, "):
        check_metrics(Job(None), ["retrieval"])
    with pytest.raises(ValueError, match=r'^icons-arpg belongs to arimage-icons, .*"arimage\[icons\]"'):
        AutoPipeline.from_pretrained("icons-arpg")
