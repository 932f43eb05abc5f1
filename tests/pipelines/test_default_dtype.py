"""What another script has passed to `torch.set_default_dtype` changes no image."""

import pytest
import torch
from families import EVERY, condition_of, flat, one_of_each_kind, pictures_of, seeded

from arimage import AutoPipeline


DTYPES = [torch.float64, torch.bfloat16]


@pytest.fixture(autouse=True)
def restored():
    yield
    torch.set_default_dtype(torch.float32)


def generate(pipe, **settings):
    out = pipe(**condition_of(pipe), generator=seeded(0), output_type="pt", **settings)
    return flat(out.tokens), pictures_of(out)


@pytest.mark.parametrize("family", one_of_each_kind(EVERY))
def test_every_decoding_gives_the_same(family):
    pipe = EVERY[family]()
    for name in pipe.decoding_names:
        expected = generate(pipe, decoding=name)
        for dtype in DTYPES:
            torch.set_default_dtype(dtype)
            found = generate(pipe, decoding=name)
            torch.set_default_dtype(torch.float32)
            assert all(map(torch.equal, found, expected)), (name, dtype)


@pytest.mark.parametrize("family", one_of_each_kind(EVERY))
def test_a_loaded_pipeline_is_the_same(family, tmp_path):
    EVERY[family]().save_pretrained(tmp_path)
    images = {}
    for dtype in (torch.float32, *DTYPES):
        torch.set_default_dtype(dtype)
        loaded = AutoPipeline.from_pretrained(tmp_path)
        loaded.set_progress_bar_config(disable=True)
        images[dtype] = generate(loaded)
        assert torch.get_default_dtype() == dtype
    for dtype in DTYPES:
        assert all(map(torch.equal, images[dtype], images[torch.float32])), dtype
