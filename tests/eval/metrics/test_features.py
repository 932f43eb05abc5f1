"""Which pictures features are of, and the cache of features."""

import os

import numpy as np
import pytest
import torch
from PIL import Image

from arimage.eval.metrics.features import Space, extract, image_paths
from arimage.eval.runs.manifest import prompt_rows


class Counting:
    """Features [B, 1], the mean of a picture; counts the pictures it is given."""

    space = Space("mean", "0", "none")
    seen = 0

    def __call__(self, images):
        self.seen += len(images)
        return torch.tensor([[np.asarray(image).mean()] for image in images])


def test_features_are_cached_until_something_changes(pictures, tmp_path):
    paths, cache = image_paths(pictures), tmp_path / "features"
    network = Counting()
    first = extract(paths, network, cache=cache, batch_size=3)
    assert first.dtype == np.float32 and first[:, 0] == pytest.approx(
        [np.asarray(Image.open(path).convert("RGB")).mean() for path in paths]
    )
    assert (extract(paths, network, cache=cache) == first).all() and network.seen == 8
    assert (extract(paths[::-1], network, cache=cache) == first[::-1]).all() and network.seen == 16
    network.space = Space("mean", "1", "none")
    extract(paths, network, cache=cache)
    assert network.seen == 24
    os.utime(paths[0], (1, 1))
    extract(paths, network, cache=cache)
    assert network.seen == 32
    assert all(path.suffix == ".npz" and not path.name.startswith(".") for path in cache.iterdir())


def test_pictures_of_an_array_are_those_of_the_files(tmp_path):
    arrays = np.random.default_rng(0).integers(0, 256, (5, 6, 4, 3), dtype=np.uint8)
    np.savez(tmp_path / "x.npz", arr_0=arrays)
    assert extract([tmp_path / "x.npz"], Counting(), batch_size=2)[:, 0] == pytest.approx(arrays.mean((1, 2, 3)))
    np.savez(tmp_path / "y.npz", arr_0=arrays / 255)
    with pytest.raises(ValueError, match=r"y.npz is float64 \[5, 6, 4, 3\]: pictures are uint8"):
        extract([tmp_path / "y.npz"], Counting())


def test_a_run_gives_its_pictures_in_the_order_of_its_manifest(tmp_path, write_run):
    write_run(tmp_path, prompt_rows([{"prompt": "a"}, {"prompt": "b"}], 0), np.zeros((2, 2, 2, 3), np.uint8))
    # Only those of the manifest.
    Image.new("RGB", (2, 2)).save(tmp_path / "images" / "0.png")
    assert [path.name for path in image_paths(tmp_path)] == ["000000.png", "000001.png"]
    (tmp_path / "images" / "0.png").unlink()
    assert [path.name for path in image_paths(tmp_path / "images")] == ["000000.png", "000001.png"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty has no pictures"):
        image_paths(tmp_path / "empty")
