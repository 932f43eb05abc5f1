"""Files and folders that runs are scored against, and those that are refused."""

import pickle
import zipfile

import numpy as np
import pytest
from PIL import Image

from arimage.eval.metrics.frechet import Gaussian
from arimage.eval.metrics.reference import read_folder, read_reference, read_spatial_statistics


PICTURES = np.random.default_rng(0).integers(0, 256, (5, 6, 4, 3), dtype=np.uint8)


def statistics(size=6, **changes):
    return {"mu": np.zeros(size), "sigma": np.eye(size)} | changes


def test_pictures_statistics_and_both_are_read(tmp_path):
    np.savez(tmp_path / "both.npz", arr_0=PICTURES, labels=np.array(["a"]), **statistics())
    both = read_reference(tmp_path / "both.npz")
    assert both.paths == [tmp_path / "both.npz"] and both.label == f"both.npz, sha256 {both.sha256[:8]}"
    assert [both.statistics.mean.shape, both.statistics.covariance.shape] == [(6,), (6, 6)]
    np.save(tmp_path / "x.npy", PICTURES)
    assert read_reference(tmp_path / "x.npy").paths == [tmp_path / "x.npy"]
    np.savez(tmp_path / "s.npz", **statistics(sigma=np.eye(6, dtype=np.float32)))
    assert read_reference(tmp_path / "s.npz").paths == []


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_rounding_does_not_make_statistics_wrong(dtype, tmp_path):
    features = np.random.default_rng(0).normal(size=(40, 200)).astype(np.float32) @ np.diag(0.97 ** np.arange(200))
    for name, some in (("few", features), ("equal", features[:1].repeat(40, 0))):
        np.savez(tmp_path / f"{name}.npz", mu=some.mean(0), sigma=np.cov(some, rowvar=False).astype(dtype))
        read = read_reference(tmp_path / f"{name}.npz").statistics
        Gaussian.of_covariance(read.mean, read.covariance)


def test_spatial_statistics_and_covariances_with_negative_variances_are_refused(tmp_path):
    np.savez(tmp_path / "s.npz", mu_s=np.zeros(6), sigma_s=-np.eye(6), **statistics())
    with pytest.raises(ValueError, match="sigma_s of .* has the eigenvalue -1"):
        read_spatial_statistics(tmp_path / "s.npz")
    with pytest.raises(ValueError, match="the covariance has the eigenvalue -1"):
        Gaussian.of_covariance(np.zeros(6), -np.eye(6))


def text(path):
    path.write_text("<!DOCTYPE html><title>Sign in</title>")


def cut(path):
    np.savez(path, arr_0=PICTURES)
    path.write_bytes(path.read_bytes()[:200])


def pickled(path):
    path.write_bytes(pickle.dumps(PICTURES))


def other_archive(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("arr_0.npy", "nothing")


UNUSABLE = {
    "empty": lambda path: path.write_bytes(b""),
    "html": text,
    "cut": cut,
    "pickled": pickled,
    "archive": other_archive,
}


@pytest.mark.parametrize("suffix", [".npz", ".npy"])
@pytest.mark.parametrize("write", UNUSABLE.values(), ids=UNUSABLE)
def test_files_of_another_kind_are_refused(tmp_path, write, suffix):
    # numpy adds its own suffix.
    write(tmp_path / "x.npz")
    path = (tmp_path / "x.npz").rename(tmp_path / f"x{suffix}")
    with pytest.raises(ValueError, match=f"x{suffix} is damaged") as error:
        read_reference(path)
    assert "pickle" not in str(error.value)


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({}, r"holds \[\]: give a .npz with mu and sigma"),
        ({"a": PICTURES}, r"holds \['a'\]: give a .npz with mu and sigma, or with images as arr_0"),
        ({"arr_0": PICTURES[:0]}, r"arr_0 of .* is uint8 \[0, 6, 4, 3\]: images are uint8 \[N, H, W, 3\]"),
        ({"arr_0": PICTURES / 255}, r"arr_0 of .* is float64 \[5, 6, 4, 3\]"),
        ({"arr_0": np.array([PICTURES, None], dtype=object)}, "arr_0 of .* is object"),
        (statistics(sigma=np.eye(5)), r"float64 \[5, 5\]: statistics are real numbers, mu \[D\] and sigma \[D, D\]"),
        (statistics(mu=np.zeros((1, 6))), r"mu and sigma of .* are float64 \[1, 6\]"),
        (statistics(0), r"mu and sigma of .* are float64 \[0\]"),
        (statistics(sigma=np.eye(6, dtype=complex)), "complex128"),
        (statistics(mu=np.array([None] * 6)), "mu and sigma of .* are object"),
        (statistics(mu=np.array([0, 0, np.nan, 0, 0, 0])), "mu or sigma of .* not finite"),
        (statistics(sigma=np.diag([1.0, 1, np.inf, 1, 1, 1])), "mu or sigma of .* not finite"),
        (statistics(sigma=-np.eye(6)), "sigma of .* has the eigenvalue -1, and a covariance has none below 0"),
        (statistics(sigma=np.ones((6, 6)) - 0.1 * np.eye(6)), "sigma of .* has the eigenvalue -0.1"),
        (statistics(sigma=np.triu(np.ones((6, 6)))), "sigma of .* is not symmetric"),
    ],
)
def test_arrays_that_are_neither_pictures_nor_statistics_are_refused(tmp_path, arrays, sentence):
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(ValueError, match=sentence):
        read_reference(tmp_path / "x.npz")


def test_the_digest_of_a_folder_is_that_of_its_contents(tmp_path):
    for name, seed in (("a", 0), ("b", 1), ("c", 0)):
        (tmp_path / name).mkdir()
        noise = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        # Files of equal size.
        Image.fromarray(noise).save(tmp_path / name / "0.bmp")
    a, b, c = (read_folder(tmp_path / name) for name in "abc")
    assert a.sha256 == c.sha256 != b.sha256 and a.label == f"a, files {a.sha256[:8]}"


def test_damaged_pictures_are_left_out_on_request(tmp_path, caplog):
    Image.new("RGB", (4, 4)).save(tmp_path / "good.png")
    whole = (tmp_path / "good.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[:40])
    assert len(read_reference(tmp_path).paths) == 2
    found = read_reference(tmp_path, skip_damaged=True)
    assert [path.name for path in found.paths] == ["good.png"] and "1 damaged ones left out" in found.label
    assert "1 of 2" in caplog.text and "cut.png" in caplog.text
    (tmp_path / "good.png").unlink()
    with pytest.raises(ValueError, match="are damaged"):
        read_reference(tmp_path, skip_damaged=True)
