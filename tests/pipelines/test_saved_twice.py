"""A folder that is saved into again holds the second model only, as a whole or not at all; what cannot be saved is
refused."""

import json
import os
from typing import Any

import pytest
import torch
from diffusers.hooks.group_offloading import apply_group_offloading
from diffusers.hooks.layerwise_casting import apply_layerwise_casting
from families import EVERY, condition_of
from pipelines.janus import tiny as tiny_janus
from pipelines.llamagen import tiny as tiny_llamagen
from safetensors import SafetensorError

from arimage import AutoPipeline
from arimage.models import saved_files
from arimage.training.adapters.lora import add_adapter
from arimage_emoji.known import KnownCaptions


SHARDS: dict[str, Any] = {"max_shard_size": "20KB"}


def weights(pipe):
    parts = {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}
    return {(name, key): value.clone() for name, part in parts.items() for key, value in part.state_dict().items()}


def changed(part):
    with torch.no_grad():
        for weight in part.parameters():
            weight.add_(0.01)


def same(first, second):
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[key]) for key, value in first.items())


@pytest.mark.parametrize("orders", [({}, SHARDS), (SHARDS, {}), (SHARDS, {"max_shard_size": "40KB"})])
@pytest.mark.parametrize("build", [tiny_llamagen.class_pipeline, tiny_janus.pipeline], ids=["llamagen", "janus"])
@pytest.mark.parametrize("variant", [None, "fp16"])
@pytest.mark.every(3)
def test_the_weights_saved_last_are_loaded(build, orders, variant, tmp_path):
    pipe = build()
    for options in orders:
        for part in pipe.components.values():
            if isinstance(part, torch.nn.Module):
                changed(part)
        pipe.save_pretrained(tmp_path, variant=variant, **options)
    same(weights(pipe), weights(AutoPipeline.from_pretrained(tmp_path, variant=variant)))
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("orders", [({}, SHARDS), (SHARDS, {})])
@pytest.mark.parametrize(("name", "part"), [("llamagen-class", "transformer"), ("mammothmoda2", "language_model")])
def test_a_component_saved_twice_is_the_second(name, part, orders, tmp_path):
    transformer = EVERY[name]().components[part]
    (tmp_path / "notes.json").write_text("mine")
    for options in orders:
        changed(transformer)
        transformer.save_pretrained(tmp_path, **options)
    same(transformer.state_dict(), type(transformer).from_pretrained(tmp_path).state_dict())
    assert (tmp_path / "notes.json").read_text() == "mine"


def test_nothing_of_another_pipeline_is_left_but_the_files_of_the_user(tmp_path):
    first, second = tiny_llamagen.text_pipeline(), tiny_llamagen.class_pipeline()
    first.known_captions = KnownCaptions({"a red heart": []})
    first.save_pretrained(tmp_path)
    (tmp_path / "shared.json").write_text(json.dumps({"vq": "elsewhere"}))
    own = ["README.md", "handler.py", "text_encoder/notes.md", "samples/one.png"]
    for name in own:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    second.save_pretrained(tmp_path)
    assert all((tmp_path / name).read_text() == "mine" for name in own)
    fresh = tmp_path / "fresh"
    second.save_pretrained(fresh)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    saved = {str(path.relative_to(fresh)) for path in fresh.rglob("*") if path.is_file()}
    assert {name for name in left if not name.startswith("fresh")} == saved | set(own)
    assert AutoPipeline.from_pretrained(tmp_path).known_captions is None


@pytest.mark.parametrize("at", ["write", "replace"])
@pytest.mark.parametrize("exists", [True, False])
def test_a_save_that_fails_changes_nothing(at, exists, tmp_path, monkeypatch):
    pipe, folder = tiny_llamagen.class_pipeline(), tmp_path / "models" / "one"
    if exists:
        pipe.save_pretrained(folder)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    changed(pipe.transformer)
    calls, replace = [], saved_files.os.replace

    def fail_late(source, target):
        calls.append(source)
        if len(calls) == 5:
            raise OSError("no space left on device")
        replace(source, target)

    def fail(*arguments, **options):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    if at == "write":
        monkeypatch.setattr(type(pipe.vq), "save_config", fail)
    else:
        monkeypatch.setattr(saved_files.os, "replace", fail_late)
    with pytest.raises(OSError, match="(?i)no space left"):
        pipe.save_pretrained(folder)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert exists or not list(tmp_path.iterdir())


def test_what_a_killed_save_left_is_removed_a_day_later(tmp_path):
    left, running = tmp_path / ".0123abcd.new", tmp_path / ".4567abcd.new"
    for folder in (left, running):
        folder.mkdir()
    os.utime(left, (0, 0))
    tiny_llamagen.class_pipeline().transformer.save_pretrained(tmp_path)
    assert not left.exists() and running.exists()


def cast(part):
    apply_layerwise_casting(part, torch.float8_e4m3fn, torch.float32)


def rounded(part):
    part.to(torch.float8_e5m2)


def to_disk(part, folder):
    apply_group_offloading(part, torch.device("cpu"), offload_type="leaf_level", offload_to_disk_path=str(folder))


@pytest.mark.parametrize("change", [cast, rounded, "disk"])
@pytest.mark.parametrize(
    ("build", "key"), [(tiny_llamagen.text_pipeline, "text_encoder"), (tiny_janus.pipeline, "model")]
)
def test_weights_that_are_not_those_of_the_model_are_not_saved(build, key, change, tmp_path):
    pipe = build()
    to_disk(pipe.components[key], tmp_path / "disk") if change == "disk" else change(pipe.components[key])
    with pytest.raises(ValueError, match=key):
        pipe.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("change", [cast, rounded, "disk", "quantised"])
def test_such_weights_of_a_component_are_not_saved(change, tmp_path):
    pipe = tiny_llamagen.class_pipeline()
    if change == "quantised":
        pipe.quantize_weights()
    elif change == "disk":
        to_disk(pipe.transformer, tmp_path / "disk")
    else:
        change(pipe.transformer)
    with pytest.raises(ValueError, match="offloaded to|save"):
        pipe.transformer.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_quantised_weights_of_a_model_of_transformers_are_not_saved(tmp_path):
    pipe = tiny_janus.pipeline()
    pipe.quantize_weights()
    for part in (pipe.model, pipe.model.model.language_model):
        with pytest.raises(ValueError, match="quantize_weights"):
            part.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.every(6)
def test_offloading_to_disk_is_refused_at_every_entrance(name, tmp_path):
    pipe, options = EVERY[name](), {"offload_type": "leaf_level", "offload_to_disk_path": str(tmp_path / "disk")}
    with pytest.raises(ValueError, match="offload_to_disk_path"):
        pipe.enable_group_offload("cpu", **options)
    parts = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
    for part in parts:
        if type(part).__module__.startswith("arimage.") and hasattr(part, "enable_group_offload"):
            with pytest.raises(ValueError, match="offload_to_disk_path"):
                part.enable_group_offload("cpu", **options)
    assert not (tmp_path / "disk").exists()


@pytest.mark.parametrize(("build", "key"), [(tiny_llamagen.class_pipeline, "vq"), (tiny_janus.pipeline, "model")])
def test_a_component_offloaded_to_disk_computes_nothing(build, key, tmp_path):
    pipe = build()
    to_disk(pipe.components[key], tmp_path)
    with pytest.raises(ValueError, match=f"{key} is offloaded to"):
        pipe(**condition_of(pipe))


def test_a_component_with_adapters_is_not_saved(tmp_path):
    pipe = tiny_llamagen.class_pipeline()
    add_adapter(pipe.transformer, rank=2, alpha=2, targets="attention")
    with pytest.raises(ValueError, match="adapters"):
        pipe.transformer.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
