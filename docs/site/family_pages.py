"""A mkdocs hook: the page of each family is the README.md in its folder, and what families export is in the API
reference."""

import re
from collections.abc import Iterable
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import arimage
import arimage.convert


SOURCES = sorted(Path("arimage/pipelines").glob("*/README.md"))
TITLES = {path: re.match(r"# (.+)\n", path.read_text("utf-8"))[1] for path in SOURCES}
PAGES = {path: f"models/{path.parent.name}.md" for path in sorted(SOURCES, key=lambda path: TITLES[path].lower())}
# What a pipeline shows: its call, and methods that no other pipeline has.
PIPELINE = """    options:
      heading_level: 3
      members: [__call__, hand_off, understand]
      filters: []
"""


def exported(package, modules: str) -> list[str]:
    """Full names of what `package` exports from modules of families, whose names match `modules`."""
    objects = [getattr(package, name) for name in package.__all__]
    paths = {f"{value.__module__}.{value.__qualname__}" for value in objects if hasattr(value, "__qualname__")}
    return sorted(path for path in paths if re.match(rf"arimage\.pipelines\.\w+\.(?:{modules})\w*\.\w+$", path))


def rows(names: Iterable[str], options: str = "") -> str:
    return "\n".join(f"::: {name}\n{options}" for name in names)


def pages() -> str:
    return "\n".join(f"- [{TITLES[path]}]({page})" for path, page in PAGES.items()) + "\n"


LISTS = {
    "pages": pages,
    "pipelines": lambda: rows(exported(arimage, "pipeline_"), PIPELINE),
    "models": lambda: rows(exported(arimage, "transformer_|drafter_|denoiser_|decoder_")),
    "tokenizers": lambda: rows(exported(arimage, "bsq_|fsq_|ibq_|vq_")),
    "converters": lambda: rows(exported(arimage.convert, "convert")),
}


def on_config(config: MkDocsConfig) -> None:
    reference = next(entry["Reference"] for entry in config.nav if "Reference" in entry)
    next(entry for entry in reference if "Models" in entry)["Models"] = list(PAGES.values())


def on_files(files: Files, config: MkDocsConfig) -> None:
    for path, page in PAGES.items():
        text = f"---\nsource: {path.as_posix()}\n---\n\n{path.read_text('utf-8')}"
        files.append(File.generated(config, page, content=text))


def on_page_markdown(markdown: str, **kwargs) -> str:
    return re.sub(r"<!-- families: (\w+) -->", lambda match: LISTS[match[1]](), markdown)
