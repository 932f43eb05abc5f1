"""The published layout of Emu3.5, converted: the same text tokens, settings and tensors, and what is refused."""

import json
import shutil

import pytest
import torch
from pipelines.emu3 import tiny as tiny_emu3
from pipelines.emu35 import tiny as tiny_emu35
from pipelines.emu35.tiny import FOLDER, REFERENCE, VISION_TOKENIZER
from safetensors.torch import load_file, save_file

from arimage import AutoPipeline
from arimage.convert import CheckpointError, convert_emu3, convert_emu35
from arimage.convert.folder import load_original_folder
from arimage.pipelines.emu35.convert import emu35_tokenizer_from_original


@pytest.fixture
def folder(tmp_path):
    return tiny_emu35.write_original(tmp_path / "Emu3.5-Image")


def change_config(folder, **settings):
    path = folder / "config.json"
    config = json.loads(path.read_text()) | settings
    path.write_text(json.dumps({name: value for name, value in config.items() if value != "absent"}))


def test_texts_become_the_tokens_of_the_original():
    tokenizer, codes = emu35_tokenizer_from_original(FOLDER)
    for text, ids in REFERENCE["texts"]:
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
    # Text that names a code is text.
    assert len(tokenizer.encode("<|visual token 000007|>", add_special_tokens=False)) > 1
    assert (codes, len(tokenizer)) == (REFERENCE["codes"], REFERENCE["special_ids"]["BOV"])
    # "<image>" is a special token of Emu3 in transformers alone.
    assert "<image>" not in tokenizer.get_vocab()


def test_ids_and_settings_are_those_of_the_original(tmp_path):
    convert_emu35(FOLDER, vision_tokenizer=VISION_TOKENIZER, out=tmp_path / "pipe")
    pipe = AutoPipeline.from_pretrained(tmp_path / "pipe")
    ids = REFERENCE["special_ids"]
    assert pipe.config.token_ids == {
        "bos": ids["BOS"],
        "row_end": ids["EOL"],
        "begin_of_image": ids["BOI"],
        "begin_of_codes": ids["IMG"],
        "end_of_image": ids["EOI"],
        "begin_of_answer": ids["BSS"],
        "first_code": ids["BOV"],
    }
    config = pipe.model.config
    assert (config.head_dim, config.rms_norm_eps, config.rope_parameters["rope_theta"]) == (16, 1e-6, 1e6)
    assert pipe.config.image_area == 1024 * 1024 and not pipe.model.training
    assert pipe.generation_config == {"guidance_scale": 5.0, "temperature": 1.0, "top_k": 5120, "top_p": 1.0}
    assert pipe.config.edit_guidance_scale == 3.0
    assert (tmp_path / "pipe" / "tokenizer" / "tokenizer.json").stat().st_size < 100_000


def test_the_base_model_has_its_own_guidance(folder):
    pipe = convert_emu35(folder, vision_tokenizer=VISION_TOKENIZER, base=True)
    assert pipe.generation_config["guidance_scale"] == pipe.config.edit_guidance_scale == 2.0


def test_missing_settings_are_the_defaults_of_the_authors_class(folder):
    change_config(folder, rms_norm_eps="absent", rope_theta="absent", rope_scaling="absent", head_dim="absent")
    with pytest.raises(CheckpointError, match=r"q_proj.weight' of shape \(64, 48\) where \(512, 48\)"):
        convert_emu35(folder, vision_tokenizer=VISION_TOKENIZER)
    change_config(folder, head_dim=16)
    config = convert_emu35(folder, vision_tokenizer=VISION_TOKENIZER).model.config
    assert (config.rms_norm_eps, config.rope_parameters["rope_theta"]) == (1e-5, 1e6)


def test_weights_keep_their_names_and_the_dtype_of_the_files(tmp_path):
    folder = tiny_emu35.write_original(tmp_path / "half")
    for file in folder.glob("*.safetensors"):
        save_file({key: tensor.bfloat16() for key, tensor in load_file(file).items()}, file, {"format": "pt"})
    pipe = convert_emu35(folder, vision_tokenizer=VISION_TOKENIZER, out=tmp_path / "out")
    expected, found = load_original_folder(folder), pipe.model.state_dict()
    assert expected.keys() == found.keys() and all(torch.equal(expected[key], found[key]) for key in expected)
    assert pipe.model.dtype == torch.bfloat16 and pipe.vq.quantize.embedding.weight.dtype == torch.float32
    assert json.loads((tmp_path / "out" / "model" / "config.json").read_text())["dtype"] == "bfloat16"


def test_emu3_and_emu35_name_each_other(tmp_path):
    emu3 = tiny_emu3.write_original(tmp_path / "Emu3-Gen")
    vision = tiny_emu3.write_vision_tokenizer(tmp_path / "Emu3-VisionTokenizer")
    for other in (emu3, tiny_emu3.FIXTURES):
        with pytest.raises(CheckpointError, match=r"holds Emu3, .*`arimage convert emu3` \(convert_emu3\)"):
            convert_emu35(other, vision_tokenizer=VISION_TOKENIZER)
    for given in (None, VISION_TOKENIZER, vision):
        with pytest.raises(CheckpointError, match=r"holds Emu3.5, .*`arimage convert emu35` \(convert_emu35\)"):
            convert_emu3(FOLDER, vision_tokenizer=given)
    with pytest.raises(CheckpointError, match="'Emu3VisionVQ' where 'Emu3p5VisionVQ' .* Emu3.5-VisionTokenizer"):
        convert_emu35(FOLDER, vision_tokenizer=vision)
    with pytest.raises(CheckpointError, match="is the image tokenizer of Emu3.5: give the folder of Emu3-Vision"):
        convert_emu3(emu3, vision_tokenizer=VISION_TOKENIZER)


@pytest.mark.parametrize("whole", [False, True], ids=["shards", "one file"])
def test_a_folder_that_is_not_converted_names_its_command(folder, whole):
    if whole:
        state = load_original_folder(folder)
        for file in folder.glob("*.safetensors*"):
            file.unlink()
        save_file(state, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="convert its folder with `arimage convert emu35`"):
        AutoPipeline.from_pretrained(folder)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling {'type': 'linear', 'factor': 2.0}"),
        ({"hidden_size": "absent"}, "no 'hidden_size'"),
        ({"hidden_size": 50}, r"'model.embed_tokens.weight' of shape \(611, 48\) where \(611, 50\)"),
        ({"model_type": "qwen3"}, "names the model type 'qwen3' where 'Emu3' or 'emu3' was expected"),
    ],
)
def test_other_settings_are_refused(folder, settings, said):
    change_config(folder, **settings)
    with pytest.raises(CheckpointError, match=said):
        convert_emu35(folder, vision_tokenizer=VISION_TOKENIZER)


def test_a_missing_part_is_refused(folder):
    (folder / "model-00002-of-00005.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model-00002-of-00005.safetensors"):
        convert_emu35(folder, vision_tokenizer=VISION_TOKENIZER)


def test_another_number_of_codes_is_refused(folder, tmp_path):
    names = (folder / "emu3_vision_tokens.txt").read_text().split("\n")
    (folder / "emu3_vision_tokens.txt").write_text("\n".join(names[:90]))
    with pytest.raises(CheckpointError, match="has 96 codes where .* names 87"):
        convert_emu35(folder, vision_tokenizer=VISION_TOKENIZER)
    state = load_file(VISION_TOKENIZER / "model.safetensors")
    state["quantize.embedding.weight"] = state["quantize.embedding.weight"][:87].clone()
    smaller = shutil.copytree(VISION_TOKENIZER, tmp_path / "smaller")
    save_file(state, smaller / "model.safetensors")
    with pytest.raises(CheckpointError, match="the model has 611 tokens, where 87 codes from 515 on"):
        convert_emu35(folder, vision_tokenizer=smaller)


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("emu3.tiktoken", "no base64! 0\n", "is not a table of"),
        ("emu3.tiktoken", None, "is not a file"),
        ("emu3_vision_tokens.txt", "<|image token|>\n<|visual token 000000|>\n", "does not name .* in order"),
        ("emu3_vision_tokens.txt", None, "is not a file"),
    ],
)
def test_a_damaged_text_tokenizer_is_refused(folder, file, text, said):
    (folder / file).unlink() if text is None else (folder / file).write_text(text)
    with pytest.raises(CheckpointError, match=said):
        convert_emu35(folder, vision_tokenizer=VISION_TOKENIZER)
