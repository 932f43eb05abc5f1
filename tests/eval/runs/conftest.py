"""The command in this process and in others, and a run that nothing happened to."""

import json
import multiprocessing
import os
import re
import sys

import pytest
from commands import outcome
from eval.runs.run_kit import COUNT, options
from pipelines.infinity import tiny as tiny_infinity
from pipelines.llamagen import tiny as tiny_llamagen
from pipelines.var import tiny as tiny_var

from arimage.cli import main as cli


PRELOAD = [
    "arimage.eval.runs.generate",
    "arimage.pipelines.llamagen.pipeline_llamagen",
    "arimage.pipelines.var.pipeline_var",
    "arimage.cli.main",
]
# Runs the command in a process that has imported everything: {0} environment, {1} arguments, {2} code to run first,
# {3} module of `main`. The output goes to a pipe, since the size of files may be limited.
FORKED = """
import os, resource, sys
os.environ.update({0!r})
sys.argv = {1!r}
os.dup2(pipe.fileno(), 1)
os.dup2(pipe.fileno(), 2)
sys.stdout = sys.stderr = os.fdopen(os.dup(pipe.fileno()), "w")
{2}
from {3} import main
main()
"""


def without_progress(said: str) -> str:
    """The output without the progress bar."""
    return re.sub(r"([\r\n][^\r\n]*image/s\])+\n?", "", said)


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Folders of tiny pipelines, and a file of prompts, by their names."""
    root = tmp_path_factory.mktemp("models")
    tiny_llamagen.text_pipeline().save_pretrained(root / "text")
    tiny_llamagen.class_pipeline().save_pretrained(root / "class")
    tiny_var.pipeline("text").save_pretrained(root / "scales")
    tiny_infinity.pipeline().save_pretrained(root / "bits")
    prompts = root / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"a red heart {i}", "tag": i}) + "\n" for i in range(COUNT)))
    return {name: str(root / name) for name in ("text", "class", "scales", "bits", "prompts.jsonl")}


@pytest.fixture(scope="session")
def fork():
    """Start the command in a process of its own, or in those of a `launcher` (its module and arguments);
    `process.end()` waits for the exit code and the output."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)

    def fork(arguments, environment=(), before="", launcher=()):
        reader, writer = context.Pipe(duplex=False)
        words = [*launcher, "-m", "arimage"] if launcher else ["arimage"]
        module = launcher[0] if launcher else "arimage.cli.main"
        code = FORKED.format(dict(environment), [*words, "eval", "generate", *arguments], before, module)
        process = context.Process(target=exec, args=(code, {"pipe": writer}))
        process.start()
        writer.close()

        def end():
            process.join(300)
            with os.fdopen(os.dup(reader.fileno())) as said:
                return process.exitcode, without_progress(said.read())

        process.end = end
        return process

    return fork


@pytest.fixture(scope="session")
def finish(fork):
    """Run the command to its end in a process of its own; returns its exit code and what it said."""
    return lambda *arguments, **options: fork(*arguments, **options).end()


@pytest.fixture(scope="session")
def undisturbed(models, tmp_path_factory):
    """A run of this process that nothing happened to."""
    folder = tmp_path_factory.mktemp("runs") / "undisturbed"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["arimage", "eval", "generate", *options(models, folder)])
        with pytest.raises(SystemExit) as end:
            cli.main()
    assert not end.value.code
    return folder


@pytest.fixture
def command(capsys):
    """Run `arimage eval generate` in this process; returns its exit code and what it said."""

    def command(*arguments):
        code, *said = outcome(capsys, "eval", "generate", *arguments)
        return code, without_progress("".join(said))

    return command
