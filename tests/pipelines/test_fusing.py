"""`fuse_projections`: the same images from fewer products."""

import accelerate
import pytest
import torch
from adapters import adapter
from diffusers.hooks import apply_layerwise_casting
from families import EVERY, having, one_of_each_kind, tokens

from arimage.models.fused import fused_in


FIRST = "llamagen-text"


def greedy(pipe):
    return tokens(pipe, **({} if pipe.abilities.kind == "causal_latents" else {"top_k": 1}))


def state_of(pipe):
    return {f"{i}.{name}": it for i, part in enumerate(pipe._networks()) for name, it in part.state_dict().items()}


def fused(pipe):
    return [each for network in pipe._networks() for each in fused_in(network)]


@pytest.mark.every(2)
@pytest.mark.parametrize("family", one_of_each_kind(having("fused")))
def test_tokens_and_weights_stay_the_same(family):
    pipe = EVERY[family]()
    wanted, before = greedy(pipe), {name: it.clone() for name, it in state_of(pipe).items()}
    pipe.fuse_projections()
    assert fused(pipe)
    after = state_of(pipe)
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
    torch.testing.assert_close(greedy(pipe), wanted)
    # A second time changes nothing.
    count = len(fused(pipe))
    pipe.fuse_projections()
    assert len(fused(pipe)) == count
    pipe.unfuse_projections()
    assert not fused(pipe) and torch.equal(greedy(pipe), wanted)


@pytest.mark.parametrize("family", ["llamagen-text", "janus", pytest.param("glm-image", marks=pytest.mark.slow)])
def test_saved_and_moved_pipelines(family, tmp_path):
    pipe = EVERY[family]()
    plain = tmp_path / "plain"
    pipe.save_pretrained(plain)
    pipe.fuse_projections()
    pipe.save_pretrained(tmp_path / "fused")
    files = sorted(path.relative_to(plain) for path in plain.rglob("*.safetensors"))
    assert files and all((tmp_path / "fused" / it).read_bytes() == (plain / it).read_bytes() for it in files)
    pipe.to(torch.bfloat16).to(torch.float32)
    assert all(each.holds for each in fused(pipe)) and fused(pipe)


def test_adapters_are_fused_first_or_come_later():
    pytest.importorskip("peft", reason="the extra `lora` is not installed")
    pipe, plain = EVERY[FIRST](), EVERY[FIRST]()
    state = adapter(pipe, targets="proj")
    for each in (pipe, plain):
        each.load_lora_weights(state, "zz")
    with pytest.raises(ValueError, match="call fuse_lora or unload_lora_weights before fuse_projections"):
        pipe.fuse_projections()
    adapted = tokens(plain)
    pipe.fuse_lora()
    pipe.fuse_projections()
    assert fused(pipe) and torch.equal(tokens(pipe), adapted)
    pipe.unfuse_lora()
    assert torch.equal(tokens(pipe), adapted)
    for each in (pipe, plain):
        each.unload_lora_weights()
    assert fused(pipe) and torch.equal(tokens(pipe), tokens(plain))
    # Later ones have a product of their own.
    pipe.load_lora_weights(state, "yy")
    assert torch.equal(tokens(pipe), adapted)


def test_where_weights_are_elsewhere():
    pipe = EVERY[FIRST]()
    wanted = tokens(pipe)
    pipe.fuse_projections()
    accelerate.cpu_offload(pipe.transformer, "cpu")
    assert torch.equal(tokens(pipe), wanted) and not fused(pipe)
    with pytest.raises(ValueError, match="hooks move the weights"):
        pipe.fuse_projections()


@pytest.mark.parametrize("kind", ["float8", "int8"])
def test_quantised_weights_are_refused(kind):
    pipe = EVERY[FIRST]()
    if kind == "float8":
        apply_layerwise_casting(pipe.transformer, torch.float8_e4m3fn, torch.float32)
    else:
        quantization = pytest.importorskip("torchao.quantization")
        quantization.quantize_(pipe.transformer, quantization.Int8WeightOnlyConfig())
    with pytest.raises(ValueError, match="quantised"):
        pipe.fuse_projections()


def test_divided_weights_are_refused():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    pipe = EVERY[FIRST]()
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        layer = next(module for name, module in pipe.transformer.named_modules() if name.endswith("gate_proj"))
        layer.weight = torch.nn.Parameter(distribute_tensor(layer.weight.data, init_device_mesh("cpu", (2,))))
        with pytest.raises(ValueError, match="divided over devices"):
            pipe.fuse_projections()
    finally:
        torch.distributed.destroy_process_group()


def test_a_model_without_such_projections_is_refused():
    with pytest.raises(ValueError, match="VARPipeline has no projections"):
        EVERY["var-class"]().fuse_projections()
