"""The metrics of a run end to end, what is written, and what is refused."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from arimage.eval import score as scoring
from arimage.eval.features import Space
from arimage.eval.manifest import class_rows, prompt_rows, write_rows
from arimage.eval.score import Job, check_comparable, read_metrics, score


class Means:
    """Mean and spread of each channel: features [B, 6]."""

    space = Space("means", "none", "none")
    weights = "published"

    def __init__(self, weights, resize, device):
        pass

    def __call__(self, images):
        pixels = torch.stack([torch.from_numpy(np.array(image)) for image in images]).flatten(1, 2) / 255
        return torch.cat([pixels.mean(1), pixels.std(1)], 1)


def pictures(count, seed, shift=0):
    noise = np.random.default_rng(seed).integers(0, 200, (count, 8, 8, 3)) + shift
    return noise.astype(np.uint8)


def save(folder, arrays):
    folder.mkdir(parents=True)
    for i, array in enumerate(arrays):
        Image.fromarray(array).save(folder / f"{i:06d}.png")


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(scoring, "InceptionExtractor", Means)
    folder = tmp_path / "run"
    save(folder / "images", pictures(30, 0, 20))
    write_rows(class_rows(30, 0, 1), folder / "manifest.jsonl")
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
    assert first["kid"]["count"] == 30 and first["kid"]["reference"].endswith(": 40 pictures")
    assert first["kid"]["space"] == {"name": "means", "sha256": "none", "resize": "none"}
    score(job, ["fid", "prdc"])
    names = ["kid", "fid", "fid-infinity", "precision", "recall", "density", "coverage"]
    assert list(read_metrics(run)) == names and read_metrics(run)["kid"] == first["kid"]
    assert not list(run.glob(".*"))
