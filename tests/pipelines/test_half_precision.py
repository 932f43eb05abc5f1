"""Calls of every family in half precision: with weights in bfloat16 or float16, or under `torch.autocast`, whose
activations are not in the dtype of the weights."""

import contextlib
from itertools import product

import families
import pytest
import torch
from families import EVERY, condition_of, pictures_of, seeded
from pipelines.llamagen import tiny as tiny_llamagen


KINDS = {
    "bfloat16": (torch.bfloat16, None),
    "float16": (torch.float16, None),
    "autocast": (torch.float32, torch.bfloat16),
    "autocast-float16": (torch.float32, torch.float16),
}
# One of each way to keep what a forward pass returned for the next one.
FEW = {"ar", "sjd-coupled", "sjd2", "eagle", "groups", "path-jacobi", "next-scale", "mar", "few-step"}
REFUSED = "the tokens of the model are not finite (images 0 of the batch): check its weights, or load it with dtype "
REFUSED += "float32 or bfloat16"


def check(family, kind, decodings, guidance_scale=3.0):
    """Calls give finite images, or float16 is refused in a sentence that says what to do."""
    weights, inside = KINDS[kind]
    pipe = EVERY[family]().to(weights)
    options = {**condition_of(pipe), "output_type": "pt"}
    # Videos are guided where the checkpoint was trained for it.
    if not pipe.abilities.generates_video or pipe.begins_with_text:
        options["guidance_scale"] = guidance_scale
    decodings = [name for name in pipe.decoding_names if decodings is None or name in decodings]
    assert decodings
    for decoding in decodings:
        autocast = torch.autocast("cpu", inside) if inside else contextlib.nullcontext()
        try:
            with autocast:
                out = pipe(**options, decoding=decoding, generator=seeded(0))
        except ValueError as error:
            # Untrained heads that take few steps make tokens that float16 cannot hold.
            assert family == "mar" and "float16" in kind and str(error) == REFUSED
        else:
            assert pictures_of(out).isfinite().all(), decoding


@pytest.mark.every(10)
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *product(sorted(families.KINDS), ["bfloat16"]),
        *product(("llamagen-text", "janus", "var-text", "latent-llama", "glm-image"), ["autocast"]),
        # Tokens of an untrained head may be too large for float16.
        *product(("llamagen-text", "mar"), ("float16", "autocast-float16")),
    ],
)
def test_a_call_gives_finite_images(family, kind):
    check(family, kind, FEW)


@pytest.mark.every(2)
@pytest.mark.parametrize("family", ["llamagen-text", "mar", "cosmos-text"])
def test_a_call_without_guidance_runs_under_autocast(family):
    check(family, "autocast", FEW, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", EVERY)
def test_every_decoding_gives_finite_images(family, kind):
    check(family, kind, None)


def test_autocast_computes_in_its_dtype():
    pipe, seen = tiny_llamagen.class_pipeline(), []
    pipe.transformer.blocks[0].attention.qkv_proj.register_forward_hook(lambda *step: seen.append(step[-1].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        pipe(class_labels=3, decoding="ar", output_type="latent")
    assert set(seen) == {torch.bfloat16}
