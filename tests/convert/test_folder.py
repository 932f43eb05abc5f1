"""Damaged folders are refused in one sentence, and nothing in them is executed."""

import json
import os
import shutil

import pytest
import tiny
import torch
from pipelines.janus import tiny as tiny_janus
from pipelines.llamagen import tiny as tiny_llamagen
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import T5EncoderModel

from arimage import AutoPipeline
from arimage.convert import CheckpointError, convert_janus
from arimage.convert.checkpoint import save_whole
from arimage.convert.folder import load_model, load_original_folder, read_json


class Trap:
    """Leaves a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.fixture
def encoder(tmp_path):
    """A folder with a T5 encoder."""
    tiny_llamagen.text_pipeline().text_encoder.save_pretrained(tmp_path / "encoder")
    return tmp_path / "encoder"


def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path):
    def save(folder):
        (folder / "half").write_text("written")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    with pytest.raises(OSError, match="made cannot be written .*No space left"):
        save_whole(save, tmp_path / "made")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("contents", ["[]", "5", "{", "[" * 100_000])
def test_json_that_holds_no_object_is_refused(tmp_path, contents):
    (tmp_path / "config.json").write_text(contents)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_json(tmp_path / "config.json")


@pytest.mark.parametrize("contents", [b"", b"noise" * 99, None])
def test_damaged_weights_of_transformers_are_refused(encoder, contents):
    path = encoder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-64] if contents is None else contents)
    with pytest.raises(CheckpointError, match="encoder cannot be loaded") as refusal:
        load_model(T5EncoderModel, encoder)
    assert "\n" not in str(refusal.value)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match=r"config\.json is not a file"):
        read_json(tmp_path / "config.json")


@pytest.mark.parametrize("change", ["missing", "unexpected", "mismatched"])
def test_other_weights_of_transformers_are_refused(encoder, change):
    state = load_file(encoder / "model.safetensors")
    key = "encoder.final_layer_norm.weight"
    weight = state.pop(key)
    if change != "missing":
        state[key if change == "mismatched" else "other"] = torch.cat([weight, weight])
    if change == "unexpected":
        state[key] = weight
    save_file(state, encoder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{change} keys"):
        load_model(T5EncoderModel, encoder)


def test_pickles_are_refused_and_not_executed(encoder, tmp_path):
    (encoder / "model.safetensors").unlink()
    torch.save({"encoder.final_layer_norm.weight": Trap(tmp_path / "trapped")}, encoder / "pytorch_model.bin")
    with pytest.raises(CheckpointError):
        load_model(T5EncoderModel, encoder)
    with pytest.raises(CheckpointError, match="asks to run"):
        load_original_folder(encoder)
    assert not (tmp_path / "trapped").exists()


@pytest.mark.parametrize(
    "index", [{}, {"weight_map": []}, {"weight_map": {"a": 5}}, {"weight_map": {"a": "../b.bin"}}]
)
def test_a_damaged_index_is_refused(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError):
        load_original_folder(tmp_path)


@pytest.mark.parametrize(
    "file, contents",
    [("config.json", '{"model_type": "multi_modality", "gen_head_config": {}}'), ("tokenizer.json", "{}")],
)
def test_a_janus_with_a_damaged_file_is_refused(tmp_path, file, contents):
    folder = tiny_janus.write_original(tmp_path / "published")
    (folder / file).write_text(contents)
    with pytest.raises(CheckpointError, match="published"):
        convert_janus(folder, out=tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_a_folder_named_like_a_published_or_packaged_model_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("llamagen-c2i-b-256", "emoji-llamagen"):
        tiny_llamagen.text_pipeline().save_pretrained(name)
        assert AutoPipeline.from_pretrained(name).transformer.config.vocab_size == tiny.CODES
    # A folder of something else does not.
    shutil.rmtree("emoji-llamagen")
    (tmp_path / "emoji-llamagen").mkdir()
    assert AutoPipeline.from_pretrained("emoji-llamagen").transformer.config.vocab_size == 1024
