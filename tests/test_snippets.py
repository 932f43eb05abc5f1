"""The Python snippets of the documentation: each runs as it stands, alone or after those of its page that it
continues, or there is a reason why it cannot run here."""

import re
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import pytest
from adapters import adapter
from commands import ROOT, python
from pages import blocks, name, read, unknown_names
from safetensors.torch import save_file

from arimage import AutoPipeline


# The snippets of the quickstart continue its commands.
PAGES = [
    ROOT / "README.md",
    *sorted(set(ROOT.glob("docs/**/*.md")) - {ROOT / "docs" / "quickstart.md"}),
    *sorted(ROOT.glob("arimage/pipelines/*/README.md")),
    *sorted(ROOT.glob("recipes/**/README.md")),
]
# Why a snippet cannot run here, by what it holds.
REASONS = {
    "published weights": r"from_pretrained\(\s*\"(?!emoji-|run/|path/)|load_published\(|GlmImagePipeline",
    "a GPU": r"\"cuda\"",
    "a running server": r"base_url|gradio_client|httpx\.post",
    "files of the reader": r"path/to|\"run/|photos/|street\.|\"generated\"",
    "minutes of compilation": r"\.compile\(|warm_up",
}
# Names that a snippet takes from the text around it.
FROM_THE_TEXT = {"image", "other", "edges", "tokens", "config", "client"}
# Of different pages and kinds of models, those that run by default, in this process.
SAMPLE = {"README.md 1", "docs/diffusers.md 2", "docs/editing.md 1", "docs/lora.md 1"}


class Snippet(NamedTuple):
    name: str
    code: str
    continues: str


def snippets(page: Path) -> list[Snippet]:
    """The snippets of a page, each with the code of those before that it continues."""
    found: list[Snippet] = []
    above = ""
    for number, code in enumerate(block.code for block in blocks(read(page)) if block.language in ("python", "py")):
        before = above if unknown_names(code) else ""
        found.append(Snippet(f"{name(page)} {number + 1}", code, before))
        above = before + code
    return found


EVERY = [snippet for page in PAGES for snippet in snippets(page)]


NAME = attrgetter("name")


def reason(snippet: Snippet) -> str | None:
    """Why a snippet cannot run here."""
    code = snippet.continues + snippet.code
    return next((why for why, pattern in REASONS.items() if re.search(pattern, code)), None)


RUN = [snippet for snippet in EVERY if reason(snippet) is None]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_snippets_use_names_that_their_page_defines(page):
    for snippet in snippets(page):
        assert unknown_names(snippet.continues + snippet.code) <= FROM_THE_TEXT, snippet.name


def test_most_snippets_of_packaged_models_run():
    assert len(RUN) > 15 and {snippet.name for snippet in RUN} >= SAMPLE


@pytest.fixture
def folder(tmp_path, snippet):
    """A folder with the file that snippets about adapters load."""
    if "style.safetensors" in snippet.continues + snippet.code:
        save_file(adapter(AutoPipeline.from_pretrained("emoji-llamagen"), size=0.01), tmp_path / "style.safetensors")
    return tmp_path


@pytest.mark.every(2)
@pytest.mark.parametrize("snippet", [snippet for snippet in RUN if snippet.name in SAMPLE], ids=NAME)
def test_a_snippet_runs(snippet, folder, monkeypatch):
    monkeypatch.chdir(folder)
    exec(compile(snippet.continues + snippet.code, snippet.name, "exec"), {"__name__": "__main__"})


@pytest.mark.slow
@pytest.mark.parametrize("snippet", RUN, ids=NAME)
def test_a_snippet_runs_in_a_process_of_its_own(snippet, folder):
    done = python("-c", snippet.continues + snippet.code, cwd=folder)
    assert done.returncode == 0, done.stderr[-2000:]
