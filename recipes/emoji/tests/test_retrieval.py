"""An image is looked up among the pictures of a gallery."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from arimage.eval.runs.manifest import prompt_rows
from arimage_emoji.metrics.reference import read_gallery
from arimage_emoji.metrics.retrieval import emoji_retrieval, retrieval_hits


def test_retrieval_finds_copies_at_any_resolution_and_misses_strangers():
    gallery = torch.rand(12, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    gallery = F.interpolate(F.avg_pool2d(gallery, 16), size=(64, 64))
    names = [str(i // 2) for i in range(12)]
    samples = F.interpolate(gallery[[0, 5, 11]], size=(128, 128))
    assert retrieval_hits(samples, ["0", "2", "5"], gallery, names)[:, 0].all()
    assert not retrieval_hits(samples, ["none"] * 3, gallery, names).any()


@pytest.mark.parametrize(("fields", "name"), [({}, "None"), ({"name": "no such"}, "no such")])
def test_what_the_gallery_does_not_show_is_refused(fields, name, tmp_path, write_run):
    write_run(tmp_path, prompt_rows([{"prompt": "tree", **fields}], 0), np.zeros((1, 64, 64, 3), np.uint8))
    with pytest.raises(ValueError, match=f"no picture of '{name}'.*--prompts emoji"):
        emoji_retrieval(tmp_path, *read_gallery())
