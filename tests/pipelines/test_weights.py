"""Saved weights that do not fit their component are refused in one sentence before anything is loaded."""

import json
import shutil

import pytest
import tiny
import tiny_emu3
import tiny_janus
import tiny_lumina_mgpt
import torch
from safetensors.torch import load_file, save_file

from arimage import AutoPipeline
from arimage.convert import convert_janus


BUILD = {
    "llamagen": tiny.text_pipeline,
    "var": lambda: tiny.scale_pipeline("text"),
    "janus": lambda: convert_janus(tiny_janus.FOLDER),
    "emu3": tiny_emu3.pipeline,
    "lumina": tiny_lumina_mgpt.pipeline,
}
# One component of each library and kind.
COMPONENTS = [
    ("llamagen", "transformer"),
    ("llamagen", "vq"),
    ("llamagen", "text_encoder"),
    ("llamagen", "drafter"),
    ("llamagen", "denoiser"),
    ("var", "refiner"),
    ("var", "text_encoder"),
    ("janus", "model"),
    ("emu3", "model"),
    ("lumina", "transformer"),
    ("lumina", "vq"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("saved")
    for name, build in BUILD.items():
        build().save_pretrained(root / name)
    return root


@pytest.fixture
def damaged(folders, tmp_path):
    """A function that copies the folder of a family and returns the copy and the weights of one of its components."""

    def copy(family, component):
        folder = shutil.copytree(folders / family, tmp_path / family)
        (file,) = (folder / component).glob("*.safetensors")
        return folder, file

    return copy


@pytest.mark.parametrize("family", BUILD)
def test_sound_weights_are_loaded(folders, family):
    AutoPipeline.from_pretrained(folders / family)


@pytest.mark.parametrize("change", ["missing", "unexpected", "shape"])
@pytest.mark.parametrize(("family", "component"), COMPONENTS)
def test_weights_that_do_not_fit_are_refused_by_name(damaged, family, component, change):
    folder, file = damaged(family, component)
    state = load_file(file)
    key = max((key for key in state if state[key].ndim == 2 and "embed" not in key and "shared" not in key), key=len)
    if change == "missing":
        del state[key]
    elif change == "unexpected":
        key = "strange.weight"
        state[key] = torch.zeros(1)
    else:
        state[key] = torch.zeros(3, 2)
    save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"{component}.*{key.split('.', 2)[-1]}.*{change}"):
        AutoPipeline.from_pretrained(folder)


@pytest.mark.parametrize("content", [b"", b"noise" * 100, None])
@pytest.mark.parametrize(("family", "component"), COMPONENTS[:3])
def test_damaged_files_are_refused_by_name(damaged, family, component, content):
    folder, file = damaged(family, component)
    file.write_bytes(file.read_bytes()[:-100] if content is None else content)
    with pytest.raises(ValueError, match=f"{component}/{file.name} is damaged"):
        AutoPipeline.from_pretrained(folder)


@pytest.mark.parametrize("content", [None, "", "[]", "null"])
@pytest.mark.parametrize(("family", "component"), COMPONENTS[:3])
def test_a_component_without_a_configuration_is_refused(damaged, family, component, content):
    folder, file = damaged(family, component)
    config = file.parent / "config.json"
    config.unlink() if content is None else config.write_text(content)
    with pytest.raises(ValueError, match=f"{component}/config.json"):
        AutoPipeline.from_pretrained(folder)


@pytest.mark.parametrize(("family", "component"), COMPONENTS[:3])
def test_a_component_without_weights_is_refused(damaged, family, component):
    folder, file = damaged(family, component)
    file.unlink()
    with pytest.raises(ValueError, match=f"{component} holds no weights"):
        AutoPipeline.from_pretrained(folder)
    shutil.rmtree(file.parent)
    with pytest.raises(ValueError, match=f"{component} is missing"):
        AutoPipeline.from_pretrained(folder)


@pytest.mark.parametrize(
    "setting",
    [{"num_layers": 0}, {"num_layers": 1}, {"num_layers": "two"}, {"hidden_size": -3}, {"num_attention_heads": 0}],
)
def test_a_configuration_of_another_model_is_refused(damaged, setting):
    folder, file = damaged("llamagen", "transformer")
    config = file.parent / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | setting))
    with pytest.raises(ValueError, match=str(file.parent)):
        AutoPipeline.from_pretrained(folder)


def test_a_component_that_is_given_is_not_checked(damaged):
    folder, file = damaged("llamagen", "text_encoder")
    file.write_bytes(b"")
    pipe = AutoPipeline.from_pretrained(folder, text_encoder=None, tokenizer=None)
    assert pipe.text_encoder is None


def test_variants_and_shards_are_read(tmp_path):
    pipe = tiny.text_pipeline()
    pipe.save_pretrained(tmp_path, variant="fp16", max_shard_size="20KB")
    assert len(list((tmp_path / "transformer").glob("*fp16*.safetensors"))) > 1
    loaded = AutoPipeline.from_pretrained(tmp_path, variant="fp16")
    assert torch.equal(loaded.transformer.head.weight, pipe.transformer.head.weight)
    with pytest.raises(ValueError, match="holds no weights"):
        AutoPipeline.from_pretrained(tmp_path)
