"""The options --compile and --eager of every command that has them."""

import pytest
from typer.testing import CliRunner

from arimage.cli import main as cli
from arimage.cli import options


COMMANDS = {
    "bench": (["bench"], "arimage.eval.commands"),
    "eval generate": (["eval", "generate", "--prompts", "emoji"], "arimage.eval.commands"),
    "serve": (["serve", "--port", "0"], "arimage.app.engine.models"),
    "app": (["app", "--port", "0"], "arimage.app.engine.models"),
}


class Loaded(Exception):
    pass


@pytest.mark.every(2)
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_load_models_whose_steps_run_as_asked(command, monkeypatch, tmp_path):
    words, module = COMMANDS[command]
    words = [*words, *(["--out", str(tmp_path / "out")] if command.startswith("eval") else [])]

    def load(*_, steps, **__):
        raise Loaded(steps)

    monkeypatch.setattr(f"{module}.load_pipeline", load)
    for option, steps in (([], "captured"), (["--compile"], "compiled"), (["--eager"], "eager")):
        error = CliRunner().invoke(cli.app, [*words, *option]).exception
        assert isinstance(error, Loaded) and str(error) == steps, error
    error = CliRunner().invoke(cli.app, [*words, "--compile", "--eager"]).exception
    assert isinstance(error, ValueError) and "give one of the two" in str(error)


def test_a_pipeline_is_loaded_with_its_steps():
    loaded = {
        steps: options.load_pipeline("emoji-var", "cpu", steps=steps) for steps in ("captured", "compiled", "eager")
    }
    assert loaded["eager"]._compiled is None
    assert loaded["compiled"]._compiled.compiles and not loaded["captured"]._compiled.compiles
