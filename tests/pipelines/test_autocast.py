"""Calls of every family under `torch.autocast`, whose activations are not in the dtype of the weights."""

import pytest
import tiny
import torch
from families import EVERY, TWINS, condition_of, pictures_of, seeded


@pytest.mark.parametrize(
    ("family", "guidance_scale"),
    [
        *(pytest.param(name, 3.0, marks=[pytest.mark.slow] * (name in TWINS)) for name in EVERY),
        *((name, 1.0) for name in ("llamagen-text", "mar", "cosmos")),
    ],
)
def test_a_call_runs_under_autocast(family, guidance_scale):
    pipe = EVERY[family]()
    options = {**condition_of(pipe), "output_type": "pt"}
    if guidance_scale > 1:
        if pipe.abilities.generates_video and not pipe.config.begins_with_text:
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
