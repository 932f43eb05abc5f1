"""The console commands `arimage convert ...`. Heavy imports stay inside the commands, as in `arimage.cli.main`."""

import inspect
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from ..convert.paths import CheckpointError, check_file, check_folder, check_vacant
from ..families import CONVERTERS
from ..pipelines.family import FILE, FILE_OR_FOLDER, FOLDER, OUT, REQUIRED, VACANT, Argument, Converter


convert_app = typer.Typer(
    help="Convert published checkpoint files to a folder that every command loads.", rich_markup_mode="markdown"
)


def _check_file_or_folder(path: Path) -> None:
    if not path.is_file() and not path.is_dir():
        raise CheckpointError(f"{path} is neither a file nor a folder: give the path of what was published")


CHECKS = {FILE: check_file, FOLDER: check_folder, FILE_OR_FOLDER: _check_file_or_folder, VACANT: check_vacant}


def _checked(check: Callable[[Path], None]) -> Callable[[Path | None], Path | None]:
    """A callback that checks an option before the frameworks are imported."""

    def callback(path: Path | None) -> Path | None:
        if path is not None:
            check(path)
        return path

    return callback


def _parameter(argument: Argument) -> inspect.Parameter:
    callback = None if argument.path is None else _checked(CHECKS[argument.path])
    names = [f"--{argument.name}"] if argument.type is bool else []
    info: Any
    if argument.positional:
        info = typer.Argument(callback=callback, help=argument.help)
    else:
        info = typer.Option(*names, callback=callback, help=argument.help)
    return inspect.Parameter(
        argument.name,
        inspect.Parameter.KEYWORD_ONLY,
        annotation=Annotated[argument.type, info],
        default=inspect.Parameter.empty if argument.default is REQUIRED else argument.default,
    )


def _add_command(module: str, converter: Converter, arguments: tuple[Argument, ...]) -> None:
    """Add `arimage convert <name>`, which imports the converter when it runs."""

    def command(**given: Any) -> None:
        if "dtype" in given:
            import torch

            given["dtype"] = getattr(torch, given["dtype"])
        getattr(import_module(f"..{module}", __package__), converter.function)(**given)
        typer.echo(given["out"])

    required = [argument for argument in arguments if argument.default is REQUIRED]
    optional = [argument for argument in arguments if argument.default is not REQUIRED]
    parameters = [_parameter(argument) for argument in (*required, OUT, *optional)]
    # typer reads the arguments from it.
    command.__signature__ = inspect.Signature(parameters)
    convert_app.command(converter.command.split()[-1], help=converter.help)(command)


for _module, _converter in CONVERTERS.values():
    if _converter.arguments is not None:
        _add_command(_module, _converter, _converter.arguments)
