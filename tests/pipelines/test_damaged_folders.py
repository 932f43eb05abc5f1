"""Whatever is wrong in the files of a saved folder is one sentence that names the file."""

import json
import shutil
from pathlib import Path

import pytest
from pipelines.glm_image import tiny as tiny_glm_image
from pipelines.llamagen import tiny as tiny_llamagen
from pipelines.mar import tiny as tiny_mar

from arimage import AutoPipeline


DEEP = '{"a":' * 100_000
# By file: a setting, perhaps within others, and what is written in its place.
WRONG = [
    ("text_encoder/config.json", "d_ff", "x"),
    ("text_encoder/config.json", "d_kv", 1.5),
    ("text_encoder/config.json", "dtype", "float99"),
    ("text_encoder/config.json", "dtype", float("nan")),
    ("text_encoder/config.json", "vocab_size", 10**12),
    ("text_encoder/config.json", "num_decoder_layers", 10**12),
    ("text_encoder/config.json", "num_layers", 1000),
    ("text_encoder/config.json", "relative_attention_max_distance", 0),
    ("text_encoder/config.json", "relative_attention_max_distance", 1),
    ("transformer/config.json", "hidden_size", 10**12),
    ("transformer/config.json", "norm_eps", "x"),
    ("transformer/config.json", "num_layers", 0),
    ("vq/config.json", "codebook_size", 10**12),
    ("tokenizer/tokenizer.json", "version", -1),
    ("tokenizer/tokenizer.json", "truncation", 0),
    ("tokenizer/tokenizer.json", "model", None),
    ("tokenizer/tokenizer.json", "added_tokens", [{"a": 1}]),
    ("tokenizer/tokenizer.json", "model.vocab", {}),
    ("tokenizer/tokenizer_config.json", "model_max_length", "x"),
    ("tokenizer/tokenizer_config.json", "pad_token", -1),
    ("model_index.json", "transformer", 5),
    ("model_index.json", "transformer", [None, None]),
    ("model_index.json", "tokenizer", ["transformers"]),
    ("model_index.json", "vq", ["no_such_module", "VQ"]),
    ("model_index.json", "text_encoder", [None, 3]),
    ("model_index.json", "id2label", 5),
    ("generation_config.json", "decoding", [1]),
    ("generation_config.json", "temperature", "hot"),
    ("generation_config.json", "temperature", 1e30),
    ("generation_config.json", "max_new_tokens", 3),
]
TEXTS = {"empty": "", "a list": "[]", "cut": '{"a": [1, 2', "deep": DEEP, "noise": "\x00\x7f" * 50}
FILES = ["text_encoder/config.json", "tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json", "vq/config.json"]
FILES += ["model_index.json", "generation_config.json"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    tiny_llamagen.text_pipeline().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy")


def refused(folder: Path, file: str) -> None:
    with pytest.raises(ValueError) as error:
        AutoPipeline.from_pretrained(folder)
    name = Path(file)
    assert str(folder / name.parent) in str(error.value) and name.name in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.every(4)
@pytest.mark.parametrize(("file", "setting", "value"), WRONG, ids=lambda value: str(value)[:30])
def test_wrong_settings_are_refused_by_file(folder, file, setting, value):
    settings = json.loads((folder / file).read_text())
    *parents, last = setting.split(".")
    table = settings
    for parent in parents:
        table = table[parent]
    table[last] = value
    (folder / file).write_text(json.dumps(settings))
    refused(folder, file)


@pytest.mark.every(6)
@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("text", TEXTS)
def test_damaged_files_are_refused_by_name(folder, file, text):
    (folder / file).write_text(TEXTS[text])
    refused(folder, file)


def test_a_component_that_the_index_does_not_name_is_refused(folder):
    index = json.loads((folder / "model_index.json").read_text())
    del index["transformer"]
    (folder / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="model_index.json .*transformer"):
        AutoPipeline.from_pretrained(folder)


def test_an_index_of_weights_that_is_not_one_is_refused(folder):
    (part,) = (folder / "text_encoder").glob("*.safetensors")
    part.rename(part.with_name("model-00001-of-00002.safetensors"))
    for wrong in ([], {"weight_map": [1]}, {"weight_map": {"a": 5}}):
        (folder / "text_encoder/model.safetensors.index.json").write_text(json.dumps(wrong))
        refused(folder, "text_encoder/model.safetensors.index.json")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_tokenizer_that_lacks_a_file_is_refused(folder, name):
    (folder / "tokenizer" / name).unlink()
    refused(folder, f"tokenizer/{name}")


# By the file of GLM-Image: a setting, and what is written in its place.
WRONG_OF_GLM_IMAGE = [
    ("vae/config.json", "norm_num_groups", -1),
    ("vae/config.json", "latents_mean", [0.0]),
    ("vae/config.json", "latents_std", "x"),
    ("scheduler/scheduler_config.json", "max_shift", "x"),
    ("scheduler/scheduler_config.json", "shift", 0),
    ("scheduler/scheduler_config.json", "shift_terminal", 1.5),
]


@pytest.fixture(scope="module")
def glm_image(tmp_path_factory):
    folder = tmp_path_factory.mktemp("glm")
    tiny_glm_image.pipeline().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("file", "setting", "value"), WRONG_OF_GLM_IMAGE)
def test_wrong_settings_of_vae_and_scheduler_are_refused(glm_image, tmp_path, file, setting, value):
    copy = shutil.copytree(glm_image, tmp_path / "copy")
    (copy / file).write_text(json.dumps(json.loads((copy / file).read_text()) | {setting: value}))
    refused(copy, file)


@pytest.mark.parametrize("template", ["cut", "{{ bos_token }}", None])
def test_chat_templates_that_leave_out_the_text_are_refused(glm_image, tmp_path, template):
    copy = shutil.copytree(glm_image, tmp_path / "copy")
    file = copy / "processor" / "chat_template.jinja"
    text = file.read_text()
    file.write_text(text[: text.index("{%") + 9] if template == "cut" else template or "")
    if template is None:
        file.unlink()
    refused(copy, "processor")


def test_glm_image_without_its_defaults_is_refused(glm_image, tmp_path):
    saved = shutil.copytree(glm_image, tmp_path / "saved")
    (saved / "generation_config.json").unlink()
    refused(saved, "generation_config.json")
    # As the published folder, in which the language model has them.
    index = json.loads((saved / "model_index.json").read_text())
    (saved / "model_index.json").write_text(json.dumps({name: index[name] for name in index if name != "_defaults"}))
    AutoPipeline.from_pretrained(saved)
    (saved / "vision_language_encoder" / "generation_config.json").unlink()
    refused(saved, "vision_language_encoder/generation_config.json")


@pytest.mark.parametrize("setting", ["layers_per_block", "latent_channels", "block_out_channels"])
def test_components_of_diffusers_are_checked_before_they_are_built(tmp_path, setting):
    tiny_mar.pipeline().save_pretrained(tmp_path)
    path = tmp_path / "vae" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {setting: 10**12}))
    refused(tmp_path, "vae/config.json")


def test_a_missing_tokenizer_is_refused(folder):
    shutil.rmtree(folder / "tokenizer")
    with pytest.raises(ValueError, match="tokenizer is missing"):
        AutoPipeline.from_pretrained(folder)
