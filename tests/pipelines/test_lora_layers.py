"""Adapters of every layer of every family: each has the effect that it would have in the weights."""

import pytest
import torch
from adapters import STYLE, adapter, layers_of, merge
from families import EVERY, condition_of, flat, seeded
from pipelines.distilled_decoding import tiny as tiny_distilled


pytest.importorskip("peft", reason="the extra `lora` is not installed")

FAMILIES = {**EVERY, "llamagen-dd-places": lambda: tiny_distilled.pipeline("llamagen", place_embeddings=True)}
FIRST = "llamagen-text"
MORE = [pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES if name != FIRST]


def run(pipe, **settings):
    return pipe(**condition_of(pipe), generator=seeded(0), **settings)


def tokens(pipe):
    return flat(run(pipe, output_type="latent").tokens)


def base_weights(pipe):
    """The weights of the model by their names without adapters."""
    return {
        f"{key}.{name.replace('.base_layer', '')}": value.clone()
        for key in pipe._lora_loadable_modules
        for name, value in pipe.components[key].state_dict().items()
        if ".lora_" not in name
    }


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "family", [FIRST, "janus", "var-text", *(it for it in MORE if it.values[0] not in ("janus", "var-text"))]
)
def test_every_adapter_scales_fuses_and_unfuses(family):
    pipe, merged = FAMILIES[family](), FAMILIES[family]()
    assert layers_of(pipe)
    before, base, state = base_weights(pipe), tokens(pipe), adapter(pipe, size=0.2)
    pipe.load_lora_weights(state, STYLE)
    merge(merged, state, scale=0.5)
    pipe.set_adapters(STYLE, 0.0)
    torch.testing.assert_close(tokens(pipe), base)
    pipe.set_adapters(STYLE, 0.5)
    torch.testing.assert_close(tokens(pipe), tokens(merged), rtol=1e-2, atol=1e-2)
    pipe.set_adapters(STYLE, 1.0)
    pipe.fuse_lora(lora_scale=0.5)
    wanted = base_weights(merged)
    for name, value in base_weights(pipe).items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-4)
    assert not torch.equal(tokens(pipe), base)
    pipe.unfuse_lora()
    assert {name for name, value in base_weights(pipe).items() if not torch.equal(value, before[name])} == set()
    pipe.unload_lora_weights()
    assert torch.equal(tokens(pipe), base)
