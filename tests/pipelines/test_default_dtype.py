"""What another script has passed to `torch.set_default_dtype` changes no image."""

from itertools import product

import pytest
import torch
from families import EVERY, KINDS, condition_of, flat, one_of_each_kind, pictures_of, seeded
from pipelines.test_half_precision import FEW


DTYPES = [torch.bfloat16, torch.float64]


@pytest.fixture(autouse=True)
def restored():
    yield
    torch.set_default_dtype(torch.float32)


def generate(pipe, **settings):
    out = pipe(**condition_of(pipe), generator=seeded(0), output_type="pt", **settings)
    return flat(out.tokens), pictures_of(out)


@pytest.mark.every(8)
@pytest.mark.parametrize(
    ("family", "decodings", "dtype"),
    [
        ("llamagen-text", None, torch.bfloat16),
        *((family, FEW, torch.bfloat16) for family in sorted(KINDS - {"llamagen-text"})),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in product(EVERY, [None], DTYPES)),
    ],
)
def test_every_decoding_gives_the_same(family, decodings, dtype):
    pipe = EVERY[family]()
    for name in pipe.decoding_names if decodings is None else decodings.intersection(pipe.decoding_names):
        expected = generate(pipe, decoding=name)
        torch.set_default_dtype(dtype)
        found = generate(pipe, decoding=name)
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
        images.append(generate(loaded))
        assert torch.get_default_dtype() == each
    assert all(map(torch.equal, *images))
