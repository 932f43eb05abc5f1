"""Images that are not a run: any folder or array of them is scored, nothing is written next to them, and statistics
of a reference are made and read."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.linalg
import scipy.spatial
import torch
from eval.score_kit import Moments, pictures, save
from PIL import ExifTags, Image

from arimage.eval import download, score_images
from arimage.eval import job as jobs
from arimage.eval import score as scores
from arimage.eval.job import Job, make_statistics
from arimage.eval.metrics.features import Space
from arimage.eval.runs.manifest import label_rows, prompt_rows
from arimage.eval.score import METRICS_FILE, figure_text, score


class Corners:
    """The first two pixels: features [B, 6]."""

    weights, cmmd_weights = None, "of another network"

    def __init__(self, *_):
        self.space = Space("corners", "1" * 64, "none")

    def __call__(self, images):
        return torch.stack([torch.from_numpy(np.array(image))[0, :2].flatten() / 255 for image in images])


OURS, THEIRS = pictures(30, 0, 20), pictures(40, 1)
METRICS = ["fid", "kid", "prdc", "isc", "sfid", "fd-dinov2", "cmmd"]


@pytest.fixture(autouse=True)
def networks(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(jobs, "InceptionExtractor", Moments)
    for name in ("SpatialInceptionExtractor", "ClipExtractor", "Dinov2Extractor"):
        monkeypatch.setattr(jobs, name, Corners)


@pytest.fixture
def images(tmp_path):
    return save(tmp_path / "photos" / "a", OURS).parent


@pytest.fixture
def reference(tmp_path):
    return save(tmp_path / "real", THEIRS)


def files(folder):
    return sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*"))


def features(extractor, arrays):
    return extractor([Image.fromarray(array) for array in arrays]).numpy().astype(np.float64)


def frechet(x, y):
    root = scipy.linalg.sqrtm(np.cov(x, rowvar=False) @ np.cov(y, rowvar=False)).real
    traces = np.trace(np.cov(x, rowvar=False) + np.cov(y, rowvar=False) - 2 * root)
    return ((x.mean(0) - y.mean(0)) ** 2).sum() + traces


def test_a_folder_an_array_and_a_run_of_the_same_images_score_the_same(images, reference, tmp_path, write_run):
    before = files(images)
    write_run(tmp_path / "run", label_rows(range(30), 0, 1), OURS)
    np.savez(tmp_path / "images.npz", arr_0=OURS)
    np.save(tmp_path / "images.npy", OURS)
    folder, run, npz, npy = (
        score(Job(tmp_path / name, reference, resize="tf1"), METRICS)
        for name in ("photos", "run", "images.npz", "images.npy")
    )
    assert folder == npz == npy == run and len(folder) == 12
    assert all(entry["count"] == 30 and "prompts" not in entry for entry in folder.values())
    assert all(entry["standard_error"] > 0 for name, entry in folder.items() if name in ("fid", "isc", "cmmd", "kid"))
    assert files(images) == before and (tmp_path / "run" / METRICS_FILE).is_file()


def test_features_of_a_folder_are_computed_once(images, reference, monkeypatch):
    before = score(Job(images, reference), ["kid"])
    monkeypatch.setattr(Moments, "__call__", None)
    assert score(Job(images, reference), ["kid"]) == before
    # And are those of the same folder as a reference.
    assert score(Job(reference, images), ["kid"])["kid"]["value"] == pytest.approx(before["kid"]["value"], abs=0.02)


def test_new_metrics_are_those_of_independent_formulas(images, reference):
    found = score(Job(images, reference, resize="tf1"), ["sfid", "fd-dinov2", "cmmd", "isc"])
    x, y = (features(Corners(), arrays) for arrays in (OURS, THEIRS))
    assert found["sfid"]["value"] == found["fd-dinov2"]["value"] == pytest.approx(frechet(x, y), rel=1e-6)
    x, y = (one / np.linalg.norm(one, axis=1, keepdims=True) for one in (x, y))
    means = [
        np.exp(-scipy.spatial.distance.cdist(a, b, "sqeuclidean") / 200).mean() for a, b in ((x, x), (y, y), (x, y))
    ]
    assert found["cmmd"]["value"] == pytest.approx(1000 * (means[0] + means[1] - 2 * means[2]), rel=1e-4)
    assert (found["cmmd"]["sigma"], found["cmmd"]["scale"]) == (10, 1000)
    assert found["cmmd"]["weights"] == "of another network" and "weights" not in found["fd-dinov2"]
    assert found["isc"]["splits"] == 10 and found["isc"]["reference"] == "no reference"
    assert 1 < found["isc"]["value"] < 5
    assert found["sfid"]["space"]["name"] == "corners" and found["isc"]["space"]["name"] == "moments"


def test_the_inception_score_needs_no_reference(images):
    assert list(score(Job(images, resize="tf1"), ["isc"])) == ["isc"]
    for metric in ("cmmd", "fd-dinov2", "sfid"):
        with pytest.raises(ValueError, match="--ref is missing"):
            score(Job(images, resize="tf1"), [metric])
    for metric in ("isc", "sfid"):
        with pytest.raises(ValueError, match=f"{metric} is .* --resize tf1"):
            score(Job(images, images), [metric])


def test_statistics_of_adm_are_those_of_their_own_features(images, tmp_path):
    moments, corners = (features(extractor, THEIRS) for extractor in (Moments(None), Corners()))
    arrays = {"mu": moments.mean(0), "sigma": np.cov(moments, rowvar=False)}
    np.savez(tmp_path / "adm.npz", **arrays, mu_s=corners.mean(0), sigma_s=np.cov(corners, rowvar=False))
    np.savez(tmp_path / "fid.npz", **arrays)
    found = score(Job(images, tmp_path / "adm.npz", resize="tf1"), ["fid", "sfid"])
    assert found["sfid"]["value"] == pytest.approx(frechet(features(Corners(), OURS), corners), rel=1e-6)
    assert found["fid"]["value"] == pytest.approx(frechet(features(Moments(None), OURS), moments), rel=1e-6)
    for metric in ("sfid", "cmmd", "fd-dinov2"):
        with pytest.raises(ValueError, match=f"fid.npz .* none for {metric}: name a folder"):
            score(Job(images, tmp_path / "fid.npz", resize="tf1"), [metric])


@pytest.mark.parametrize("metric", ["clip", "fid-categories", "fvd", "retrieval"])
def test_metrics_that_need_a_run_are_refused(images, reference, metric, monkeypatch):
    monkeypatch.setattr(Moments, "__call__", None)
    before = files(images)
    with pytest.raises(ValueError, match=f"{metric} needs the prompts or videos of a run"):
        score(Job(images, reference), ["kid", metric])
    assert files(images) == before


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nowhere", "nowhere is not a set of images: name a folder of images"),
        ("notes.txt", "notes.txt is not a set of images"),
        ("empty", "empty has no images: name a folder of .png"),
        ("stats.npz", "stats.npz holds statistics only: name a folder"),
        ("floats.npz", r"arr_0 of .*floats.npz is float64 \[30, 8, 8, 3\]"),
        ("damaged", "cut.png"),
    ],
)
def test_what_holds_no_images_is_refused(tmp_path, reference, name, sentence):
    (tmp_path / "notes.txt").write_text("a")
    (tmp_path / "empty").mkdir()
    np.savez(tmp_path / "stats.npz", mu=np.zeros(6), sigma=np.eye(6))
    np.savez(tmp_path / "floats.npz", arr_0=OURS / 255)
    (save(tmp_path / "damaged", OURS[:5]) / "cut.png").write_bytes(b"\x89PNG")
    with pytest.raises(ValueError, match=sentence):
        score(Job(tmp_path / name, reference), ["kid"])


def test_the_command_prints_the_figures_and_writes_them_where_it_is_told(images, reference, tmp_path, command):
    before = files(images)
    code, out, err = command(
        "eval",
        "score",
        "--device",
        "cpu",
        images,
        "--ref",
        reference,
        "--metrics",
        "kid,cmmd",
        "--out",
        tmp_path / "x.json",
    )
    found = json.loads((tmp_path / "x.json").read_text())
    assert code == 0 and list(found) == ["kid", "cmmd"] and files(images) == before
    assert out.splitlines()[0].startswith(f"kid: {figure_text(found['kid'])} (30 images, real, files ")
    assert "cmmd: weights of another network" in err
    target = tmp_path / "x.txt"
    words = ["eval", "score", "--device", "cpu", images, "--ref", reference, "--metrics", "kid,", "--out"]
    code, out, err = command(*words, target)
    assert code == 2 and not out and err == f"arimage: --out is {target}: end it in one of .json\n"
    assert command(*words, tmp_path / "new" / "x.json")[0] == 0 and (tmp_path / "new" / "x.json").is_file()


def test_one_function_scores_two_folders(images, reference, monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(jobs, "InceptionExtractor", lambda *args: seen.append(args) or Moments(*args))
    monkeypatch.setenv("ARIMAGE_INCEPTION_WEIGHTS", "of-the-environment.pt")
    found = score_images(str(images), reference, metrics=("fid", "kid"), device="cpu")
    assert found == score(Job(images, reference), ["fid", "kid"])
    assert score_images(str(images), reference, metrics="fid,kid", device="cpu") == found
    seen.clear()
    score_images(images, str(reference), metrics="kid", inception_weights="given.pt", device="cpu")
    assert [str(weights) for weights, *_ in seen if weights] == ["given.pt"]
    with pytest.raises(ValueError, match="unknown metric 'fed': choose among fid"):
        score_images(images, reference, metrics=["fed"], device="cpu")
    assert score_images(images, reference, metrics="kid", device="cpu")["kid"] == found["kid"]


def test_statistics_are_those_of_the_images_and_name_their_origin(images, reference, tmp_path, command, monkeypatch):
    monkeypatch.setattr(download, "InceptionExtractor", Moments)
    stats = tmp_path / "new" / "stats.npz"
    code, out, _ = command("eval", "make-stats", "--device", "cpu", reference, "--out", stats)
    assert code == 0 and out == f"{stats}\n"
    theirs = features(Moments(None), THEIRS)
    # As `np.load` of pytorch-fid and clean-fid reads it.
    with np.load(stats) as arrays:
        np.testing.assert_allclose(arrays["mu"], theirs.mean(0), rtol=1e-6)
        np.testing.assert_allclose(arrays["sigma"], np.cov(theirs, rowvar=False), rtol=1e-4)
        assert (str(arrays["network"]), str(arrays["resize"]), int(arrays["count"])) == ("moments", "clean", 40)
    by_pictures, by_stats = (score(Job(images, path), ["fid"]) for path in (reference, stats))
    for name in ("fid", "fid-infinity"):
        assert by_stats[name]["value"] == pytest.approx(by_pictures[name]["value"], rel=1e-6)
    assert by_stats["fid"]["reference"].endswith(": statistics of 40 pictures")
    code, _, err = command("eval", "make-stats", "--device", "cpu", reference, "--out", stats)
    assert code == 2 and "stats.npz exists: name another file" in err
    # The network that is published, if no other is named.
    monkeypatch.setattr(download, "fetch_file", lambda file: tmp_path / file.name)
    seen = []
    monkeypatch.setattr(download, "InceptionExtractor", lambda path, *rest: seen.append(path) or Moments(path, *rest))
    words = ["eval", "make-stats", "--device", "cpu", reference, "--download", "--out", tmp_path / "again.npz"]
    assert command(*words)[0] == 0 and seen == [tmp_path / "inception-2015-12-05.pt"]


def test_statistics_of_other_weights_or_resizing_are_refused(images, reference, tmp_path):
    make_statistics(reference, Moments(None, "clean"), tmp_path / "clean.npz")
    with pytest.raises(ValueError, match="clean.npz .* resize clean, .* tf1: use"):
        score(Job(images, tmp_path / "clean.npz", resize="tf1"), ["fid"])
    other = Moments(None)
    other.space = Space("moments", "f" * 64, "clean")
    make_statistics(reference, other, tmp_path / "weights.npz")
    with pytest.raises(ValueError, match="weights ffffffff, .* weights 00000000"):
        score(Job(images, tmp_path / "weights.npz"), ["fid"])
    # Names that another program uses for something else do not name an origin.
    with np.load(tmp_path / "weights.npz") as arrays:
        np.savez(tmp_path / "foreign.npz", **{**arrays, "weights": np.ones(3)})
    assert "that the file does not name" in score(Job(images, tmp_path / "foreign.npz"), ["fid"])["fid"]["reference"]
    with pytest.raises(ValueError, match="statistics need at least 2 images, and there are 1"):
        make_statistics(save(tmp_path / "one", OURS[:1]), Moments(None), tmp_path / "one.npz")
    assert not (tmp_path / "one.npz").exists()


def test_errors_of_a_run_of_prompts_are_over_its_prompts(tmp_path, reference, write_run):
    found = []
    for name, count in (("many", 1), ("few", 6)):
        rows = prompt_rows([{"prompt": f"a {i}"} for i in range(30 // count)], 0, count)
        write_run(tmp_path / name, rows, OURS)
        found.append(score(Job(tmp_path / name, reference, resize="tf1"), ["isc", "sfid", "cmmd", "fd-dinov2"]))
    for name in ("isc", "sfid", "cmmd", "fd-dinov2"):
        many, few = (one[name] for one in found)
        assert many["prompts"] == 30 and few["prompts"] == 5
        assert many["value"] == pytest.approx(few["value"], rel=1e-9)
        assert many["standard_error"] != few["standard_error"]


def test_a_dry_run_says_how_long_networks_take_and_writes_nothing(images, reference, tmp_path, monkeypatch, command):
    np.save(tmp_path / "images.npy", OURS)
    before = files(tmp_path)
    clock = iter([0.0])
    monkeypatch.setattr(scores, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    for source in (images, tmp_path / "images.npy"):
        words = ["eval", "score", source, "--ref", reference, "--metrics", "fid,kid,fd-dinov2", "--device", "cpu"]
        clock = iter([0.0, 8.0, 8.0, 12.0])
        code, said, _ = command(*words, "--dry-run")
        assert code == 0 and "moments: 4 s for each of 30 images, and of 40 of the reference" in said
        assert "corners: 2 s for each of 30 images, and of 40" in said and "time: about 7 minutes" in said
    # The Inception score needs no reference.
    clock = iter([0.0, 2.0])
    words[words.index("fid,kid,fd-dinov2")] = "isc"
    said = command(*words, "--resize", "tf1", "--dry-run")[1]
    assert "1 s for each of 30 images, and of 0" in said and "about 30 seconds" in said
    assert files(tmp_path) == before


def test_a_dry_run_downloads_nothing(images, refused):
    said = refused("eval", "score", images, "--metrics", "isc", "--dry-run", "--download")
    assert "--dry-run downloads nothing" in said


def test_raw_files_are_read_as_they_are_stored(reference, tmp_path, command, refused):
    turned, clear, exif = Image.fromarray(OURS[0]), Image.fromarray(OURS[1]).convert("RGBA"), Image.Exif()
    exif[ExifTags.Base.Orientation] = 3
    clear.putalpha(0)
    photos = tmp_path / "photos"
    photos.mkdir()
    turned.save(photos / "0.png", exif=exif)
    clear.save(photos / "1.png")
    jobs = [Job(photos, reference, raw=raw) for raw in (True, False)]
    raw, shown = (job.extract(job.clip_extractor) for job in jobs)
    assert (raw == features(Corners(), OURS[:2]).astype(np.float32)).all()
    white = np.full_like(OURS[1], 255)
    assert (shown == features(Corners(), [OURS[0][::-1, ::-1], white]).astype(np.float32)).all()
    assert [job.clip_extractor.space.resize for job in jobs] == ["none, raw files", "none"]
    # Statistics say how their files were read.
    words = ["--read", "raw", "--device", "cpu"]
    make_statistics(reference, Moments(None), tmp_path / "raw.npz", raw=True)
    scored = ["eval", "score", reference, "--ref", tmp_path / "raw.npz", "--metrics", "fid"]
    assert command(*scored, *words)[0] == 0
    assert "clean, raw files" in refused(*scored, "--device", "cpu")
