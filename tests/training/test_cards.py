"""The cards of what was trained, and the Hub that gets it."""

import sys

import pytest
from huggingface_hub import ModelCard
from huggingface_hub.errors import OfflineModeIsEnabled
from pipelines.llamagen import tiny as tiny_llamagen

from arimage.cli import main as cli
from arimage.published.registry import PUBLISHED
from arimage.training.adapters.lora import add_adapter, save_adapter
from arimage.training.cards import data_name, from_base
from arimage.training.saving import save_float16


def test_an_adapter_has_a_card(tmp_path):
    pytest.importorskip("peft", reason="the extra `lora` is not installed")
    pipe = tiny_llamagen.text_pipeline()
    add_adapter(pipe.transformer, 2, 2.0, "attention")
    folder, published = tmp_path / "blobs", PUBLISHED[0]
    save_adapter(pipe, folder, base=published.name, captions=['a blue: "blob"', "another"])
    card = ModelCard.load(folder / "README.md")
    assert card.data.base_model == published.repository
    assert card.data.license and "lora" in card.data.tags and card.data.instance_prompt == 'a blue: "blob"'
    assert "load_lora_weights" in card.text and "blobs" in card.text
    (folder / "README.md").write_text("mine")
    save_adapter(pipe, folder, base=published.name, captions=[])
    assert (folder / "README.md").read_text() == "mine"


def test_a_trained_model_names_what_it_began_with_and_its_data(tmp_path):
    base = tmp_path / "base"
    tiny_llamagen.class_pipeline().save_pretrained(base)
    card = ModelCard.load(base / "README.md")
    card.data.license = "apache-2.0"
    card.save(base / "README.md")
    save_float16(tiny_llamagen.class_pipeline(), tmp_path / "model", **from_base(str(base)), datasets=["photos"])
    data = ModelCard.load(tmp_path / "model" / "README.md").data
    assert (data.base_model, data.license, data.datasets) == ("base", "apache-2.0", ["photos"])
    assert data.pipeline_tag and data.to_dict()["library_name"] == "arimage"
    assert from_base("nowhere/model") == {"base_model": "nowhere/model"}
    (tmp_path / "photos").mkdir()
    assert data_name("owner/name") == "owner/name" and data_name(str(tmp_path / "photos")) == "photos"


@pytest.mark.parametrize("command", [["model", "--tokens", "t", "--recipe", "r"], ["lora", "--data", "d"]])
def test_a_name_that_no_repository_can_have_is_refused_first(tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["arimage", "train", *command, "--out", "run", "--push-to-hub", "a b/c"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2 and "--push-to-hub is 'a b/c'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_hub_that_refuses_ends_a_training_before_it_begins(tmp_path, monkeypatch, capsys):
    pytest.importorskip("peft", reason="the extra `lora` is not installed")
    from PIL import Image

    def offline(*_, **__):
        raise OfflineModeIsEnabled("offline")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", offline)
    tiny_llamagen.text_pipeline().save_pretrained("model")
    (tmp_path / "data").mkdir()
    for number in range(2):
        Image.new("RGB", (8, 8), (90 * number, 0, 0)).save(tmp_path / "data" / f"{number}.png")
    words = ["lora", "--model", "model", "--data", "data", "--caption", "cat", "--out", "run", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["arimage", "train", *words, "--dtype", "float32", "--push-to-hub", "me/adapter"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2 and "--push-to-hub is me/adapter, and HF_HUB_OFFLINE" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
