"""Layers of one input that multiply it at once."""

import threading

import pytest
import torch
from torch import nn

from arimage.models.fused import Fused, FusedLinear, fused_in, projections
from arimage.models.layers import FeedForward, Linear


WIDTH, SIZES = 16, (16, 8, 8)


class Attention(nn.Module):
    """As in transformers."""

    def __init__(self, bias=True):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, size, bias=bias) for size in SIZES)

    def forward(self, hidden):
        return torch.cat(
            [self.q_proj(hidden).relu(), self.k_proj(hidden).view(len(hidden), -1), self.v_proj(hidden)], 1
        )


class Block(nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        self.attention, self.mlp = Attention(bias), FeedForward(WIDTH, 24)

    def forward(self, hidden):
        return self.attention(self.mlp(hidden))


def block(bias=True, fuse=True):
    torch.manual_seed(0)
    network = Block(bias)
    if fuse:
        for layers in list(projections(network)):
            Fused(layers)
    return network


HIDDEN = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.mark.every(2)
@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_a_product_for_each_input(bias):
    plain, fused = block(bias, fuse=False), block(bias)
    torch.testing.assert_close(fused(HIDDEN), plain(HIDDEN))
    products = []

    def backend(graph, inputs):
        products.append(sum(node.target in (torch._C._nn.linear, nn.functional.linear) for node in graph.graph.nodes))
        return graph

    for network in (plain, fused):
        torch.testing.assert_close(
            torch.compile(network, backend=backend, fullgraph=True)(HIDDEN), network(HIDDEN), rtol=0, atol=0
        )
    assert products == [6, 3]


def test_weights_keep_their_names_values_and_memory():
    plain, fused = block(fuse=False), block()
    wanted, state = plain.state_dict(), fused.state_dict()
    assert state.keys() == wanted.keys() and all(torch.equal(state[name], wanted[name]) for name in wanted)
    assert [name for name, _ in fused.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert isinstance(fused.mlp.up_proj, FusedLinear) and not isinstance(fused.mlp.down_proj, FusedLinear)
    # Each byte of a weight is there once.
    storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in fused.parameters()}
    assert len(storages) == 4 and sum(storages.values()) == sum(each.nbytes for each in plain.parameters())
    fused.load_state_dict({name: value + 1 for name, value in wanted.items()})
    plain.load_state_dict({name: value + 1 for name, value in wanted.items()})
    with torch.no_grad():
        torch.testing.assert_close(fused(HIDDEN), plain(HIDDEN))


@pytest.mark.parametrize("move", [lambda network: network.bfloat16(), lambda network: network.share_memory()])
def test_a_moved_network_stays_fused(move):
    plain, fused = block(fuse=False), move(block())
    plain.to(fused.mlp.up_proj.weight)
    assert all(each.holds for each in fused_in(fused)) and len(fused_in(fused)) == 2
    state = fused.state_dict()
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in fused.parameters()}
    assert sum(storages.values()) == sum(each.nbytes for each in plain.parameters())


def test_taken_apart_layers_are_what_they_were():
    plain, fused = block(fuse=False), block()
    parameters = list(fused.parameters())
    for each in fused_in(fused):
        each.take_apart()
    assert [type(module) for module in fused.modules()] == [type(module) for module in plain.modules()]
    assert [vars(module).keys() for module in fused.modules()] == [vars(module).keys() for module in plain.modules()]
    assert all(one is other for one, other in zip(fused.parameters(), parameters, strict=True))
    assert all(each.untyped_storage().nbytes() == each.nbytes for each in parameters)
    with torch.no_grad():
        assert torch.equal(fused(HIDDEN), plain(HIDDEN))


@pytest.mark.parametrize(
    "replace",
    [
        lambda layer: setattr(layer, "weight", nn.Parameter(layer.weight + 1)),
        lambda layer: setattr(layer.weight, "data", layer.weight.data + 1),
        lambda layer: setattr(layer.bias, "data", layer.bias.data + 1),
        lambda layer: layer.double().float(),
    ],
)
@pytest.mark.parametrize("name", ["q_proj", "v_proj"])
@torch.no_grad()
def test_a_layer_whose_weight_is_replaced_is_on_its_own(replace, name):
    plain, fused = block(fuse=False).attention, block().attention
    for network in (plain, fused):
        replace(network.get_submodule(name))
    torch.testing.assert_close(fused(HIDDEN), plain(HIDDEN))


@torch.no_grad()
def test_other_inputs_and_other_threads_do_no_harm():
    fused, other = block().attention, HIDDEN + 1
    wanted = fused.k_proj(HIDDEN)
    # Alone, after the first layer had another input, and after a thread has taken away what it left.
    fused.q_proj(other)
    assert torch.equal(fused.k_proj(HIDDEN), wanted)
    fused.q_proj(HIDDEN)
    thread = threading.Thread(target=fused, args=(other,))
    thread.start()
    thread.join()
    assert torch.equal(fused.k_proj(HIDDEN), wanted)
    # Nothing is left when the last layer has run.
    fused(HIDDEN)
    assert fused_in(fused)[0]._latest is None


def test_gradients_are_those_of_each_weight():
    plain, fused = block(fuse=False), block()
    for network in (plain, fused):
        network(HIDDEN).square().sum().backward()
    for one, other in zip(plain.parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_layers_that_differ_are_left_alone():
    network = block(fuse=False)
    network.attention.k_proj = nn.Linear(2 * WIDTH, 8)
    network.mlp.up_proj = nn.Linear(WIDTH, 24, bias=False)
    assert not list(projections(network))
    network.mlp.up_proj = Linear(WIDTH, 24, bias=False).bfloat16()
    assert not list(projections(network))
