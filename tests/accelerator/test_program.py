"""Graphs know the modules that they were captured with: whatever changes what these compute is captured again."""

import card
import pytest
import torch
from accelerator.runs import call, fresh
from torch import nn
from torch.nn.utils import parametrize

from arimage.decoding.run.step_key import Program


class Half(nn.Module):
    def forward(self, weight):
        return weight / 2


class Twice(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden):
        return 2 * self.inner(hidden)


def wrap(block, patch):
    block.feed_forward = Twice(block.feed_forward)


def patch_class(block, patch):
    kind = type(block.feed_forward)
    plain = kind.forward
    patch.setattr(kind, "forward", lambda self, hidden: 2 * plain(self, hidden))


def parametrized(block, patch):
    parametrize.register_parametrization(block.attention.out_proj, "weight", Half())


def tokens(pipe):
    return call(pipe, "ar", 2)["tokens"].elem


@pytest.mark.parametrize("change", [wrap, patch_class, parametrized])
def test_a_changed_module_is_not_replayed_as_it_was(change, monkeypatch):
    pipe = fresh()
    with card.card() as device:
        before = [tokens(pipe) for _ in range(2)]
        change(pipe.transformer.blocks[0], monkeypatch)
        kept, captures = tokens(pipe), device.captures
        assert torch.equal(tokens(pipe), kept) and device.captures == captures
        pipe.capture()
        right = tokens(pipe)
    assert torch.equal(kept, right) and not torch.equal(kept, before[1])


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.weight, self.table = nn.Dropout(), nn.Parameter(torch.zeros(2)), torch.zeros(2)
        self.scales, self.function, self.config = {"a": [1.0]}, torch.nn.functional.silu, type("Config", (), {})()
        self.config.attention = "sdpa"


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.inner.eval(),
        lambda layer: setattr(layer.inner, "p", 0.25),
        lambda layer: setattr(layer.inner, "forward", torch.nn.functional.relu),
        lambda layer: setattr(layer, "inner", nn.Dropout()),
        lambda layer: setattr(layer, "weight", nn.Parameter(torch.zeros(2))),
        lambda layer: layer.half(),
        lambda layer: setattr(layer, "table", torch.zeros(2)),
        lambda layer: layer.scales["a"].append(2.0),
        lambda layer: setattr(layer, "function", torch.nn.functional.gelu),
        lambda layer: setattr(layer.config, "attention", "eager"),
        lambda layer: layer.compile(backend="eager"),
        lambda layer: layer.inner.register_forward_hook(print),
        lambda layer: setattr(layer, "further", None),
    ],
)
def test_a_program_is_all_that_modules_hold(change):
    layer = Layer()
    program = Program([layer])
    assert program.renewed([layer]) is program
    change(layer)
    changed = program.renewed([layer])
    assert changed is not program and changed.renewed([layer]) is changed
    assert changed.needs_python == bool(layer.inner._forward_hooks)


def test_a_module_at_the_address_of_another_is_another():
    program, other = Program([Layer()]), Layer()
    # As if it had been made where the one that is gone was.
    program._content = Program([other])._content
    assert program.renewed([other]) is not program
