"""A file with the options of a command."""

import tomllib
import typing
from pathlib import Path
from typing import Any

import typer
from pydantic import ConfigDict, create_model

from ..media.texts import read_text
from ..settings.schema import Text, check


def read_config(context: typer.Context, file: Path | None) -> Path | None:
    """Take the options of a command that are not given from a file, TOML or YAML by its name. For the callback of an
    option that is read before the others.

    Raises:
        ValueError: if the file cannot be read, or holds an option that the command does not have or of another type.
    """
    if file is None:
        return None
    try:
        read = _parse(file.suffix, read_text(file))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"--config {file} cannot be read ({error}): give a file of TOML or YAML") from error
    names = {
        option.removeprefix("--"): parameter.name
        for parameter in context.command.params
        for option in parameter.opts
        if option.startswith("--") and option not in ("--config", "--help")
    }
    kinds = typing.get_type_hints(context.command.callback)
    fields: dict[str, Any] = {}
    for option, name in names.items():
        kind = kinds[str(name)]
        # Paths are texts in a file. An empty one would be the current folder.
        kind = Text if kind in (Path, Path | None) else kind
        fields[option] = (kind, None)
    schema = create_model("Options", __config__=ConfigDict(extra="forbid", strict=True), **fields)
    given = check(schema, read, file).model_dump(exclude_unset=True)
    context.default_map = {str(names[option]): value for option, value in given.items()}
    return file


def _parse(suffix: str, text: str) -> Any:
    if suffix == ".toml":
        return tomllib.loads(text)
    if suffix not in (".yaml", ".yml"):
        raise ValueError("its name ends with neither .toml nor .yaml")
    import yaml

    try:
        # An empty file is an empty table.
        return yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
