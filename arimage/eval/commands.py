"""The console commands `arimage eval ...`. Heavy imports stay inside the commands, as in `arimage.cli`."""

import typer


eval_app = typer.Typer(help="Draw many images, score them, and set the decodings' quality beside their speed.")


@eval_app.callback()
def eval_commands() -> None:
    """Draw many images, score them, and set the decodings' quality beside their speed."""
