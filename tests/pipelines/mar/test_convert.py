"""Files of MAR that are complete, wrapped by a trainer, damaged, or of another model."""

import argparse

import pytest
import torch
from pipelines.mar.tiny import FOLDER
from safetensors.torch import save_file

from arimage.convert import CheckpointError, convert_mar


CHECKPOINT, VAE = FOLDER / "checkpoint-last.pth", FOLDER / "kl16.ckpt"


@pytest.fixture
def loaded():
    return torch.load(CHECKPOINT, weights_only=True)


def convert(checkpoint=CHECKPOINT, vae=VAE, **options):
    return convert_mar(checkpoint, vae, num_heads=3, **options)


def written(tmp_path, content, name="checkpoint.pth"):
    torch.save(content, tmp_path / name)
    return tmp_path / name


def test_the_averaged_weights_of_a_trainer_are_taken(loaded, tmp_path):
    trainer = {**loaded, "args": argparse.Namespace(model="mar_base"), "optimizer": {"state": {}}, "scaler": {}}
    pipe = convert(written(tmp_path, trainer))
    assert torch.equal(pipe.transformer.null_vector, loaded["model_ema"]["fake_latent"])
    assert not torch.equal(pipe.transformer.null_vector, loaded["model"]["fake_latent"])
    config = pipe.transformer.config
    assert (config.num_layers, config.num_decoder_layers, config.num_buffers, config.patch_size) == (2, 3, 4, 1)
    assert pipe.image_sizes == [(16, 16)] and pipe.vae.config["scaling_factor"] == 0.2325


def test_files_of_tensors_alone_give_the_same(loaded, tmp_path):
    save_file(loaded["model_ema"], tmp_path / "mar.safetensors")
    save_file(torch.load(VAE, weights_only=True)["model"], tmp_path / "kl16.safetensors")
    flat, wrapped = convert(tmp_path / "mar.safetensors", tmp_path / "kl16.safetensors"), convert()
    for name in ("transformer", "head", "vae"):
        ours, theirs = (getattr(pipe, name).state_dict() for pipe in (flat, wrapped))
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_weights_may_be_half_as_large_but_those_of_the_head(tmp_path):
    pipe = convert(dtype=torch.bfloat16)
    assert (pipe.transformer.dtype, pipe.head.dtype, pipe.vae.dtype) == (torch.bfloat16, torch.float32, torch.float32)


def test_heads_that_no_file_holds_are_asked_for():
    with pytest.raises(CheckpointError, match="num_heads is None"):
        convert_mar(CHECKPOINT, VAE)
    with pytest.raises(CheckpointError, match="num_heads is 5"):
        convert_mar(CHECKPOINT, VAE, num_heads=5)


def test_a_checkpoint_without_averaged_weights_is_refused(loaded, tmp_path):
    with pytest.raises(CheckpointError, match="model_ema"):
        convert(written(tmp_path, {"model": loaded["model"]}))
