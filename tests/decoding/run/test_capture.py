"""Steps replayed from CUDA graphs, in which a graph is stood in for by the operators that were recorded."""

import contextlib

import pytest
import tiny
import torch
from presets import FOR_TOKENS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from arimage.decoding import (
    Layout,
    NextScaleDecoding,
    Sampling,
    decode,
    decoding_from_name,
    speculative_jacobi,
)
from arimage.decoding.run.capture import WARM_UP, CapturedStep
from arimage.models.transformer_llamagen import LlamaGenTokenModel
from arimage.models.transformer_var import VARScaleModel


SEEDS = torch.arange(2)
SAMPLING = Sampling(guidance_scale=2.0)
LABELS = {"class_labels": torch.tensor([1, 3])}
CPU = torch.device("cpu")


def tensors(values):
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


class Graph(TorchDispatchMode):
    """The operators of a step on the memory that they used. As in a capture, what the step wrote is as it was before; a replay
    writes, without Python."""

    made: list["Graph"] = []

    def __init__(self):
        super().__init__()
        self.calls, self.before, self.own, self.replays = [], {}, set(), 0
        Graph.made.append(self)

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        for tensor in tensors((args, kwargs)):
            memory = tensor.untyped_storage()
            if memory.data_ptr() not in self.before and memory.data_ptr() not in self.own:
                self.before[memory.data_ptr()] = memory, memory.clone()
        results = operator(*args, **(kwargs or {}))
        known = self.before.keys() | self.own
        self.own |= {tensor.untyped_storage().data_ptr() for tensor in tensors(results)} - known
        self.calls.append((operator, args, kwargs or {}, tensors(results)))
        return results

    def __exit__(self, *error):
        super().__exit__(*error)
        for memory, content in self.before.values():
            memory.copy_(content)

    def replay(self):
        self.replays += 1
        for operator, args, kwargs, results in self.calls:
            for old, new in zip(results, tensors(operator(*args, **kwargs)), strict=True):
                if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    old.copy_(new)


class Stream:
    def __init__(self, device=None):
        self.waits_for = []

    def wait_stream(self, other):
        self.waits_for.append(other)


@pytest.fixture(autouse=True)
def cuda(monkeypatch):
    """A CUDA device that is the CPU."""
    Graph.made = []
    pools = []
    main = Stream()

    def pool_handle():
        pools.append(object())
        return pools[-1]

    @contextlib.contextmanager
    def graph(graph, pool, stream, capture_error_mode):
        assert pool in pools and isinstance(stream, Stream) and capture_error_mode == "thread_local"
        with graph:
            yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", pool_handle)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)


def capturing(decoding, state):
    return CapturedStep(decoding.step, CPU)


def llamagen():
    transformer = tiny.transformer("class", num_layers=1)
    codebook = torch.randn(tiny.CODES, 4, generator=torch.Generator().manual_seed(0))
    parts = {"drafter": tiny.drafter(transformer), "denoiser": tiny.denoiser(transformer)}
    return LlamaGenTokenModel(transformer, LABELS, Layout((4, 4)), guided=True, codebook=codebook, **parts)


@torch.no_grad()
@pytest.mark.parametrize("name", FOR_TOKENS)
def test_replayed_steps_give_the_tokens_of_eager_ones(name):
    decoding = decoding_from_name(name)
    expected = decode(llamagen(), decoding, SAMPLING, SEEDS)
    state = decode(llamagen(), decoding, SAMPLING, SEEDS, compiled=capturing)
    assert torch.equal(state.tokens, expected.tokens)
    assert torch.equal(state.accepted_per_step(), expected.accepted_per_step())
    (graph,) = Graph.made
    assert graph.replays == state.forward_passes - 1 - WARM_UP > 0


@torch.no_grad()
def test_every_window_has_a_graph_of_its_own(monkeypatch):
    monkeypatch.setattr(speculative_jacobi, "step_seconds", lambda *_: {1: 1.0, 4: 1.1, 8: 1.3})
    windows = []

    def recording(decoding, state):
        def step(state):
            windows.append(state.window)
            captured(state)

        captured = capturing(decoding, state)
        return step

    decoding = decoding_from_name("sjd-coupled", window="auto")
    model = LlamaGenTokenModel(tiny.transformer("class", grid=8, num_layers=1), LABELS, Layout((8, 8)), guided=True)
    expected = decode(model, decoding, SAMPLING, SEEDS)
    state = decode(model, decoding, SAMPLING, SEEDS, compiled=recording)
    assert torch.equal(state.tokens, expected.tokens)
    assert len(set(windows)) > 1
    assert [graph.replays for graph in Graph.made] == [
        windows.count(size) - WARM_UP for size in dict.fromkeys(windows) if windows.count(size) > WARM_UP
    ]


@torch.no_grad()
def test_steps_that_differ_in_shape_are_never_captured():
    model = VARScaleModel(tiny.scale_transformer("class"), tiny.scale_tokenizer(), LABELS, guided=True)
    expected = decode(model, NextScaleDecoding(), SAMPLING, SEEDS)
    state = decode(model, NextScaleDecoding(), SAMPLING, SEEDS, compiled=capturing)
    assert torch.equal(state.tokens, expected.tokens) and not Graph.made


@torch.no_grad()
def test_a_callback_reads_the_state_between_replays():
    decoding, counts = decoding_from_name("ar"), []

    def on_step(state, step):
        counts.append(int(state.decided.sum(1).min()))
        return False

    decode(llamagen(), decoding, SAMPLING, SEEDS, on_step, capturing)
    assert counts == list(range(1, 17)) and Graph.made


@torch.no_grad()
def test_the_stand_in_notices_a_step_that_needs_python():
    decoding = decoding_from_name("ar")
    expected = decode(llamagen(), decoding, SAMPLING, SEEDS)

    class Counting(type(decoding)):
        def step(self, state):
            super().step(state)
            state.calls = getattr(state, "calls", 0) + 1
            state.seeds.add_(state.calls)

    eager = decode(llamagen(), Counting(), SAMPLING, SEEDS.clone())
    replayed = decode(llamagen(), Counting(), SAMPLING, SEEDS.clone(), compiled=capturing)
    assert not torch.equal(eager.tokens, expected.tokens)
    assert not torch.equal(eager.seeds, replayed.seeds)
