"""What commands import: nothing that they do not need."""

from contextlib import nullcontext

import pytest
from commands import python

from arimage.cli import options
from arimage.cli.imports import OPTIONAL


# Each takes a tenth of a second or more, and none is needed for an image.
NEEDLESS = {"bs4", "ftfy", "sympy", "torch._dynamo.convert_frame", "torch._inductor", "torch.distributed.tensor"}
LATE = """
from arimage.cli.imports import few_imports
with few_imports():
    import diffusers, torch
    from diffusers import ModelMixin
    from torch.nn.attention.flex_attention import create_block_mask
import sys
assert "torch._dynamo.convert_frame" not in sys.modules
marked = []

def graph(module, inputs):
    marked.append(module)
    return module.forward

compiled = torch.compile(torch.nn.Linear(2, 2), backend=graph)
compiled(torch.zeros(1, 2))
assert marked and isinstance(compiled, torch._dynamo.eval_frame.OptimizedModule)
assert create_block_mask(lambda b, h, q, k: q >= k, None, None, 128, 128, device="cpu").shape == (1, 1, 128, 128)
import scipy, peft
"""
AFTER = """
import importlib.metadata, sys
from arimage.cli.imports import few_imports
before = importlib.metadata.packages_distributions
try:
    with few_imports(("no_such_package",)):
        import torch
        assert sys.modules["no_such_package"] is None and not torch.distributed.is_available()
        assert importlib.metadata.packages_distributions()["yaml"] == before()["yaml"]
        raise KeyError
except KeyError:
    pass
assert "no_such_package" not in sys.modules and torch.distributed.is_available()
assert importlib.metadata.packages_distributions is before
with few_imports(("no_such_package",)):
    assert "no_such_package" not in sys.modules
import torch._dynamo
assert torch._dynamo.optimize
"""


def imported(*words, **options) -> set[str]:
    done = python("-X", "importtime", "-m", "arimage", *words, **options)
    assert done.returncode == 0, done.stderr
    return {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}


def test_an_image_needs_few_modules(tmp_path):
    modules = imported("generate", "a red heart", "--out", "heart.png", cwd=tmp_path)
    assert (tmp_path / "heart.png").is_file() and "arimage.pipelines.arpg.transformer_arpg" in modules
    assert modules & (NEEDLESS | {*OPTIONAL}) == set() and len(modules) < 3200


def test_a_video_needs_few_modules_and_what_it_continues_is_read(tmp_path):
    prompt = ["a red heart, moving right", "--model", "emoji-video-blocks", "--out"]
    assert imported("generate", *prompt, "heart.webp", cwd=tmp_path) & {*OPTIONAL} == set()
    assert "torchvision" in imported("generate", *prompt, "on.webp", "--video", "heart.webp", cwd=tmp_path)
    assert (tmp_path / "on.webp").is_file()


@pytest.mark.every(3)
@pytest.mark.parametrize("command", ["models", "models emoji-arpg", "decodings"])
def test_a_list_needs_no_framework(command):
    roots = {name.partition(".")[0] for name in imported(*command.split())}
    assert "typer" in roots and roots & {"torch", "diffusers", "transformers", "PIL", "huggingface_hub"} == set()


def test_what_is_left_out_comes_when_it_is_used():
    done = python("-c", LATE)
    assert done.returncode == 0, done.stderr


def test_imports_are_as_before_afterwards():
    done = python("-c", AFTER)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("steps", "few"), [("captured", 1), ("eager", 1), ("compiled", 0)])
def test_what_compiles_imports_everything(monkeypatch, steps, few):
    asked = []

    def stop(*_):
        raise KeyError

    monkeypatch.setattr(options, "few_imports", lambda: asked.append(1) or nullcontext())
    monkeypatch.setattr(options, "_load", stop)
    with pytest.raises(KeyError):
        options.load_pipeline("emoji-arpg", "cpu", alone=True, steps=steps)
    assert len(asked) == few
