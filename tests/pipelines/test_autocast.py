"""Calls of every family under `torch.autocast`, whose activations are not in the dtype of the weights."""

import pytest
import tiny
import tiny_cosmos
import tiny_latent_llama
import torch
from families import BUILD, OTHERS, condition_of, pictures_of, seeded

FAMILIES = {
    **BUILD,
    **OTHERS,
    "cosmos-blocks": lambda: tiny_cosmos.pipeline(block_tokens=2),
    "latent-llama": tiny_latent_llama.pipeline,
    **{name: lambda name=name: tiny.any_order_pipeline(name) for name in tiny.ANY_ORDER},
}


@pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_runs_under_autocast(family, guidance_scale):
    pipe = FAMILIES[family]()
    options = {**condition_of(pipe), "output_type": "pt"}
    if guidance_scale > 1:
        if not pipe.accepts_guidance_scale or (pipe.generates_video and not pipe.config.begins_with_text):
            pytest.skip("the family has no guidance")
        options["guidance_scale"] = guidance_scale
    for decoding in {"ar", "sjd-coupled", "groups"} & set(pipe.decoding_names) or [None]:
        with torch.autocast("cpu", torch.bfloat16):
            out = pipe(**options, decoding=decoding, generator=seeded(0))
        assert pictures_of(out).isfinite().all(), decoding


def test_autocast_computes_in_its_dtype():
    pipe, seen = tiny.class_pipeline(), []
    pipe.transformer.blocks[0].attention.qkv_proj.register_forward_hook(lambda *step: seen.append(step[-1].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        pipe(class_labels=3, decoding="ar", output_type="latent")
    assert set(seen) == {torch.bfloat16}
