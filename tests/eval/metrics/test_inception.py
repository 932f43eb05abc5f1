"""The features of the Inception network, against the libraries that define them."""

import hashlib
import os

import cleanfid.features
import cleanfid.fid
import numpy as np
import pytest
import tiny
import torch
from PIL import Image
from torch_fidelity import feature_extractor_inceptionv3
from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
from torch_fidelity.interpolate_compat_tensorflow import interpolate_bilinear_2d_like_tensorflow1x

from arimage.eval.metrics.features import Space, extract, image_paths
from arimage.eval.metrics.inception import InceptionExtractor, SpatialInceptionExtractor


# torch.jit.load, of which clean-fid's file has need.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning", "ignore:.torch.jit:DeprecationWarning")


def save_torchscript(layers, folder):
    """What clean-fid calls of the file that it downloads: a module `layers`."""
    module = torch.nn.Module()
    module.layers = torch.jit.trace(layers, torch.zeros(1, 3, 299, 299))
    torch.jit.script(module).save(folder / "inception-2015-12-05.pt")
    return folder / "inception-2015-12-05.pt"


@pytest.fixture(scope="module")
def torchscript(tmp_path_factory):
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3, 8, 9, stride=8), torch.nn.ReLU(), torch.nn.Conv2d(8, 2048, 5, stride=8)]
    network = torch.nn.Sequential(*layers, torch.nn.AdaptiveAvgPool2d(1))
    return save_torchscript(network, tmp_path_factory.mktemp("clean"))


@pytest.fixture(scope="module")
def inception():
    """The whole network with random weights."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feature_extractor_inceptionv3, "load_state_dict_from_url", lambda *args, **kwargs: None)
        patch.setattr(FeatureExtractorInceptionV3, "load_state_dict", lambda *args: None)
        return tiny.randomise(FeatureExtractorInceptionV3("inception-v3-compat", ["2048"]), 0)


@pytest.fixture(scope="module")
def tf1_weights(inception, tmp_path_factory):
    path = tmp_path_factory.mktemp("tf1") / "inception.pth"
    torch.save(inception.state_dict(), path)
    return path


def check_clean_features(torchscript, pictures):
    ours = extract(image_paths(pictures), InceptionExtractor(torchscript), batch_size=3)
    network = cleanfid.features.InceptionV3W(str(torchscript.parent), download=False)
    theirs = cleanfid.fid.get_folder_features(
        str(pictures), network, num_workers=0, device=torch.device("cpu"), verbose=False
    )
    assert ours.shape == (8, 2048) and theirs.std(0).mean() > 1e-3
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5 * theirs.std())


def test_clean_features_are_those_of_clean_fid(torchscript, pictures):
    check_clean_features(torchscript, pictures)


def test_tf1_features_are_those_of_the_network(inception, tf1_weights):
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (10, 12, 3), dtype=np.uint8))
    extractor = InceptionExtractor(tf1_weights, "tf1")
    (theirs,) = inception(torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None])
    assert theirs.std() > 1e-3
    torch.testing.assert_close(extractor([picture]), theirs)
    with pytest.raises(ValueError, match="images of one size"):
        extractor([picture, Image.new("RGB", (8, 9))])


def picture_and_tensor():
    pixels = np.random.default_rng(0).integers(0, 256, (10, 12, 3), dtype=np.uint8)
    return Image.fromarray(pixels), torch.from_numpy(pixels).permute(2, 0, 1)[None]


def test_logits_are_those_of_torch_fidelity(inception, tf1_weights, monkeypatch):
    picture, tensor = picture_and_tensor()
    extractor = InceptionExtractor(tf1_weights, "tf1")
    monkeypatch.setattr(inception, "features_list", ["logits_unbiased"])
    (theirs,) = inception(tensor)
    assert theirs.shape == (1, 1008) and theirs.std() > 1e-3
    np.testing.assert_allclose(extractor.logits(extractor([picture]).numpy()), theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_spatial_features_are_those_of_the_evaluator_of_adm(inception, tf1_weights):
    picture, tensor = picture_and_tensor()
    extractor = SpatialInceptionExtractor(tf1_weights)
    # mixed_6 of the TensorFlow graph is the block Mixed_6d, and mixed_6/conv its 1x1 convolution, with its ReLU.
    x = (interpolate_bilinear_2d_like_tensorflow1x(tensor.float(), size=(299, 299), align_corners=False) - 128) / 128
    names = [name for name, _ in inception.named_children()]
    for name in names[: names.index("Mixed_6d")]:
        x = getattr(inception, name)(x)
    unit = inception.Mixed_6d.branch1x1
    theirs = torch.relu(unit.bn(unit.conv(x)))[0, :7].permute(1, 2, 0)
    assert theirs.shape == (17, 17, 7) and theirs.std() > 1e-3
    torch.testing.assert_close(extractor([picture]), theirs.reshape(1, 2023))
    assert extractor.space.name == "inception-v3-spatial-2023" and extractor.space.resize == "tf1"


def test_weights_that_nobody_published_are_marked(torchscript):
    extractor = InceptionExtractor(torchscript)
    digest = hashlib.sha256(torchscript.read_bytes()).hexdigest()
    assert extractor.space == Space("inception-v3-2048", digest, "clean")
    assert extractor.weights == f"unknown (sha256 {digest}), not comparable with published figures"


@pytest.mark.parametrize(
    ("resize", "name", "sentence"),
    [
        (
            "clean",
            None,
            "needs inception-2015-12-05.pt: .*--download.* get https://nvlabs.*--inception-weights or",
        ),
        ("tf1", None, "needs weights-inception-2015-12-05-6726825d.pth: .*get https://github.com/toshas"),
        ("clean", "inception-2015-12-05.pt", "--inception-weights is .*inception-2015-12-05.pt"),
        ("clean", "other.pt", "is not named inception-2015-12-05.pt: rename it"),
    ],
)
def test_missing_weights_are_named_in_one_sentence(resize, name, sentence, tmp_path):
    if name == "other.pt":
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=sentence):
        InceptionExtractor(name and tmp_path / name, resize)


def test_weights_that_are_more_than_tensors_are_refused(tmp_path):
    torch.save({"weight": os.system}, tmp_path / "x.pth")
    with pytest.raises(ValueError, match="x.pth asks to run .*system"):
        InceptionExtractor(tmp_path / "x.pth", "tf1")


def test_files_of_other_networks_are_refused(tf1_weights, tmp_path):
    other = tmp_path / "inception-2015-12-05.pt"
    torch.jit.script(torch.nn.Linear(2, 2)).save(other)
    # Of another network, and cut short.
    for size in (10**9, 1000):
        other.write_bytes(other.read_bytes()[:size])
        with pytest.raises(ValueError, match="cannot be loaded .*: download https"):
            InceptionExtractor(other)
    state = torch.load(tf1_weights, weights_only=True)
    torch.save(state | {"Conv2d_1a_3x3.conv.weight": torch.zeros(32, 3, 5, 5)}, tmp_path / "x.pth")
    with pytest.raises(ValueError, match="x.pth cannot be loaded .*: download https") as caught:
        InceptionExtractor(tmp_path / "x.pth", "tf1")
    assert "\n" not in str(caught.value)
