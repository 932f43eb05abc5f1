"""Calls of every family in half precision: with weights in bfloat16 or float16, or under `torch.autocast`, whose
activations are not in the dtype of the weights."""

import contextlib
import re
from itertools import product

import families
import pytest
import torch
from families import EVERY, condition_of, flat, one_of_each_kind, pictures_of, seeded
from pipelines.mar import tiny as tiny_mar


KINDS = {
    "bfloat16": (torch.bfloat16, None),
    "float16": (torch.float16, None),
    "autocast": (torch.float32, torch.bfloat16),
    "autocast-float16": (torch.float32, torch.float16),
}
# One of each way to keep what a forward pass returned for the next one.
FEW = {"ar", "sjd-coupled", "sjd2", "eagle", "groups", "path-jacobi", "next-scale", "mar", "halton", "few-step"}
REFUSED = "are not finite.* load it (with dtype|in) float32"


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
            # Untrained heads that take few steps make tokens that float16, or the image tokenizer in it, cannot hold.
            assert family == "mar" and "float16" in kind and re.search(REFUSED, str(error))
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


def held(pipe):
    """All parameters and buffers of a pipeline."""
    return {
        f"{key}.{name}": tensor.detach()
        for key, part in pipe.components.items()
        if isinstance(part, torch.nn.Module)
        for name, tensor in (*part.named_parameters(), *part.named_buffers())
    }


def assert_same(one, other):
    assert one.keys() == other.keys()
    assert [name for name in one if one[name].dtype != other[name].dtype] == []
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


# What loading leaves in float32: frequencies, wavelets, denoising heads, and in float16 parts of T5 encoders.
@pytest.mark.every(2)
@pytest.mark.parametrize("family", one_of_each_kind(EVERY))
def test_casting_leaves_in_float32_what_loading_leaves(family, tmp_path):
    pipe = EVERY[family]()
    kind = type(pipe)
    pipe.save_pretrained(tmp_path)
    for dtype in (torch.float16, torch.bfloat16):
        expected = held(kind.from_pretrained(tmp_path, dtype=dtype))
        assert_same(held(kind.from_pretrained(tmp_path).to(dtype)), expected)
        assert_same(held(kind.from_pipe(kind.from_pretrained(tmp_path), dtype=dtype)), expected)


@pytest.mark.parametrize("cast", ["to", "to in words", "half", "bfloat16", "type"])
def test_a_denoising_head_stays_in_float32_however_it_is_cast(cast):
    head, before = tiny_mar.head(), tiny_mar.head().state_dict()
    casts = {
        "to": lambda: head.to("cpu", torch.float16),
        "to in words": lambda: head.to(device="cpu", dtype=torch.float16),
        "half": head.half,
        "bfloat16": head.bfloat16,
        "type": lambda: head.type(torch.float16),
    }
    assert casts[cast]() is head
    assert_same(head.state_dict(), before)
    assert head.to("meta").input_projection.weight.is_meta


@pytest.mark.parametrize("quantised", [False, True])
def test_infinity_generates_in_float64(quantised):
    pipe = EVERY["infinity"]()
    if quantised:
        pipe.quantize_weights()
    assert pipe.to(torch.float64)(**condition_of(pipe), output_type="pt", generator=seeded(0)).images.isfinite().all()


DTYPES = [torch.bfloat16, torch.float64]


@pytest.fixture(autouse=True)
def restored():
    yield
    torch.set_default_dtype(torch.float32)


def pixels_of(pipe, **settings):
    out = pipe(**condition_of(pipe), generator=seeded(0), output_type="pt", **settings)
    return flat(out.tokens), pictures_of(out)


@pytest.mark.every(8)
@pytest.mark.parametrize(
    ("family", "decodings", "dtype"),
    [
        ("llamagen-text", None, torch.bfloat16),
        *((family, FEW, torch.bfloat16) for family in sorted(families.KINDS - {"llamagen-text"})),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in product(EVERY, [None], DTYPES)),
    ],
)
def test_every_decoding_gives_the_same(family, decodings, dtype):
    pipe = EVERY[family]()
    for name in pipe.decoding_names if decodings is None else decodings.intersection(pipe.decoding_names):
        expected = pixels_of(pipe, decoding=name)
        torch.set_default_dtype(dtype)
        found = pixels_of(pipe, decoding=name)
        torch.set_default_dtype(torch.float32)
        assert all(map(torch.equal, found, expected)), name


@pytest.mark.every(5)
@pytest.mark.parametrize("dtype", [DTYPES[0], pytest.param(DTYPES[1], marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", one_of_each_kind(EVERY))
def test_a_loaded_pipeline_is_the_same(family, dtype, tmp_path):
    pipe, images = EVERY[family](), []
    pipe.save_pretrained(tmp_path)
    for each in (torch.float32, dtype):
        torch.set_default_dtype(each)
        loaded = type(pipe).from_pretrained(tmp_path)
        loaded.set_progress_bar_config(disable=True)
        images.append(pixels_of(loaded))
        assert torch.get_default_dtype() == each
    assert all(map(torch.equal, *images))
