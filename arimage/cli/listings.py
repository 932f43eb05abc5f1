"""The console commands that list models and decodings."""

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from ..auto import class_names, find_model, packaged_folders, published_models
from ..decoding.names import PRESETS, defaults_of
from ..media.texts import as_words
from ..pipelines.saving.saved_folder import stored_elsewhere
from ..pipelines.text.known import load_known
from ..published.registry import PUBLISHED, size_text


def models(
    name: Annotated[
        str | None, typer.Argument(help="List what this model knows: installed, downloaded, or in a folder.")
    ] = None,
    search: Annotated[str | None, typer.Option(help="List only what has these words in its captions.")] = None,
) -> None:
    """List the models that have a name, with what they download and take of the disk; or, with a name, what that model
    knows."""
    if name is not None:
        _list_known(name, search)
        return
    if search is not None:
        raise ValueError("--search looks among what a model knows: name the model, as in `arimage models icons-arpg`")

    rows = []
    for name, folder in packaged_folders().items():
        parameters, size = _weights_of(folder)
        known = f"{parameters / 1e6:,.1f} M", "", size_text(size)
        rows.append((name, "", *known, "installed", "Apache-2.0, see its README.md"))
    for entry in PUBLISHED:
        row = (
            entry.name,
            str(entry.image_size),
            f"{entry.parameters / 1e6:,.0f} M",
            size_text(entry.download),
            size_text(entry.download + entry.converted),
            ", ".join(dict.fromkeys(files.repository for files in entry.files.values())),
            entry.licence + (f", and {entry.requested.note}" if entry.requested else ""),
        )
        rows.append(row)
    _print(("name", "pixels", "parameters", "download", "disk", "from", "licence"), rows)


def _weights_of(folder: Path) -> tuple[int, int]:
    """How many parameters an installed model has, with those of components that it shares with others, and the bytes
    of their files."""
    places = [folder, *(place for name, place in stored_elsewhere(folder).items() if name != "gallery")]
    from safetensors import safe_open

    parameters = size = 0
    for place in places:
        for path in place.rglob("*"):
            size += path.stat().st_size if path.is_file() else 0
        for path in place.rglob("*.safetensors"):
            with safe_open(path, framework="numpy") as file:
                parameters += sum(math.prod(file.get_slice(key).get_shape()) for key in file.keys())  # noqa: SIM118
    return parameters, size


def _print(columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> None:
    """Print a table: in a terminal without the last columns for which it is too narrow, in a pipe as a line per row,
    with tabs between the cells."""
    if not sys.stdout.isatty():
        for row in (columns, *rows):
            typer.echo("\t".join(row))
        return
    from rich.console import Console
    from rich.table import Column, Table

    # Names are never cut or wrapped.
    name, *others = columns
    head = Column(name, no_wrap=True), *(Column(one, overflow="fold") for one in others)
    table = Table(*head, caption=caption, caption_justify="left")
    for row in rows:
        table.add_row(*row)
    console = Console()
    while len(table.columns) > 1 and table.__rich_measure__(console, console.options).minimum > console.width:
        table.columns.pop()
    console.print(table)


def _list_known(model: str, search: str | None) -> None:
    """Print the names of the pictures or classes that a model knows, in columns, or one per line in a pipe."""
    folder = find_model(model)
    if folder is None and model in published_models():
        from ..published.fetch import load_published

        folder = load_published(model, local_files_only=True)
    if folder is None:
        raise ValueError(f"{model} is a repository of the Hub: download it, and give its folder")
    known, labels = load_known(folder), class_names(folder)
    if known is None and labels is None:
        raise ValueError(f"{model} has no list of what it knows: it generates from any text, or from class ids")
    captions = known.learned if known else {f"{i} {name}": [] for i, name in enumerate(labels or [])}
    names = [*captions] if search is None else _found(search, captions)
    if not names:
        raise ValueError(f"nothing that {model} knows contains {search!r}: search for another word")
    if not sys.stdout.isatty():
        typer.echo("\n".join(names))
        return
    from rich.columns import Columns
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    console.print(Columns(map(console.render_str, names), column_first=True, padding=(0, 3)))
    if known and known.combined():
        console.print(f"\n{known.combined()}")


def _found(search: str, captions: Mapping[str, Sequence[str]]) -> list[str]:
    """The names that have the words of `search` next to each other, and after those that only a further caption has
    them for, this caption."""
    wanted, found = as_words(search), []

    def has(text: str) -> bool:
        words = as_words(text)
        return any(words[place : place + len(wanted)] == wanted for place in range(len(words)))

    for name, others in captions.items():
        if has(name):
            found.append(name)
        elif reason := next(filter(has, others), None):
            found.append(f"{name} ({reason})")
    return found


def _setting_text(value) -> str:
    if isinstance(value, tuple):
        return "+".join(map(str, value))
    return str(value["method"] if isinstance(value, dict) else value)


def decodings() -> None:
    """List the decodings that have a name, with their settings."""
    rows = []
    for name, preset in PRESETS.items():
        settings = [
            f"{key}={_setting_text(value)}" for key, value in {**defaults_of(preset.method), **preset.settings}.items()
        ]
        paper = f"arXiv {preset.paper}" if preset.paper else ""
        rows.append((name, "yes" if preset.exact else "no", preset.summary, ", ".join(settings), paper))
    caption = "A model may come with a decoding and other settings for it: on that model the name means those."
    _print(("name", "exact", "what it does", "settings", "paper"), rows, caption)
