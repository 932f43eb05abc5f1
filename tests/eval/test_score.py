"""The metrics of a run end to end, what is written, and what is refused."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from eval.score_kit import Moments, pictures, save
from PIL import Image

from arimage.eval import figures
from arimage.eval import job as jobs
from arimage.eval.job import Job, entry, write_scores
from arimage.eval.metrics.features import Space
from arimage.eval.metrics.standard_errors import Estimate
from arimage.eval.runs.export import export
from arimage.eval.runs.manifest import label_rows, prompt_rows
from arimage.eval.score import METRICS_FILE, check_comparable, figure_text, images_text, read_metrics, score


@pytest.fixture
def run(tmp_path, monkeypatch, write_run):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(jobs, "InceptionExtractor", Moments)
    folder = tmp_path / "run"
    write_run(folder, label_rows(range(30), 0, 1), pictures(30, 0, 20))
    return folder


@pytest.fixture
def reference(tmp_path):
    save(tmp_path / "reference" / "a", pictures(40, 1))
    return tmp_path / "reference"


def test_metrics_of_a_run_are_merged_into_one_file(run, reference):
    job = Job(run, reference)
    first = score(job, ["kid"])
    assert read_metrics(run) == first and list(first) == ["kid"]
    assert first["kid"]["value"] > 0 < first["kid"]["standard_error"]
    # Those that were taken: there are no 1,000 images.
    assert (first["kid"]["subsets"], first["kid"]["subset_size"]) == (100, 30)
    assert first["kid"]["count"] == 30 and first["kid"]["reference"].endswith(": 40 pictures")
    assert first["kid"]["space"] == {"name": "moments", "sha256": "0" * 64, "resize": "clean"}
    score(job, ["fid", "prdc"])
    names = ["kid", "fid", "fid-infinity", "precision", "recall", "density", "coverage"]
    assert list(read_metrics(run)) == names and read_metrics(run)["kid"] == first["kid"]
    assert not list(run.glob(".*"))


def test_reference_statistics_give_the_fid_and_nothing_else(run, reference, tmp_path):
    features = Job(run, reference).reference_features.astype(np.float64)
    np.savez(tmp_path / "stats.npz", mu=features.mean(0), sigma=np.cov(features, rowvar=False))
    by_pictures = score(Job(run, reference), ["fid"])
    by_statistics = score(Job(run, tmp_path / "stats.npz"), ["fid"])
    for name in ("fid", "fid-infinity"):
        assert by_statistics[name]["value"] == pytest.approx(by_pictures[name]["value"], rel=1e-6)
        assert by_statistics[name]["reference"].endswith("weights and resizing that the file does not name")
    for name in ("kid", "prdc"):
        with pytest.raises(ValueError, match="stats.npz holds statistics only"):
            score(Job(run, tmp_path / "stats.npz"), [name])


def test_a_reference_batch_gives_statistics_and_pictures(run, reference, tmp_path):
    batch = pictures(40, 1)
    np.savez(tmp_path / "batch.npz", arr_0=batch)
    # As the published reference batches: statistics of the whole set and some of its pictures.
    np.savez(tmp_path / "both.npz", arr_0=batch, mu=np.zeros(6), sigma=np.eye(6), mu_s=0, sigma_s=0)
    of_folder = score(Job(run, reference), ["fid", "kid", "prdc"])
    of_batch = score(Job(run, tmp_path / "batch.npz"), ["fid", "kid", "prdc"])
    of_both = score(Job(run, tmp_path / "both.npz"), ["fid", "kid", "prdc"])
    for name, figure in of_folder.items():
        assert of_batch[name]["value"] == pytest.approx(figure["value"], rel=1e-5)
        assert (of_both[name]["value"] == of_batch[name]["value"]) == (not name.startswith("fid"))


def test_the_fid_of_a_category_is_that_of_its_images_and_pictures(run, tmp_path, write_run):
    categories = ["animals"] * 12 + ["art"] * 18
    rows = prompt_rows([{"prompt": "a", "category": category} for category in categories], 0)
    images = pictures(30, 0, 20)
    write_run(run, rows, images)
    save(tmp_path / "ref" / "animals", pictures(20, 1))
    save(tmp_path / "ref" / "art", pictures(25, 2, 40))
    save(tmp_path / "ref" / "logo", pictures(5, 3))
    entries = score(Job(run, tmp_path / "ref"), ["fid-categories"])
    assert list(entries) == ["fid-animals", "fid-art"]
    for category, chosen in (("animals", slice(12)), ("art", slice(12, None))):
        part = tmp_path / category
        write_run(part, label_rows(range(len(images[chosen])), 0, 1), images[chosen])
        alone = score(Job(part, tmp_path / "ref" / category), ["fid"])["fid"]
        entry = entries[f"fid-{category}"]
        assert entry["value"] == pytest.approx(alone["value"], rel=1e-9) and entry["count"] == alone["count"]
        assert f"{len(list((tmp_path / 'ref' / category).iterdir()))} pictures in {category}" in entry["reference"]


def test_categories_that_cannot_be_scored_are_refused(run, reference, tmp_path, write_run):
    with pytest.raises(ValueError, match="image 0 of .* has no category"):
        score(Job(run, reference), ["fid-categories"])
    rows = prompt_rows([{"prompt": "a", "category": "logo"}] * 30, 0)
    write_run(run, rows, pictures(30, 0, 20))
    with pytest.raises(ValueError, match="category 'logo' has 30 images and 0 in"):
        score(Job(run, reference), ["fid-categories"])
    np.savez(tmp_path / "batch.npz", arr_0=pictures(40, 1))
    with pytest.raises(ValueError, match="a folder per category"):
        score(Job(run, tmp_path / "batch.npz"), ["fid-categories"])


def test_images_are_scored_at_another_size_as_they_are_exported_at_it(run, reference, tmp_path):
    export(run, "adm-npz", tmp_path / "small.npz", size=5)
    small = np.load(tmp_path / "small.npz")["arr_0"]
    found = score(Job(run, reference, size=5), ["fid", "kid"])
    assert found["fid"]["size"] == found["kid"]["size"] == "5, bicubic without antialiasing"
    features = Moments(None)([Image.fromarray(image) for image in small]).numpy()
    ours = Job(run, reference, size=5).features
    assert sorted(map(tuple, ours.round(5))) == sorted(map(tuple, features.round(5)))
    plain = score(Job(run, reference), ["fid"])["fid"]
    assert "size" not in plain and plain["value"] != found["fid"]["value"]
    with pytest.raises(ValueError, match="their size is None and 5, bicubic"):
        check_comparable({"a": {"fid": plain}, "b": {"fid": found["fid"]}})


class Clip:
    """Features of a picture and of the words of a text, whose cosine is known."""

    space = Space("clip", "0", "none")

    def __init__(self, folder, device):
        pass

    def __call__(self, images):
        return torch.tensor([[3.0, 4.0]] * len(images))

    def of_texts(self, texts):
        assert all(text.startswith("A photo depicts a") for text in texts)
        return torch.tensor([[0.0, 7.0] if "book" in text else [1.0, 0.0] for text in texts])


def test_clip_scores_are_kept_by_image(run, monkeypatch, write_run):
    monkeypatch.setattr(jobs, "ClipExtractor", Clip)
    with pytest.raises(ValueError, match="clip"):
        score(Job(run, clip=run), ["clip"])
    prompts = [{"prompt": "a book"}] * 10 + [{"prompt": "a cat"}] * 20
    write_run(run, prompt_rows(prompts, 0), pictures(30, 0, 20))
    entry = score(Job(run, clip=run, batch_size=7), ["clip"])["clip"]
    assert entry["value"] == pytest.approx((10 * 0.8 + 20 * 0.6) / 30)
    assert entry["interval"][0] < entry["value"] < entry["interval"][1]
    assert (entry["prefix"], entry["scale"], entry["count"]) == ("A photo depicts ", 1, 30)
    kept = json.loads((run / "scores" / "clip.json").read_text())
    assert kept["ids"] == list(range(30)) and kept["values"] == pytest.approx([0.8] * 10 + [0.6] * 20)


@pytest.mark.parametrize(
    ("reference", "metrics", "sentence"),
    [
        (None, ["fid"], "--ref is missing"),
        ("nowhere", ["kid"], "--ref is nowhere"),
        ("x.npz", ["kid"], r"holds \['a'\]: give a .npz with mu and sigma, or with images as arr_0"),
        ("nowhere", ["kid", "is"], "metric 'is': choose among fid, fid-categories, kid, prdc, isc, sfid"),
    ],
)
def test_what_cannot_be_scored_is_refused(run, reference, metrics, sentence, tmp_path):
    np.savez(tmp_path / "x.npz", a=1)
    path = tmp_path / reference if reference == "x.npz" else reference and Path(reference)
    with pytest.raises(ValueError, match=sentence):
        score(Job(run, path), metrics)
    assert read_metrics(run) == {}


def test_a_reference_is_refused_before_anything_is_computed(run, tmp_path, monkeypatch):
    monkeypatch.setattr(Moments, "__call__", None)
    (tmp_path / "x.npz").write_text("<html>")
    np.savez(tmp_path / "nan.npz", mu=np.full(6, np.nan), sigma=np.eye(6))
    for name, sentence in (("x.npz", "x.npz is damaged"), ("nan.npz", "nan.npz has values that are not fin")):
        for metric in ("fid", "kid"):
            with pytest.raises(ValueError, match=sentence):
                score(Job(run, tmp_path / name), [metric])
    (run / "images" / "000003.png").unlink()
    np.savez(tmp_path / "right.npz", arr_0=pictures(40, 1))
    for metric in ("fid", "kid"):
        with pytest.raises(ValueError, match="000003.png is missing"):
            score(Job(run, tmp_path / "right.npz"), [metric])


@pytest.mark.parametrize("metric", ["fid", "fid-categories"])
def test_a_distance_of_few_images_is_a_warning(run, tmp_path, monkeypatch, caplog, write_run, metric):
    write_run(run, prompt_rows([{"prompt": "a", "category": "art"}] * 30, 0), pictures(30, 0, 20))
    save(tmp_path / "ref" / "art", pictures(40, 1))
    job = Job(run, tmp_path / "ref")
    score(job, [metric])
    assert f"{metric} from 30 images or references" in caplog.text and "at least 2,048" in caplog.text
    caplog.clear()
    for enough in (30, 31):
        monkeypatch.setattr(figures, "FEWEST_IMAGES", enough)
        score(job, [metric, "kid", "prdc"])
        assert bool(caplog.text) == (enough == 31)
    caplog.clear()
    np.savez(tmp_path / "s.npz", mu=np.zeros(6), sigma=np.eye(6))
    score(Job(run, tmp_path / "s.npz"), ["fid"])
    assert "fid from 30 images" in caplog.text


def test_figures_that_are_not_finite_are_neither_written_nor_read(run, reference, monkeypatch):
    monkeypatch.setattr(figures, "kernel_distance", lambda *_, **__: Estimate(0.5, float("nan")))
    with pytest.raises(ValueError, match="kid of .* is 0.5 ± nan, which is not finite"):
        score(Job(run, reference), ["kid"])
    assert read_metrics(run) == {}
    with pytest.raises(ValueError, match="not finite"):
        write_scores(run, "x", np.array([1, np.inf]))
    assert not list((run / "scores").iterdir())
    entry = {"value": 1.0, "standard_error": None, "count": 1, "reference": "", "space": None}
    for change in ({"value": np.nan}, {"standard_error": np.inf}, {"interval": [0, np.nan]}, {"interval": [1]}):
        (run / "metrics.json").write_text(json.dumps({"kid": entry | change}))
        with pytest.raises(ValueError, match="kid in .*metrics.json .*delete it and repeat"):
            score(Job(run, reference), ["kid"])


ENTRY = {"value": 1.0, "count": 10, "reference": "r", "space": {"name": "n", "sha256": "0", "resize": "clean"}}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"count": 11}, "kid of a and of b cannot be compared, their count is 10 and 11: score both runs alike"),
        ({"reference": "q"}, "their reference is r and q"),
        ({"space": ENTRY["space"] | {"resize": "tf1"}}, "their space is .*clean.*tf1"),
        ({"space": ENTRY["space"] | {"sha256": "1"}}, "their space is"),
        ({"k": 3}, "their k is None and 3"),
    ],
)
def test_what_was_scored_differently_is_not_compared(change, sentence):
    check_comparable({"a": {"kid": ENTRY}, "b": {"kid": ENTRY | {"value": 2.0}, "fid": ENTRY | change}, "c": {}})
    with pytest.raises(ValueError, match=sentence):
        check_comparable({"a": {"kid": ENTRY}, "b": {"kid": ENTRY | change}})


def test_the_command_writes_and_prints_the_figures(run, reference, monkeypatch, command, refused):
    words, ref = ["eval", "score", run, "--metrics", "kid"], ["--ref", reference, "--device", "cpu"]
    # A cache that cannot be written costs nothing but time.
    monkeypatch.setenv("XDG_CACHE_HOME", str(run / "config.json"))
    code, out, _ = command(*words, *ref)
    kid = read_metrics(run)["kid"]
    assert code == 0 and out.startswith(f"kid: {figure_text(kid)} (30 images, reference,")
    assert command(*words, *ref, "--size", "5")[0] == 0 and read_metrics(run)["kid"]["size"].startswith("5, ")
    assert "--ref is missing" in refused(*words)
    assert "--size is for fid" in refused(*words, "--metrics", "retrieval", "--size", "5")


def test_two_commands_may_score_a_run_at_the_same_time(run, monkeypatch):
    barrier = threading.Barrier(2)

    def figure(name):
        def compute(job):
            barrier.wait()
            return {name: entry(Estimate(1.0), 1, "none", None)}

        return compute

    for name in ("one", "two"):
        monkeypatch.setitem(figures.METRICS, name, figure(name))
    (run / METRICS_FILE).unlink(missing_ok=True)
    for _ in range(5):
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda name: score(Job(run), [name]), ("one", "two")))
        assert set(read_metrics(run)) == {"one", "two"}
        (run / METRICS_FILE).unlink()


def test_figures_say_how_many_prompts_they_are_of(tmp_path, write_run):
    images = np.random.default_rng(0).integers(0, 255, (6, 8, 8, 3), np.uint8)
    asked = [{"prompt": f"a tree {i}", "name": "deciduous tree"} for i in range(2)]
    write_run(tmp_path / "two", prompt_rows(asked, 0, 3), images)
    write_run(tmp_path / "one", prompt_rows(asked[:1], 0, 6), images)
    two, one = (score(Job(tmp_path / name), ["retrieval", "emoji-kid"]) for name in ("two", "one"))
    assert images_text(two["retrieval"]) == "6 images of 2 prompts" and two["retrieval"]["interval"][1] > 0.3
    assert images_text(one["retrieval"]) == "6 images of one prompt: no error"
    for found in one.values():
        assert found["standard_error"] is None and "interval" not in found and "±" not in figure_text(found)
