"""Fused adapters: what brings the weights back, and what is refused while they are fused."""

import copy
import warnings

import pytest
import torch
from adapters import STYLE, adapter
from families import EVERY, tokens


pytest.importorskip("peft", reason="the extra `lora` is not installed")

FIRST, SECOND = "aa", STYLE


def build(*names):
    """A pipeline with adapters, the last of which is active, and their weights by name."""
    pipe = EVERY["llamagen-text"]()
    states = {name: adapter(pipe, seed, targets="proj") for seed, name in enumerate(names)}
    for name, state in states.items():
        pipe.load_lora_weights(state, name)
    return pipe, states


def weights(pipe):
    state = pipe.transformer.state_dict()
    return {name.replace(".base_layer", ""): it.clone() for name, it in state.items() if ".lora_" not in name}


def scales(pipe):
    return [copy.deepcopy(layer.scaling) for layer in pipe._layers_of(None)]


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.every(2)
@pytest.mark.parametrize(("lora_scale", "dtype"), [(0.5, torch.float32), (0, torch.bfloat16)])
def test_unfusing_brings_back_bits_and_scales(lora_scale, dtype):
    pipe, _ = build(FIRST, SECOND)
    pipe.to(dtype=dtype)
    pipe.set_adapters([FIRST, SECOND], [0.3, 0.7])
    before, own, base = weights(pipe), scales(pipe), tokens(pipe)
    found = []
    for _ in range(3):
        pipe.fuse_lora(lora_scale=lora_scale)
        assert pipe.fused_loras == {FIRST, SECOND} and pipe.num_fused_loras == 2
        found.append(weights(pipe))
        pipe.unfuse_lora()
        assert pipe.fused_loras == set() and pipe.num_fused_loras == 0
        assert same(weights(pipe), before) and scales(pipe) == own
    assert same(found[0], found[2]) and same(found[0], before) == (lora_scale == 0)
    assert torch.equal(tokens(pipe), base)


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("method", "change"),
    [
        ("set_adapters", lambda pipe, file: pipe.set_adapters(SECOND, 0.5)),
        ("delete_adapters", lambda pipe, file: pipe.delete_adapters(SECOND)),
        ("load_lora_weights", lambda pipe, file: pipe.load_lora_weights(file, "yy")),
        ("load_lora_weights", lambda pipe, file: pipe.load_lora_weights(file, SECOND, hotswap=True)),
        ("fuse_lora", lambda pipe, file: pipe.fuse_lora(lora_scale=0.5)),
        ("disable_lora", lambda pipe, file: pipe.disable_lora()),
    ],
)
def test_what_would_change_fused_adapters_is_refused(method, change):
    pipe, states = build(FIRST, SECOND)
    before, own = weights(pipe), scales(pipe)
    pipe.fuse_lora()
    fused, styled = weights(pipe), tokens(pipe)
    # So does another pipeline with the same component.
    for each in (pipe, type(pipe).from_pipe(pipe)):
        with pytest.raises(ValueError, match=method):
            change(each, states[FIRST])
    assert pipe.fused_loras == {SECOND} and same(weights(pipe), fused) and torch.equal(tokens(pipe), styled)
    pipe.unfuse_lora()
    assert same(weights(pipe), before) and scales(pipe) == own
    assert pipe.get_list_adapters() == {"transformer": [FIRST, SECOND]}


def test_fusing_refuses_what_it_would_ignore():
    pipe, _ = build(FIRST, SECOND)
    before = weights(pipe)
    pipe.set_adapters([FIRST, SECOND])
    for settings, words in [
        ({"adapter_names": [FIRST]}, f"adapter_names.*{SECOND}"),
        ({"adapter_names": ["none"]}, "'none' is not loaded"),
        ({"lora_scale": float("nan")}, "lora_scale"),
        ({"lora_scale": "1"}, "lora_scale"),
        ({"components": ["vq"]}, "vq"),
    ]:
        with pytest.raises(ValueError, match=words):
            pipe.fuse_lora(**settings)
    pipe.disable_lora()
    with pytest.raises(ValueError, match="enable_lora"):
        pipe.fuse_lora()
    assert pipe.fused_loras == set() and same(weights(pipe), before)
    pipe.enable_lora()
    # One that is not active may be fused with those that are.
    pipe.set_adapters(FIRST)
    pipe.fuse_lora(adapter_names=[FIRST, SECOND])
    assert pipe.fused_loras == {FIRST, SECOND}


def test_what_the_component_fused_itself_is_seen():
    pipe, _ = build(STYLE)
    before = weights(pipe)
    pipe.transformer.fuse_lora()
    assert pipe.fused_loras == {STYLE}
    with pytest.raises(ValueError, match="set_adapters"):
        pipe.set_adapters(STYLE, 0.5)
    pipe.unfuse_lora()
    torch.testing.assert_close(weights(pipe), before)


def test_nothing_is_fused_if_a_sum_is_not_finite():
    pipe, _ = build(STYLE)
    before = weights(pipe)
    with torch.no_grad():
        pipe.transformer.blocks[1].attention.out_proj.lora_A[STYLE].weight.fill_(torch.inf)
    with pytest.raises(ValueError, match="safe_fusing"):
        pipe.fuse_lora(safe_fusing=True)
    assert pipe.fused_loras == set() and same(weights(pipe), before)


def test_shared_and_offloaded_weights_are_not_fused():
    pipe = EVERY["llamagen-text"]()
    pipe.transformer.head.weight = pipe.transformer.token_embedding.weight
    pipe.load_lora_weights(adapter(pipe, targets="token_embedding"), STYLE)
    with pytest.raises(ValueError, match="token_embedding shares its weight"):
        pipe.fuse_lora()
    pipe, _ = build(STYLE)
    pipe.enable_sequential_cpu_offload(device="cpu")
    with pytest.raises(ValueError, match="offloaded"):
        pipe.fuse_lora()
    pipe, _ = build(STYLE)
    pipe.transformer.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    with pytest.raises(ValueError, match="quantised"):
        pipe.fuse_lora()


@pytest.mark.every(2)
@pytest.mark.parametrize("weights", [float("nan"), "1", [{"unet": 0.5}], [{"transformer": float("inf")}]])
def test_scales_that_are_none_are_refused(weights):
    pipe, _ = build(STYLE)
    with pytest.raises(ValueError, match="adapter_weights"):
        pipe.set_adapters(STYLE, weights)


@pytest.mark.parametrize(
    ("size", "dtype", "lost"),
    [(5e-4, torch.bfloat16, True), (0.1, torch.bfloat16, False), (5e-4, torch.float32, False)],
)
def test_fusing_says_what_rounding_loses(size, dtype, lost):
    pipe, _ = build()
    pipe.to(dtype=dtype)
    state = adapter(pipe, targets="proj")
    for name in [name for name in state if name.endswith("lora_A.weight")]:
        other = name.replace("lora_A", "lora_B")
        weight = pipe.transformer.get_submodule(
            name.removeprefix("transformer.").removesuffix(".lora_A.weight")
        ).weight
        state[other] *= size * weight.float().norm() / (state[other] @ state[name]).norm()
    pipe.load_lora_weights(state, FIRST)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        pipe.fuse_lora()
    assert any("rounding" in str(each.message) for each in said) == lost


def test_fusing_leaves_weights_where_they_are():
    pipe, _ = build(FIRST)
    places = [weight.data_ptr() for weight in pipe.transformer.parameters()]
    pipe.fuse_lora()
    assert [weight.data_ptr() for weight in pipe.transformer.parameters()] == places


def test_adapters_that_are_loaded_while_others_are_disabled_are_used():
    pipe, states = build(FIRST)
    pipe.disable_lora()
    pipe.load_lora_weights(states[FIRST], SECOND)
    other, _ = build(FIRST)
    assert torch.equal(tokens(pipe), tokens(other))
