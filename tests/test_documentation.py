"""The documentation: its links lead somewhere, its commands are ones that this version takes, its words are the
field's."""

import re
import shlex
from pathlib import Path

import pytest
import typer
from commands import ROOT
from pages import GUIDES, blocks, name, prose, read

import arimage
from arimage.auto import find_model
from arimage.cli import main as cli
from arimage.cli.options import DEFAULT_MODEL
from arimage.media.files import read_metadata
from arimage.media.metadata import Metadata


OTHERS = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", ".github/pull_request_template.md")
API = sorted(ROOT.glob("docs/api/*.md"))
PAGES = [*(ROOT / other for other in OTHERS), *GUIDES]

UNIT = "pass|step|image|picture|prompt|token|second|batch|weight|call|class|channel|row|side"
DIALECT = [
    r"\banew\b",
    r"\ba pass\b",
    r"\bone an image\b",
    rf"\b(codes?|tokens?|passes|images?|pictures?|bytes?|bits?|levels?|seconds) an? ({UNIT})\b",
    r"\bbeside\b",
    r"\blaws?\b",
    r"\b(goes|gone) on with\b",
    r"\bas it were\b",
    r"\bdraws? (an|a|the|its|all) (codes?|tokens?|images?|pictures?|maps?)\b",
]


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings."""
    headings = re.findall(r"^#+ +(.+)$", prose(text), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def broken_links(path: Path) -> list[str]:
    """The relative links of a page that lead to no file or heading."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(read(path))):
        target, _, anchor = link.partition("#")
        file = path if not target else path.parent / target
        if "://" in link or link.startswith("mailto:"):
            continue
        if not file.exists() or (anchor and anchor not in anchors(read(file))):
            broken.append(link)
    return broken


def shown_commands(text: str) -> set[str]:
    """The command lines in the code blocks of a page."""
    code = "".join(block.code for block in blocks(text)).replace("\\\n", " ")
    found = re.findall(r"^ *(?:\S+.* -m )?arimage (.+)$", code, flags=re.MULTILINE)
    return {" ".join(line.partition(" | ")[0].split()) for line in found}


def named_commands(text: str) -> set[str]:
    """The commands in the running text of a page, which may leave options out."""
    return {" ".join(line.split()) for line in re.findall(r"`arimage ([^`]+)`", prose(text))}


def loaded_models(text: str) -> set[str]:
    """Names that a page or docstring loads in Python."""
    return set(re.findall(r"(?:AutoPipeline\.from_pretrained|load_published)\(\"([^\"]+)\"", text))


COMMAND = typer.main.get_command(cli.app)


def find(command: str) -> tuple[object, list[str]]:
    """The command of a command line, and its arguments."""
    group, arguments = COMMAND, shlex.split(command, comments=True)
    while hasattr(group, "commands") and arguments and not arguments[0].startswith("-"):
        group = group.commands[arguments.pop(0)]
    return group, arguments


def quoted_messages(text: str) -> list[str]:
    """The messages in the first columns of the tables of a page, in parts: `...` stands for what varies."""
    rows = re.findall(r"^\| (`.+?) \| ", text, flags=re.MULTILINE)
    messages = [message for row in rows for message in re.findall(r"`([^`]+)`", row)]
    return [part for message in messages for part in message.split("...")]


SOURCES = [*GUIDES, *sorted((ROOT / "arimage" / "pipelines").rglob("*.py"))]
NAMES_OF_MODELS = set().union(*(loaded_models(read(path)) for path in SOURCES))


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_links_lead_to_files_and_headings(path):
    assert broken_links(path) == []


def test_troubleshooting_quotes_the_messages_of_the_code():
    # A message may be written in several strings.
    sources = "".join(re.sub(r'"\s+f?"', "", read(path)) for path in (ROOT / "arimage").rglob("*.py"))
    others = {"arimage: command not found", "Cannot import name", "No module named", "tokenizers", "kernels"}
    parts = set(quoted_messages(read(ROOT / "docs" / "troubleshooting.md"))) - others
    assert len(parts) > 15 and [part for part in sorted(parts) if part not in sources] == []


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_pages_use_the_words_of_the_field(path):
    text = " ".join(re.sub(r"`[^`]+`", "", prose(read(path))).split())
    assert [match.group() for pattern in DIALECT for match in re.finditer(pattern, text)] == []


def test_the_api_reference_names_what_exists():
    names = re.findall(r"^::: (\S+)\.(\w+)", "".join(read(path) for path in API), re.MULTILINE)
    missing = []
    for module, defined in names:
        path = module.replace(".", "/")
        files = [*ROOT.glob(f"{path}.py"), *ROOT.glob(f"{path}/__init__.py"), *ROOT.glob(f"recipes/emoji/{path}.py")]
        if not any(re.search(rf"^(class|def) {defined}\b", read(file), re.MULTILINE) for file in files):
            missing.append(f"{module}.{defined}")
    assert len(names) > 100 and missing == []


def test_docs_are_short():
    # A reader of all pages needs three hours. What was measured is in benchmarks/notes, and a fact stands on one page.
    assert sum(len(read(path).split()) for path in ROOT.glob("docs/**/*.md")) <= 36_000


def test_every_file_names_this_version():
    assert f"\nversion: {arimage.__version__}\n" in read(ROOT / "CITATION.cff")
    assert f"\n## [{arimage.__version__}]" in read(ROOT / "CHANGELOG.md")


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_shown_commands_are_complete_and_named_ones_exist(path, monkeypatch):
    # A page may show names in the place of the reader's own model and files.
    monkeypatch.setattr("arimage.cli.options.find_model", lambda name: None)
    made = Metadata(version=arimage.__version__, model="emoji-arpg", seed=0)
    monkeypatch.setattr("arimage.media.files.read_metadata", lambda name, path: made)
    for what in ("is_file", "is_dir"):
        monkeypatch.setattr(Path, what, lambda path: True)
    for command in shown_commands(read(path)):
        found, arguments = find(command)
        found.make_context("arimage", arguments)
    for command in named_commands(read(path)):
        found, arguments = find(command)
        options = {option for one in found.params for option in (*one.opts, *one.secondary_opts)}
        assert {argument for argument in arguments if argument.startswith("--")} <= options | {"--help"}


def test_pictures_were_made_by_the_commands_next_to_them():
    named = {command for path in GUIDES for command in named_commands(read(path)) if "--out docs/images" in command}
    for command in named:
        options = dict(re.findall(r"(--?[a-z]+) (\S+)", command))
        made, prompts = read_metadata(command, ROOT / options["--out"]), read(ROOT / options["--prompts"]).splitlines()
        assert (made.prompts, made.count) == (prompts, len(prompts) * int(options.get("-n", 1)))
        assert made.model == options.get("--model", DEFAULT_MODEL)
    assert len(named) == 7


def test_models_that_are_shown_have_a_name():
    for model in NAMES_OF_MODELS:
        find_model(model)


def test_broken_pages_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A page\n[a](page.md#a-page) [b](page.md#b) [c](c.md) [d](https://d.org) `arimage models`\n")
    assert broken_links(page) == ["page.md#b", "c.md"]
    assert named_commands(read(page)) == {"models"} and shown_commands(read(page)) == set()
