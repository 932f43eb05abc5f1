"""Which pictures features are of, and the cache of features."""

import os
import shutil
import threading

import numpy as np
import pytest
import torch
from PIL import Image

from arimage.eval.metrics.features import Space, extract, image_paths
from arimage.eval.runs.manifest import prompt_rows
from arimage.media.files import read_image


class Counting:
    """Features [B, 1], the mean of a picture; counts the pictures it is given."""

    space = Space("mean", "0", "none")
    seen = 0

    def __call__(self, images):
        self.seen += len(images)
        return torch.tensor([[np.asarray(image).mean()] for image in images])


def test_features_are_cached_until_something_changes(pictures, tmp_path):
    folder, cache = shutil.copytree(pictures, tmp_path / "pictures"), tmp_path / "features"
    paths = image_paths(folder)
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
    assert all(path.suffix == ".npz" and not path.name.startswith(".") for path in cache.iterdir())


def test_features_of_other_pictures_are_not_taken_from_the_cache(tmp_path):
    """Of equal names, sizes and times, as archives that store fixed times unpack them."""
    found = {}
    for name, level in (("a", 10), ("b", 200)):
        (tmp_path / name).mkdir()
        Image.new("RGB", (4, 4), (level,) * 3).save(tmp_path / name / "0.bmp")
        np.savez(tmp_path / name / "x.npz", arr_0=np.full((1, 4, 4, 3), level, np.uint8))
        for file in ("0.bmp", "x.npz"):
            os.utime(tmp_path / name / file, (0, 0))
            found[name, file] = float(extract([tmp_path / name / file], Counting(), cache=tmp_path / "cache")[0, 0])
    assert found == {("a", "0.bmp"): 10, ("a", "x.npz"): 10, ("b", "0.bmp"): 200, ("b", "x.npz"): 200}
    # In the same place too.
    (tmp_path / "b" / "0.bmp").replace(tmp_path / "a" / "0.bmp")
    assert extract([tmp_path / "a" / "0.bmp"], Counting(), cache=tmp_path / "cache")[0, 0] == 200


@pytest.mark.parametrize("damage", [b"", b"PK\3\4", b"<html>"])
def test_a_damaged_file_of_the_cache_is_written_again(pictures, tmp_path, damage):
    paths, network = image_paths(pictures), Counting()
    first = extract(paths, network, cache=tmp_path)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    for part in (damage, whole[: len(whole) // 2]):
        file.write_bytes(part)
        assert (extract(paths, network, cache=tmp_path) == first).all()
        assert len(file.read_bytes()) == len(whole)
    assert network.seen == 24


def test_a_cache_that_cannot_be_written_is_a_warning(pictures, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("arimage.eval.runs.files.os.fsync", fail)
    for cache, reason in ((tmp_path / "file" / "features", "Not a directory"), (tmp_path / "full", "No space left")):
        caplog.clear()
        assert len(extract(image_paths(pictures), Counting(), cache=cache)) == 8
        assert f"{cache}" in caplog.text and reason in caplog.text and "computed again" in caplog.text
    assert not list((tmp_path / "full").iterdir())


def test_a_damaged_picture_is_named(pictures, tmp_path):
    folder = shutil.copytree(pictures, tmp_path / "pictures")
    whole = (folder / "5.png").read_bytes()
    for damage in (whole[: len(whole) // 2], b"", b"<html>"):
        (folder / "5.png").write_bytes(damage)
        with pytest.raises(ValueError, match="5.png, which cannot be read"):
            extract(image_paths(folder), Counting())
    np.savez(tmp_path / "x.npz", arr_0=np.zeros((5, 64, 64, 3), np.uint8))
    damaged = bytearray((tmp_path / "x.npz").read_bytes())
    damaged[1000] ^= 1
    (tmp_path / "x.npz").write_bytes(damaged)
    with pytest.raises(ValueError, match="x.npz is damaged"):
        extract([tmp_path / "x.npz"], Counting())


class Overflowing(Counting):
    """Infinite features for bright pictures."""

    def __call__(self, images):
        features = super().__call__(images)
        return torch.where(features > 200, torch.inf, features)


def test_features_that_are_not_finite_are_refused_by_the_name_of_the_picture(tmp_path):
    levels = np.array([10, 20, 250, 30])
    for level in levels:
        Image.new("RGB", (4, 4), (int(level),) * 3).save(tmp_path / f"{level}.png")
    np.savez(tmp_path / "x.npz", arr_0=np.broadcast_to(levels.astype(np.uint8)[:, None, None, None], (4, 4, 4, 3)))
    with pytest.raises(ValueError, match="250.png .* not finite"):
        extract(image_paths(tmp_path), Overflowing(), cache=tmp_path / "cache")
    with pytest.raises(ValueError, match="image 2 of .*x.npz .* not finite"):
        extract([tmp_path / "x.npz"], Overflowing(), cache=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_pictures_of_an_array_are_those_of_the_files(tmp_path):
    arrays = np.random.default_rng(0).integers(0, 256, (5, 6, 4, 3), dtype=np.uint8)
    np.savez(tmp_path / "x.npz", arr_0=arrays)
    np.save(tmp_path / "x.npy", arrays)
    for name in ("x.npz", "x.npy"):
        assert extract([tmp_path / name], Counting(), batch_size=2)[:, 0] == pytest.approx(arrays.mean((1, 2, 3)))


def test_a_run_gives_its_pictures_in_the_order_of_its_manifest(tmp_path, write_run):
    write_run(tmp_path, prompt_rows([{"prompt": "a"}, {"prompt": "b"}], 0), np.zeros((2, 2, 2, 3), np.uint8))
    # Only those of the manifest.
    Image.new("RGB", (2, 2)).save(tmp_path / "images" / "0.png")
    assert [path.name for path in image_paths(tmp_path)] == ["000000.png", "000001.png"]
    (tmp_path / "images" / "0.png").unlink()
    assert [path.name for path in image_paths(tmp_path / "images")] == ["000000.png", "000001.png"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty has no images"):
        image_paths(tmp_path / "empty")


def test_the_next_batch_is_read_while_this_one_is_in_use(pictures):
    begun = [threading.Event() for _ in range(8)]
    paths = image_paths(pictures)

    def read(path):
        begun[paths.index(path)].set()
        return read_image(path)

    class Waiting(Counting):
        def __call__(self, images):
            first_of_next = self.seen + len(images)
            assert first_of_next >= 8 or begun[first_of_next].wait(20)
            return super().__call__(images)

    found = extract(paths, Waiting(), batch_size=3, read=read)
    assert (found == extract(paths, Counting())).all()
