"""The options --compile and --eager of every command that has them."""

import pytest
from typer.testing import CliRunner

from arimage.cli import main as cli
from arimage.cli import options


class Loaded(Exception):
    pass


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("command", "module"),
    [
        ("generate tree", "arimage.cli.generate"),
        ("bench", "arimage.eval.commands"),
        ("eval generate --prompts emoji --out out", "arimage.eval.commands"),
        ("serve --port 0", "arimage.app.engine.models"),
        ("app --port 0", "arimage.app.engine.models"),
    ],
)
def test_commands_load_models_whose_steps_run_as_asked(command, module, monkeypatch, tmp_path):
    def load(*_, steps, **__):
        raise Loaded(steps)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(f"{module}.load_pipeline", load)
    for option, steps in (([], "captured"), (["--compile"], "compiled"), (["--eager"], "eager")):
        error = CliRunner().invoke(cli.app, [*command.split(), *option]).exception
        assert isinstance(error, Loaded) and str(error) == steps, error
    error = CliRunner().invoke(cli.app, [*command.split(), "--compile", "--eager"]).exception
    assert isinstance(error, ValueError) and "give one of the two" in str(error)


def test_a_pipeline_is_loaded_with_its_steps():
    captured, compiled, eager = (
        options.load_pipeline("emoji-var", "cpu", steps=steps)._compiled for steps in ("captured", "compiled", "eager")
    )
    assert eager is None and compiled.compiles and not captured.compiles
