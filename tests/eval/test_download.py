"""`--download`, from a server on this machine."""

import hashlib
import threading
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from eval.score_kit import Moments, pictures, save
from stand_in_hub import StandInHub

from arimage.eval import download, score_images
from arimage.eval import job as jobs
from arimage.eval.download import fetch_file, fetch_repository, with_networks
from arimage.eval.job import Job
from arimage.eval.metrics.i3d import I3D_WEIGHTS
from arimage.eval.metrics.inception import INCEPTION_WEIGHTS


CONTENT = bytes(range(256)) * 300


@pytest.fixture
def served(tmp_path, monkeypatch):
    """A folder that a server of this machine gives away, its address, and what was asked for."""
    (tmp_path / "served").mkdir()
    asked = []

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            asked.append(self.path)

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=tmp_path / "served"))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield tmp_path / "served", f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def weights(served):
    """A file of weights on the server."""
    folder, address, _ = served
    (folder / "network.pt").write_bytes(CONTENT)
    return replace(
        I3D_WEIGHTS, name="network.pt", url=f"{address}/network.pt", sha256=hashlib.sha256(CONTENT).hexdigest()
    )


def test_a_file_is_downloaded_once_with_a_bar_and_then_found(served, weights, capsys):
    path = fetch_file(weights)
    assert path.read_bytes() == CONTENT and "75.0k/75.0k" in capsys.readouterr().err
    assert fetch_file(weights) == path == weights.check(None, "fvd") and served[2] == ["/network.pt"]
    # A damaged one is downloaded again.
    path.write_bytes(CONTENT[:100])
    assert fetch_file(weights).read_bytes() == CONTENT and len(served[2]) == 2


def test_another_file_or_none_is_refused_and_not_kept(served, weights):
    (served[0] / "network.pt").write_bytes(CONTENT[::-1])
    with pytest.raises(ValueError, match="network.pt is not the published file"):
        fetch_file(weights)
    with pytest.raises(ConnectionError, match="absent.* cannot be downloaded .*--i3d-weights"):
        fetch_file(replace(weights, url=weights.url.replace("network", "absent")))
    assert not list(weights.kept.parent.iterdir())
    with pytest.raises(ValueError, match="eval score --download"):
        weights.check(None, "fvd")


def test_only_networks_that_metrics_need_and_no_option_names_are_fetched(tmp_path, monkeypatch):
    fetched = []
    monkeypatch.setattr(download, "fetch_file", lambda file: fetched.append(file) or tmp_path / file.name)
    monkeypatch.setattr(download, "fetch_repository", lambda name: fetched.append(name) or tmp_path / name)
    assert with_networks(Job(tmp_path, clip=tmp_path), ["clip", "nearest", "fd-wavelets"]) == Job(
        tmp_path, clip=tmp_path
    )
    assert not fetched
    found = with_networks(Job(tmp_path, resize="tf1"), ["fid", "kid", "clip-choice", "fvd", "fd-dinov2"])
    tf1 = INCEPTION_WEIGHTS["tf1"]
    assert fetched == [tf1, I3D_WEIGHTS, "openai/clip-vit-large-patch14", "facebook/dinov2-large"]
    assert found.inception_weights == tmp_path / tf1.name and found.dinov2 == tmp_path / "facebook/dinov2-large"
    assert with_networks(Job(tmp_path), ["cmmd"]).clip == tmp_path / "openai/clip-vit-large-patch14-336"


def test_a_score_of_two_folders_needs_no_more_than_the_option(served, weights, tmp_path, monkeypatch):
    taken = []
    monkeypatch.setattr(jobs, "InceptionExtractor", lambda path, *rest: taken.append(path) or Moments(path, *rest))
    monkeypatch.setitem(INCEPTION_WEIGHTS, "clean", weights)
    ours, theirs = save(tmp_path / "ours", pictures(8, 0)), save(tmp_path / "theirs", pictures(8, 1, 30))
    with pytest.raises(ValueError, match="--ref is missing"):
        score_images(ours, metrics="fid", download=True)
    assert not served[2]
    assert np.isfinite(score_images(ours, theirs, metrics="fid", download=True)["fid"]["value"])
    assert taken == [weights.kept] and served[2] == ["/network.pt"]


def test_files_of_the_hub_are_compared_with_its_hashes(tmp_path, monkeypatch):
    save(tmp_path / "model", pictures(1, 0))
    (tmp_path / "model" / "model.safetensors").write_bytes(CONTENT)
    (tmp_path / "model" / "config.json").write_text("{}")
    hub = StandInHub()
    hub.repositories["owner/model"] = tmp_path / "model"
    with hub.running(monkeypatch, tmp_path / "home"):
        folder = fetch_repository("owner/model")
        assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
        assert hub.downloaded() == ["owner/model/config.json", "owner/model/model.safetensors"]
        hub.told["model.safetensors"] = "0" * 64
        with pytest.raises(ValueError, match="model.safetensors is not the published file"):
            fetch_repository("owner/model")
