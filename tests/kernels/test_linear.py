"""A linear layer gives the same with oneDNN, which is used only where it may replace PyTorch's."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from arimage.kernels import linear as kernel
from arimage.kernels.linear import linear
from arimage.kernels.timings import table_path


@pytest.fixture
def calls(monkeypatch):
    """How often oneDNN was called, on any CPU, however small the matrices."""
    monkeypatch.setattr(kernel, "_prefers_onednn", lambda x, weight: True)
    monkeypatch.setattr(kernel, "_LEAST", 0)
    operator, called = torch.ops.mkldnn._linear_pointwise, []
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", lambda *a: called.append(1) or operator(*a))
    return called


pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch has no oneDNN")
X, WEIGHT, BIAS = torch.randn(3, 2, 20), torch.nn.Parameter(torch.randn(7, 20)), torch.randn(7)


@torch.no_grad()
@pytest.mark.parametrize("bias", [None, BIAS])
@pytest.mark.parametrize("x", [X, X[0, 0], X[:, 1]], ids=["rows", "vector", "strided"])
def test_onednn_gives_the_same(calls, x, bias):
    torch.testing.assert_close(linear(x, WEIGHT, bias), F.linear(x, WEIGHT, bias), atol=1e-5, rtol=1e-5)
    assert calls == [1]


@pytest.mark.parametrize("trained", [0, 1, 2])
def test_what_needs_gradients_has_them(calls, trained):
    inputs = [tensor.detach().clone() for tensor in (X, WEIGHT, BIAS)]
    inputs[trained].requires_grad_()
    linear(*inputs).sum().backward()
    assert inputs[trained].grad is not None and not calls


@torch.no_grad()
def test_other_dtypes_autocast_and_compilation_keep_their_own(calls):
    linear(X.bfloat16(), WEIGHT.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(X, WEIGHT).dtype == torch.bfloat16
    with torch.backends.mkldnn.flags(enabled=False):
        linear(X, WEIGHT)
    torch.compile(linear, backend="eager", fullgraph=True)(X, WEIGHT)
    assert not calls


@torch.no_grad()
def test_small_matrices_are_not_worth_the_call(calls, monkeypatch):
    monkeypatch.setattr(kernel, "_LEAST", X.numel() * 7 + 1)
    linear(X, WEIGHT)
    assert not calls


class Stopwatch:
    """A machine on which the forms of a product take `cost(rows)` seconds each, and a process on it."""

    def __init__(self, monkeypatch):
        self.monkeypatch, self.now, self.products = monkeypatch, 0.0, 0
        monkeypatch.setattr(kernel, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(kernel, "_LEAST", 0)
        self.new_process()

    def new_process(self):
        self.monkeypatch.setattr(kernel, "_known", {})

    def set(self, **costs):
        def form(cost):
            def product(x, weight):
                self.now += cost(x.numel() // x.shape[-1]) * (10 if self.products < 2 else 1)
                self.products += 1

            return product

        self.products = 0
        self.monkeypatch.setattr(kernel, "_FORMS", {name: form(cost) for name, cost in costs.items()})

    def takes_onednn(self, rows, weight=WEIGHT):
        return kernel._takes_onednn(torch.ones(rows, weight.shape[1]), weight, None)


@pytest.fixture
def stopwatch(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    return Stopwatch(monkeypatch)


@torch.no_grad()
def test_the_faster_form_is_taken_at_each_number_of_rows(stopwatch):
    stopwatch.set(default=lambda rows: 1.0 * rows, oneDNN=lambda rows: 10 + 0.5 * rows)
    assert [rows for rows in (1, 2, 3, 16, 17, 64, 100, 1000) if stopwatch.takes_onednn(rows)] == [17, 64, 100, 1000]
    # What was measured for 17 rows holds up to 32.
    measured = stopwatch.products
    assert stopwatch.takes_onednn(30) and not stopwatch.takes_onednn(4) and stopwatch.products == measured
    assert stopwatch.takes_onednn(32, torch.ones(3, 20)) and stopwatch.products > measured


@torch.no_grad()
def test_a_choice_is_made_once_per_machine(stopwatch):
    stopwatch.set(default=lambda rows: 2.0, oneDNN=lambda rows: 1.0)
    assert stopwatch.takes_onednn(4) and "[20, 7]" in table_path(kernel.TABLE).read_text()
    stopwatch.set(default=lambda rows: 1.0, oneDNN=lambda rows: 2.0)
    assert stopwatch.takes_onednn(4)
    stopwatch.new_process()
    assert stopwatch.takes_onednn(4) and not stopwatch.products
    # Other threads take other times.
    threads = torch.get_num_threads()
    torch.set_num_threads(3 - threads)
    assert not stopwatch.takes_onednn(4) and stopwatch.products
    torch.set_num_threads(threads)
    stopwatch.new_process()
    assert stopwatch.takes_onednn(4)


@torch.no_grad()
def test_a_process_keeps_its_choice_where_nothing_can_be_stored(stopwatch, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "file"))
    stopwatch.set(default=lambda rows: 2.0, oneDNN=lambda rows: 1.0)
    assert stopwatch.takes_onednn(4) and "linear_seconds.json" in caplog.text
    stopwatch.set(default=lambda rows: 1.0, oneDNN=lambda rows: 2.0)
    assert stopwatch.takes_onednn(4)


def test_both_forms_are_measured():
    seconds = kernel._measure(X, WEIGHT)
    assert seconds.keys() == {"default", "oneDNN"} and all(0 < value < math.inf for value in seconds.values())
