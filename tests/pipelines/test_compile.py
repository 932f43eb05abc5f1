"""`pipe.compile()`: every step is one graph, compiled once, and gives the tokens of the eager one."""

import pytest
import tiny
import torch
from torch._dynamo.backends.debugging import aot_eager

from arimage import decoding_names


PROMPTS = ["a red heart", "a blue book"]
# The others take minutes together.
QUICK = ("ar", "sjd-coupled", "pjd", "next-scale")
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in decoding_names()]


class Counting:
    """The backend aot_eager, which counts what it compiles."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, example_inputs):
        self.graphs += 1
        return aot_eager(graph, example_inputs)


@pytest.fixture
def counting():
    torch.compiler.reset()
    yield Counting()
    torch.compiler.reset()


@pytest.fixture(scope="module")
def llamagen():
    return tiny.text_pipeline()


@pytest.fixture(scope="module")
def var():
    return tiny.scale_pipeline("text")


def tokens(pipe, decoding, prompts=PROMPTS, **settings):
    generator = torch.Generator().manual_seed(0)
    settings = {"guidance_scale": 3.0, "top_k": 20, "top_p": 0.9} | settings
    out = pipe(prompts, decoding=decoding, generator=generator, output_type="latent", **settings).tokens
    return torch.cat([scale.flatten(1) for scale in out], dim=1) if isinstance(out, list) else out


@pytest.mark.parametrize("name", NAMES)
def test_every_step_is_one_graph_that_is_compiled_once(name, llamagen, var, counting, monkeypatch):
    scales = name in decoding_names(scales=True)
    pipe = var if scales else llamagen
    monkeypatch.setattr(pipe, "_compiled", None)
    expected = tokens(pipe, name)
    pipe.compile(backend=counting)
    assert torch.equal(tokens(pipe, name), expected)
    graphs = len(tiny.SCALES) - 1 if scales else 1
    assert counting.graphs == graphs
    assert torch.equal(tokens(pipe, name), expected)
    assert counting.graphs == graphs, "a second call compiles again"
