"""`pipe.compile()`: every step is one graph, compiled once, and gives the tokens of the eager one."""

import gc
import weakref

import accelerate
import pytest
import tiny
import torch
from pipelines.arpg import tiny as tiny_arpg
from pipelines.chameleon import tiny as tiny_chameleon
from pipelines.llamagen import tiny as tiny_llamagen
from pipelines.var import tiny as tiny_var
from presets import FOR_SCALES, FOR_TOKENS
from torch._dynamo.backends.debugging import aot_eager, eager

from arimage import SpeculativeJacobiDecoding
from arimage.decoding.jacobi import speculative_jacobi


PROMPTS = ["a red heart", "a blue book"]
# The others take minutes together; "ar" is what the other tests compile.
QUICK = ("sjd-coupled", "next-scale")
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FOR_TOKENS + FOR_SCALES]


class Counting:
    """A backend that counts what it compiles."""

    def __init__(self):
        self.graphs, self.backend = 0, eager

    def __call__(self, graph, example_inputs):
        self.graphs += 1
        return self.backend(graph, example_inputs)


@pytest.fixture
def counting():
    torch.compiler.reset()
    yield Counting()
    torch.compiler.reset()


@pytest.fixture(scope="module")
def llamagen():
    return tiny_llamagen.text_pipeline(num_layers=1)


@pytest.fixture(scope="module")
def var():
    pipe = tiny_var.pipeline("text")
    pipe.register_modules(transformer=tiny_var.transformer("text", num_layers=1))
    return pipe


def tokens(pipe, decoding, prompts=PROMPTS, **settings):
    generator = torch.Generator().manual_seed(0)
    settings = {"guidance_scale": 3.0, "top_k": 20, "top_p": 0.9} | settings
    out = pipe(prompts, decoding=decoding, generator=generator, output_type="latent", **settings).tokens
    return torch.cat([scale.flatten(1) for scale in out], dim=1) if isinstance(out, list) else out


@pytest.fixture(scope="module")
def arpg():
    return tiny_arpg.pipeline("text")


@pytest.mark.every(2)
@pytest.mark.parametrize("name", NAMES)
def test_every_step_is_one_graph_that_is_compiled_once(name, llamagen, var, arpg, counting, monkeypatch):
    scales = name in FOR_SCALES
    pipe = var if scales else arpg if name == "groups" else llamagen
    monkeypatch.setattr(pipe, "_compiled", None)
    if not scales:
        counting.backend = aot_eager
    expected = tokens(pipe, name)
    pipe.compile(backend=counting)
    assert torch.equal(tokens(pipe, name), expected)
    groups = 15 if name == "groups" else 1
    graphs = len(tiny.SCALES) - 1 if scales else groups
    assert counting.graphs == graphs
    assert torch.equal(tokens(pipe, name), expected)
    assert counting.graphs == graphs, "a second call compiles again"


@pytest.mark.slow
def test_another_number_of_images_is_compiled_once_more(llamagen, counting, monkeypatch):
    monkeypatch.setattr(llamagen, "_compiled", None)
    expected = tokens(llamagen, "ar"), tokens(llamagen, "ar", PROMPTS[:1])
    llamagen.compile(backend=counting)
    # Any number of sizes may be compiled.
    with torch._dynamo.config.patch(recompile_limit=1):
        for _ in range(2):
            assert torch.equal(tokens(llamagen, "ar"), expected[0])
            assert torch.equal(tokens(llamagen, "ar", PROMPTS[:1]), expected[1])
    assert counting.graphs == 2


@pytest.mark.slow
def test_prompts_of_a_language_model_that_are_about_as_long_share_a_step(counting):
    pipe = tiny_chameleon.pipeline()
    pipe.register_modules(transformer=tiny_chameleon.transformer(tiny_chameleon.vocabulary(), num_hidden_layers=1))
    prompts = ["cat", "a red heart", "a red heart, a blue book and a tree"]
    expected = [tokens(pipe, "ar", prompt) for prompt in prompts]
    pipe.compile(backend=counting)
    graphs = []
    for prompt, one in zip(prompts, expected, strict=True):
        assert torch.equal(tokens(pipe, "ar", prompt), one)
        graphs.append(counting.graphs)
    assert graphs == [1, 1, 2]


@pytest.mark.slow
def test_every_size_of_an_adaptive_window_is_compiled_once(llamagen, counting, monkeypatch):
    monkeypatch.setattr(llamagen, "_compiled", None)
    monkeypatch.setattr(speculative_jacobi, "step_seconds", lambda *_: {1: 1.0, 4: 1.1, 8: 1.3})
    auto = SpeculativeJacobiDecoding(window="auto")
    expected = tokens(llamagen, auto)
    llamagen.compile(backend=counting)
    for _ in range(2):
        assert torch.equal(tokens(llamagen, auto), expected)
    assert 1 <= counting.graphs <= 3


@pytest.mark.slow
def test_a_callback_sees_every_step_and_may_interrupt(llamagen, counting, monkeypatch):
    monkeypatch.setattr(llamagen, "_compiled", None)
    llamagen.compile(backend=counting)
    decided = []

    def callback(pipe, step, timestep, tensors):
        decided.append(int(tensors["decided"].sum(1).min()))
        pipe._interrupt = step == 5

    settings = {"callback_on_step_end": callback, "callback_on_step_end_tensor_inputs": ["decided"]}
    tokens(llamagen, "ar", **settings)
    assert decided == [1, 2, 3, 4, 5, 6]


def test_steps_stay_eager_where_hooks_move_the_weights(counting):
    pipe = tiny_llamagen.text_pipeline()
    expected = tokens(pipe, "ar")
    pipe.compile(backend=counting)
    accelerate.cpu_offload(pipe.transformer, "cpu")
    assert torch.equal(tokens(pipe, "ar"), expected)
    assert counting.graphs == 0


def test_a_state_is_kept_for_the_next_call_and_freed_with_the_others(llamagen, counting, monkeypatch):
    monkeypatch.setattr(llamagen, "_compiled", None)
    llamagen.compile(backend=counting)
    models = []

    def callback(pipe, *_):
        models.append(weakref.ref(pipe.current_call.model))

    for _ in range(2):
        tokens(llamagen, "ar", callback_on_step_end=callback)
    [kept] = llamagen._compiled.kept
    state = weakref.ref(kept.state)
    del kept
    gc.collect()
    assert counting.graphs == 1 and state() is not None and models[0]() is models[-1]() is None
    llamagen.compile(backend=counting)
    gc.collect()
    assert state() is None


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        ({}, {"fullgraph": True, "dynamic": False}),
        ({"mode": "reduce-overhead", "dynamic": None}, {"fullgraph": True, "dynamic": None, "mode": "default"}),
        ({"mode": "max-autotune", "fullgraph": False}, {"fullgraph": False, "mode": "max-autotune-no-cudagraphs"}),
    ],
)
def test_options_are_those_of_torch(llamagen, monkeypatch, given, passed):
    monkeypatch.setattr(llamagen, "_compiled", None)
    seen = []
    monkeypatch.setattr(torch, "compile", lambda step, **options: seen.append(options) or step)
    llamagen.compile(**given)
    tokens(llamagen, "ar")
    assert seen == [{"fullgraph": True, "dynamic": False} | passed]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ar", "sjd-coupled", "next-scale"])
def test_inductor_gives_the_tokens_of_eager_steps(name, llamagen, var, monkeypatch):
    torch.compiler.reset()
    pipe = var if name == "next-scale" else llamagen
    monkeypatch.setattr(pipe, "_compiled", None)
    expected = tokens(pipe, name)
    pipe.compile()
    assert torch.equal(tokens(pipe, name), expected)
