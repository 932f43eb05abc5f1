"""The features of DINOv2, against the model itself with positions as its authors resize them."""

import numpy as np
import pytest
import tiny
import torch
from huggingface_hub import constants
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import Dinov2Config, Dinov2Model

from arimage.eval.metrics import dinov2
from arimage.eval.metrics.dinov2 import Dinov2Extractor
from arimage.eval.metrics.features import extract, image_paths


SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 14}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A DINOv2 of random weights for images of 6x6 patches."""
    path = tmp_path_factory.mktemp("dinov2")
    tiny.randomise(Dinov2Model(Dinov2Config(**SIZES, image_size=84)), 0).save_pretrained(path)
    return path


def pixels_of(path):
    image = Image.open(path).convert("RGB").resize((224, 224), Image.Resampling.BICUBIC)
    pixels = np.asarray(image, dtype=np.float64) / 255
    pixels = (pixels - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    return torch.from_numpy(pixels).permute(2, 0, 1).float()


def test_features_are_those_of_the_authors_code(folder, pictures):
    paths = [path for path in image_paths(pictures) if Image.open(path).mode in ("RGB", "L")]
    ours = extract(paths, Dinov2Extractor(folder), batch_size=3)
    model = Dinov2Model.from_pretrained(folder).eval()
    batch = torch.stack([pixels_of(path) for path in paths])
    with torch.no_grad():
        of_transformers = model(batch).pooler_output
        positions = model.embeddings.position_embeddings
        grid = positions[:, 1:].reshape(1, 6, 6, 16).permute(0, 3, 1, 2)
        # dinov2/models/vision_transformer.py, interpolate_pos_encoding, with its offset of 0.1.
        grid = torch.nn.functional.interpolate(grid, scale_factor=(16.1 / 6, 16.1 / 6), mode="bicubic")
        theirs = Dinov2Model(Dinov2Config(**SIZES, image_size=224)).eval()
        state = model.state_dict()
        state["embeddings.position_embeddings"] = torch.cat(
            [positions[:, :1], grid.permute(0, 2, 3, 1).reshape(1, 256, 16)], dim=1
        )
        theirs.load_state_dict(state)
        expected = theirs(batch).last_hidden_state[:, 0]
    assert expected.std(0).mean() > 1e-2 and (expected - of_transformers).abs().max() > 1e-4
    torch.testing.assert_close(torch.from_numpy(ours), expected, rtol=1e-4, atol=1e-5)


def test_another_network_than_that_of_the_paper_is_marked(folder):
    extractor = Dinov2Extractor(folder)
    assert extractor.weights == ("of another network than ViT-L/14 of DINOv2, not comparable with published figures")
    assert extractor.space.name == "dinov2" and extractor.space.resize == "224x224 bicubic"


def test_a_hub_id_is_downloaded_and_a_folder_is_not(folder, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(dinov2, "download", lambda files, revision: asked.append(files.repository) or folder)
    assert Dinov2Extractor("someone/dinov2").space == Dinov2Extractor(str(folder)).space
    for path in (tmp_path / "nowhere", "./nowhere", "../models/dinov2", None):
        with pytest.raises(ValueError, match="--dinov2 is .*hf download"):
            Dinov2Extractor(path)
    assert asked == ["someone/dinov2"]


@pytest.mark.parametrize("kind", ["cut", "shape", "missing", "config", "settings"])
def test_damaged_files_of_dinov2_are_refused_in_one_sentence(folder, kind, tmp_path):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    if kind == "cut":
        weights.write_bytes(weights.read_bytes()[:5000])
    elif kind in ("shape", "missing"):
        state = load_file(weights)
        weight = state.pop("layernorm.weight")
        save_file(
            state if kind == "missing" else state | {"layernorm.weight": weight[:-1].clone()},
            weights,
            metadata={"format": "pt"},
        )
    else:
        config.write_text(
            "{" if kind == "config" else config.read_text().replace('"num_channels": 3', '"num_channels": 4')
        )
    with pytest.raises(ValueError, match="hf download facebook|get the file again") as caught:
        Dinov2Extractor(tmp_path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_hub_id_that_cannot_be_downloaded_is_refused_in_one_sentence(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConnectionError, match="someone/dinov2 .* the Hugging Face Hub"):
        Dinov2Extractor("someone/dinov2")
