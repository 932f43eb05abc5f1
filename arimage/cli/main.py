"""The console command `arimage`. Heavy imports stay inside the commands, so that help is fast."""

import atexit
import inspect
import io
import os
import sys
from itertools import pairwise
from typing import Annotated, Any, get_type_hints

import typer

from .. import __version__
from ..app.commands import open_app, serve
from ..eval.commands import bench, eval_app, reproduce
from ..eval.runs.files import FullDisk, full_disk
from ..published.commands import convert_app
from ..training.commands import train_app
from .environment import env
from .generate import generate
from .listings import decodings, models
from .options import out_of_memory, raised_by_arimage


app = typer.Typer(
    help="Generate images with autoregressive models, faster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"arimage {__version__}")
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Print the version and end.")
    ] = False,
) -> None:
    pass


app.command()(generate)
app.add_typer(convert_app, name="convert", no_args_is_help=True)
app.add_typer(train_app, name="train", no_args_is_help=True)
app.add_typer(eval_app, name="eval", no_args_is_help=True)
app.command()(env)
app.command()(models)
app.command()(decodings)
app.command()(bench)
app.command()(reproduce)
app.command()(serve)
app.command("app")(open_app)

# What needs less memory, by the option.
SMALLER = {
    "--batch-size": "a smaller --batch-size",
    "--per-prompt": "a smaller --per-prompt",
    "--height": "a smaller --height and --width",
    "--dtype": "--dtype bfloat16",
    "--device": "another --device",
}


def main(command: typer.Typer = app) -> None:
    """Run a command. A mistake of the user ends in one sentence and exit code 2; ARIMAGE_TRACEBACK=1 shows where."""
    # A terminal that cannot show the name of a file that was written is not a reason to fail.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        _check_paths(command)
        command()
    except Exception as error:
        full = full_disk(error)
        if os.environ.get("ARIMAGE_TRACEBACK") == "1" or not (
            isinstance(error, ValueError | OSError) or full or out_of_memory(error)
        ):
            raise
        message = " ".join(str(error).split())
        if full and not isinstance(error, FullDisk):
            message = f"no space is left on the disk ({full}): make room and repeat the command"
        elif out_of_memory(error):
            message = f"out of memory ({message[:200]}): {_less_memory(command)}"
        elif not isinstance(error, OSError) and not raised_by_arimage(error):
            message = f"unexpected {type(error).__name__}: {message} (ARIMAGE_TRACEBACK=1 shows where)"
        print(f"arimage: {message}", file=sys.stderr)
        sys.exit(2)


def _asked_for(app: typer.Typer) -> Any:
    """The command that the words of the command line name."""
    command = typer.main.get_command(app)
    for word in sys.argv[1:]:
        command = getattr(command, "commands", {}).get(word, command)
    return command


def _check_paths(app: typer.Typer) -> None:
    """Refuse empty paths: they would be the current folder, as where a variable of a shell is not set."""
    words = sys.argv[1:]
    if all(word and not word.endswith("=") for word in words):
        return
    command = _asked_for(app)
    hints = get_type_hints(inspect.unwrap(command.callback)) if command.callback else {}
    paths = [parameter for parameter in command.params if "pathlib" in repr(hints.get(parameter.name))]
    options = {name for parameter in paths for name in parameter.opts if name.startswith("-")}
    argument = next((parameter.name for parameter in paths if parameter.param_type_name == "argument"), None)
    valued = {
        name for parameter in command.params if not getattr(parameter, "is_flag", False) for name in parameter.opts
    }
    for before, word in pairwise(["", *words]):
        option, equals, value = word.partition("=")
        if option in options and equals and not value:
            raise ValueError(f"{option} is empty: give a path")
        if not word and before in options:
            raise ValueError(f"{before} is empty: give a path")
        if not word and argument and before not in valued:
            raise ValueError(f"{argument.upper()} is empty: give a path")


def _less_memory(app: typer.Typer) -> str:
    """What to change in the command that ran, by the options that it has."""
    command = _asked_for(app)
    options = {name for parameter in command.params for name in parameter.opts}
    *most, last = [text for option, text in SMALLER.items() if option in options] or ["smaller inputs"]
    return f"give {', '.join(most)} or {last}" if most else f"give {last}"


def run(command: typer.Typer = app) -> None:
    """`main` in a process of its own, which ends right after the handlers of `atexit`: taking the frameworks down
    object by object takes another second.

    Threads that wait for each other sleep, unless OMP_WAIT_POLICY says otherwise: next to other work they would spend
    its time slices."""
    # OpenMP reads it when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    status = 1

    def leave() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    # The handler that is registered first is called last.
    atexit.register(leave)
    try:
        main(command)
    except SystemExit as end:
        status = int(end.code or 0)
        raise
