"""Weights begin on lines of 64 bytes, whatever their file and their loader: where they lie changes no image."""

import pytest
import torch
from adapters import adapter
from diffusers import DiffusionPipeline
from families import EVERY, condition_of, flat, one_of_each_kind, pictures_of, seeded
from pipelines.llamagen import tiny as tiny_llamagen
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import T5EncoderModel

from arimage import AutoPipeline
from arimage.models.mixin import LINE


def off_the_line(*models):
    """The names of the weights that do not begin on a line, but for those in half precision."""
    weights = [item for model in models for item in (*model.named_parameters(), *model.named_buffers())]
    return [name for name, weight in weights if weight.itemsize > 2 and weight.data_ptr() % LINE]


def modules_of(pipe):
    return [part for part in pipe.components.values() if isinstance(part, nn.Module)]


def lengthen_headers(folder, length):
    """Give every file of weights a header that is longer by about `length` bytes."""
    for file in folder.rglob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata() or {}
        save_file(
            {key: value.clone() for key, value in load_file(file).items()}, file, metadata | {"pad": "x" * length}
        )


def begins_off_the_line(file):
    return (8 + int.from_bytes(file.read_bytes()[:8], "little")) % LINE


@pytest.mark.every(4)
@pytest.mark.parametrize("family", one_of_each_kind(EVERY))
def test_the_length_of_a_header_changes_no_image(family, tmp_path):
    pipe = EVERY[family]()
    pipe.save_pretrained(tmp_path)
    call = {**condition_of(pipe), "output_type": "pt"}
    expected = pipe(**call, generator=seeded(0))
    files = list(tmp_path.rglob("*.safetensors"))
    # One of two lengths that differ by 8 bytes moves weights off the line.
    for length in (24, 32):
        lengthen_headers(tmp_path, length)
        if any(map(begins_off_the_line, files)):
            break
    assert any(map(begins_off_the_line, files))
    loaded = type(pipe).from_pretrained(tmp_path)
    loaded.set_progress_bar_config(disable=True)
    assert not off_the_line(*modules_of(loaded))
    out = loaded(**call, generator=seeded(0))
    assert torch.equal(flat(out.tokens), flat(expected.tokens))
    assert torch.equal(pictures_of(out), pictures_of(expected))


@pytest.fixture(params=[0, 24])
def folder(request, tmp_path):
    tiny_llamagen.text_pipeline().save_pretrained(tmp_path)
    lengthen_headers(tmp_path, request.param)
    return tmp_path


@pytest.mark.every(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_loader_aligns(folder, dtype):
    options = {"dtype": dtype, "local_files_only": True}
    assert not off_the_line(*modules_of(AutoPipeline.from_pretrained(folder, dtype=dtype)))
    remote = DiffusionPipeline.from_pretrained(folder, torch_dtype=dtype, trust_remote_code=True)
    assert not off_the_line(*modules_of(remote))
    encoder = T5EncoderModel.from_pretrained(folder / "text_encoder", **options)
    assert not off_the_line(*modules_of(AutoPipeline.from_pretrained(folder, text_encoder=encoder, dtype=dtype)))
    remote.text_encoder = T5EncoderModel.from_pretrained(folder / "text_encoder", **options)
    assert not off_the_line(remote.text_encoder)


def test_adapters_are_aligned(folder):
    pipe = AutoPipeline.from_pretrained(folder)
    save_file(adapter(pipe), folder / "adapter.safetensors", {"pad": '"' + 21 * "x" + '"'})
    pipe.load_lora_weights(folder / "adapter.safetensors")
    assert not off_the_line(pipe.transformer)
