"""The networks that turn pictures into features, against the libraries they come from, and the cache."""

import hashlib
import os

import cleanfid.features
import cleanfid.fid
import numpy as np
import pytest
import tiny
import torch
import torch_fidelity
from PIL import Image
from torch_fidelity import feature_extractor_inceptionv3
from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel

from arimage.eval.metrics.clip_score import PREFIX, clip_scores
from arimage.eval.metrics.features import ClipExtractor, InceptionExtractor, Space, extract, image_paths
from arimage.eval.metrics.frechet import Gaussian, frechet_distance
from arimage.eval.runs.manifest import prompt_rows


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


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Eight pictures of three modes and sizes above and below that of the network."""
    folder = tmp_path_factory.mktemp("pictures")
    for i in range(8):
        noise = np.random.default_rng(i).integers(0, 256, (9 + i, 7, 3), dtype=np.uint8)
        image = Image.fromarray(noise).resize((40 + 50 * i, 320 - 30 * i))
        image.convert(("RGB", "L", "RGBA", "P")[i % 4]).save(folder / f"{i}.png")
    return folder


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


@pytest.mark.slow
def test_clean_features_of_the_whole_network_are_those_of_clean_fid(inception, pictures, tmp_path):
    layers = torch.nn.Sequential(*[layer for name, layer in inception.named_children() if name != "fc"])
    check_clean_features(save_torchscript(layers, tmp_path), pictures)


def test_tf1_features_are_those_of_the_network(inception, tf1_weights):
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (10, 12, 3), dtype=np.uint8))
    extractor = InceptionExtractor(tf1_weights, "tf1")
    (theirs,) = inception(torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None])
    assert theirs.std() > 1e-3
    torch.testing.assert_close(extractor([picture]), theirs)
    with pytest.raises(ValueError, match="pictures of one size"):
        extractor([picture, Image.new("RGB", (8, 9))])


@pytest.mark.slow
def test_the_tf1_distance_is_that_of_torch_fidelity(tf1_weights, tmp_path):
    features = []
    for name, seeds in (("a", (0, 1, 2)), ("b", (3, 4, 5))):
        (tmp_path / name).mkdir()
        for seed in seeds:
            noise = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(noise).resize((100, 80)).save(tmp_path / name / f"{seed}.png")
        features.append(extract(image_paths(tmp_path / name), InceptionExtractor(tf1_weights, "tf1")))
    theirs = torch_fidelity.calculate_metrics(
        input1=str(tmp_path / "a"),
        input2=str(tmp_path / "b"),
        fid=True,
        cuda=False,
        cache=False,
        verbose=False,
        feature_extractor_weights_path=str(tf1_weights),
    )["frechet_inception_distance"]
    assert theirs > 0.01
    assert frechet_distance(features[0], Gaussian.of_features(features[1])) == pytest.approx(theirs, rel=1e-4)


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
            "needs inception-2015-12-05.pt: download https://nvlabs.*--inception-weights or ARIMAGE_INCEP",
        ),
        ("tf1", None, "needs weights-inception-2015-12-05-6726825d.pth: download https://github.com/toshas"),
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
    with pytest.raises(ValueError, match=r"x.pth asks to run \S*system when it is read, so it was not"):
        InceptionExtractor(tmp_path / "x.pth", "tf1")


def test_a_file_cut_short_is_refused(torchscript, tmp_path):
    part = tmp_path / torchscript.name
    part.write_bytes(torchscript.read_bytes()[:1000])
    with pytest.raises(
        ValueError, match="inception-2015-12-05.pt is incomplete or another network: download https://nvlabs"
    ):
        InceptionExtractor(part)


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


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """A CLIP of random weights, so sharp that every prompt and picture has features of its own."""
    folder = tmp_path_factory.mktemp("clip")
    tokenizer = tiny.text_tokenizer(20)
    tokenizer.save_pretrained(folder)
    tower = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = tower | {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 12,
        "bos_token_id": 0,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = tower | {"image_size": 32, "patch_size": 8}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))
    tiny.randomise(model, 0).save_pretrained(folder)
    size = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    CLIPImageProcessor(**size).save_pretrained(folder)
    return folder


def test_clip_scores_are_the_cosines_of_the_model(clip, pictures):
    prompts = ["a red heart", "a blue book", "green tree", "cat", "book", "tree, flat style", "a", "a red heart " * 9]
    extractor = ClipExtractor(clip)
    paths = image_paths(pictures)
    ours = clip_scores(extract(paths, extractor, batch_size=3), prompts, extractor, batch_size=3)
    model = CLIPModel.from_pretrained(clip).eval()
    pixels = CLIPImageProcessor.from_pretrained(clip)(
        [Image.open(path).convert("RGB") for path in paths], return_tensors="pt"
    )
    theirs = []
    for i, prompt in enumerate(prompts):
        ids = tiny.text_tokenizer(20)(PREFIX + prompt, truncation=True, max_length=12, return_tensors="pt")
        with torch.no_grad():
            out = model(input_ids=ids.input_ids, pixel_values=pixels.pixel_values[i : i + 1])
            theirs.append(float(out.logits_per_image / model.logit_scale.exp()))
    assert np.std(theirs) > 0.05
    assert ours == pytest.approx(np.array(theirs), abs=1e-5)


def test_a_clip_that_is_not_whole_is_refused(clip, tmp_path):
    with pytest.raises(ValueError, match=r"lacks config.json, .*\*.safetensors of a CLIP model: hf download openai"):
        ClipExtractor(tmp_path)
    for path in clip.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    from safetensors.torch import load_file, save_file

    weights = load_file(tmp_path / "model.safetensors")
    weights.pop("text_projection.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="has no weights for text_projection.weight"):
        ClipExtractor(tmp_path)
