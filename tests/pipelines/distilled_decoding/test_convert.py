"""The folders of published files that the converters of Distilled Decoding take, and those they refuse."""

import pytest
import torch
from pipelines.distilled_decoding.tiny import FIXTURES
from pipelines.llamagen import tiny as tiny_llamagen
from pipelines.var import tiny as tiny_var

from arimage import AutoPipeline, FewStepDecoding
from arimage.convert import CheckpointError, convert_llamagen_dd, convert_var_dd
from arimage.pipelines.distilled_decoding import convert as distilled
from arimage.pipelines.distilled_decoding.convert import (
    llamagen_dd_transformer_from_original,
    var_dd_transformer_from_original,
)


TEACHERS = tiny_llamagen.FIXTURES
LLAMAGEN = (
    FIXTURES / "llamagen" / "llamagen-dd-tiny.pt",
    TEACHERS / "c2i" / "vq_ds4_c2i.pt",
    TEACHERS / "c2i" / "c2i_tiny.pt",
)
VAR = (FIXTURES / "var" / "var-dd-tiny.pth", tiny_var.FOLDER / "vae_ch32v64z8.pth")
SIZES = {"image_size": 24, "num_heads": 4}
SCALES = (1, 2, 3, 4)


def folder_of(tmp_path, files):
    folder = tmp_path / "files"
    folder.mkdir()
    for file in files:
        (folder / file.name).symlink_to(file)
    return folder


def student(file):
    loaded = torch.load(file, weights_only=True)
    return loaded["ema"] if "ema" in loaded else loaded["trainer"]["ema_parameters"]


def test_a_converted_folder_loads_with_its_teacher_and_the_published_defaults(tmp_path, monkeypatch):
    monkeypatch.setitem(distilled.PUBLISHED_LEVELS, (48, 3), (20, 14))
    convert_llamagen_dd(folder_of(tmp_path, LLAMAGEN), **SIZES, out=tmp_path / "out")
    pipe = AutoPipeline.from_pretrained(tmp_path / "out")
    assert type(pipe).__name__ == "LlamaGenDDPipeline" and pipe.teacher is not None
    assert pipe.decoding == FewStepDecoding(starts=(0, 14)) and pipe.transformer.config.codes_until == 20
    assert pipe.generation_config == {"guidance_scale": 2.0, "temperature": 1.0, "top_k": 8000, "top_p": 1.0}


def test_a_size_that_was_not_published_asks_where_codes_end(tmp_path):
    pipe = convert_var_dd(folder_of(tmp_path, VAR))
    pipe.set_progress_bar_config(disable=True)
    assert pipe.teacher is None and pipe.transformer.config.scales == SCALES
    assert pipe.generation_config == {"guidance_scale": 2.5, "temperature": 1.0, "top_k": 900, "top_p": 0.95}
    with pytest.raises(ValueError, match="codes_until"):
        pipe(class_labels=1)
    assert pipe(class_labels=1, decoding=FewStepDecoding(codes_until=2)).stats.forward_passes == 1


@pytest.mark.parametrize(
    ("convert", "files", "named"),
    [
        (convert_llamagen_dd, LLAMAGEN[1:], "Distilled Decoding"),
        (convert_var_dd, VAR[:1], "image tokenizer"),
        (convert_llamagen_dd, (*LLAMAGEN, TEACHERS / "t2i" / "vq_ds4_t2i.pt"), "two files"),
    ],
)
def test_a_folder_without_a_part_or_with_two_of_a_kind_is_refused(tmp_path, convert, files, named):
    with pytest.raises(CheckpointError, match=named):
        convert(folder_of(tmp_path, files))


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    folder = folder_of(tmp_path, LLAMAGEN[:1])
    tokenizer = torch.load(LLAMAGEN[1], weights_only=True)
    tokenizer["model"]["quantize.embedding.weight"] = torch.zeros(64, 8)
    torch.save(tokenizer, folder / "vq.pt")
    with pytest.raises(CheckpointError, match="64 of width 8"):
        convert_llamagen_dd(folder, **SIZES)


def test_a_missing_unknown_or_misshapen_tensor_is_named():
    for key in ("n_d_embed.weight", "final_layer_conti.linear.bias"):
        state = {name: value for name, value in student(LLAMAGEN[0]).items() if name != key}
        with pytest.raises(CheckpointError, match=key):
            llamagen_dd_transformer_from_original(state, grid_size=6, num_heads=4)
    for key in ("layerwise_n_d_embed.1.weight", "layerwise_n_d_embed.2.bias", "blocks.1.attn.v_bias", "pos_1LC"):
        state = {name: value for name, value in student(VAR[0]).items() if name != key}
        with pytest.raises(CheckpointError, match=key):
            var_dd_transformer_from_original(state, scales=SCALES)
    with pytest.raises(CheckpointError, match="extra"):
        var_dd_transformer_from_original({**student(VAR[0]), "extra": torch.zeros(1)}, scales=SCALES)
    with pytest.raises(CheckpointError, match="pos_1LC"):
        var_dd_transformer_from_original(student(VAR[0]), scales=(1, 2, 3))
    with pytest.raises(CheckpointError, match="num-heads"):
        llamagen_dd_transformer_from_original(student(LLAMAGEN[0]), grid_size=6)
