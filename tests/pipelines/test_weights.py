"""Saved weights that do not fit their component are refused in one sentence before anything is loaded."""

import os
import shutil

import diffusers
import pytest
import torch
from pipelines.chameleon import tiny as tiny_chameleon
from pipelines.emu3 import tiny as tiny_emu3
from pipelines.janus import tiny as tiny_janus
from pipelines.llamagen import tiny as tiny_llamagen
from pipelines.var import tiny as tiny_var
from safetensors.torch import load_file, save_file

from arimage import AutoPipeline, LlamaGenVQModel
from arimage.convert import convert_janus


BUILD = {
    "llamagen": tiny_llamagen.text_pipeline,
    "var": lambda: tiny_var.pipeline("text"),
    "janus": lambda: convert_janus(tiny_janus.FOLDER),
    "emu3": tiny_emu3.pipeline,
    "lumina": tiny_chameleon.pipeline,
}
# One component of each library and kind.
COMPONENTS = [
    ("llamagen", "transformer"),
    ("llamagen", "vq"),
    ("llamagen", "text_encoder"),
    ("llamagen", "drafter"),
    ("llamagen", "denoiser"),
    ("llamagen", "neighbours"),
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


@pytest.mark.every(6)
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


@pytest.mark.parametrize("change", ["missing", "unexpected", "shape", "damaged"])
@pytest.mark.parametrize("subfolder", [True, False])
@pytest.mark.every(2)
def test_a_component_alone_is_refused_in_the_same_way(damaged, change, subfolder):
    folder, file = damaged("llamagen", "vq")
    state = load_file(file)
    key = "encoder.conv_in.bias"
    state |= {"shape": {key: torch.zeros(1)}, "unexpected": {"strange": torch.zeros(1)}}.get(change, {})
    if change == "missing":
        del state[key]
    save_file(state, file, metadata={"format": "pt"})
    if change == "damaged":
        file.write_bytes(file.read_bytes()[:-8])
    where = (folder,) if subfolder else (folder / "vq",)
    with pytest.raises(ValueError, match=rf"vq.*({key}|strange|is damaged)"):
        LlamaGenVQModel.from_pretrained(*where, **({"subfolder": "vq"} if subfolder else {}))


def test_a_component_of_a_repository_is_refused_too(damaged, monkeypatch):
    folder, file = damaged("llamagen", "vq")
    state = load_file(file)
    save_file(state | {"strange": torch.zeros(1)}, file, metadata={"format": "pt"})
    # As if its files were in the cache of the Hub.
    load = diffusers.ModelMixin.from_pretrained.__func__
    monkeypatch.setattr(
        diffusers.ModelMixin, "from_pretrained", classmethod(lambda cls, name, **kw: load(cls, folder / "vq", **kw))
    )
    with pytest.raises(ValueError, match="someone/tokenizer: the weight 'strange' is unexpected"):
        LlamaGenVQModel.from_pretrained("someone/tokenizer")


@pytest.mark.every(3)
@pytest.mark.parametrize("content", [b"", b"noise" * 100, None])
@pytest.mark.parametrize(("family", "component"), COMPONENTS[:3])
def test_damaged_files_are_refused_by_name(damaged, family, component, content):
    folder, file = damaged(family, component)
    file.write_bytes(file.read_bytes()[:-100] if content is None else content)
    with pytest.raises(ValueError, match=f"{component}/{file.name} is damaged"):
        AutoPipeline.from_pretrained(folder)


@pytest.mark.parametrize("component", ["vq", "text_encoder"])
def test_a_pipe_in_the_place_of_weights_is_not_waited_for(damaged, component):
    folder, file = damaged("llamagen", component)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(ValueError, match=f"{component}/{file.name} is a pipe or a device: give a file"):
        AutoPipeline.from_pretrained(folder)


@pytest.mark.every(3)
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


def test_a_component_that_is_given_is_not_checked(damaged):
    folder, file = damaged("llamagen", "text_encoder")
    file.write_bytes(b"")
    pipe = AutoPipeline.from_pretrained(folder, text_encoder=None, tokenizer=None)
    assert pipe.text_encoder is None


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """Folders of a pipeline in shards, by their variant."""
    root = tmp_path_factory.mktemp("sharded")
    for variant in (None, "fp16"):
        tiny_llamagen.text_pipeline().save_pretrained(root / str(variant), variant=variant, max_shard_size="20KB")
    return root


@pytest.mark.parametrize("asked", [None, "bf16"])
@pytest.mark.parametrize("part", ["transformer", "text_encoder"])
def test_a_folder_with_another_variant_alone_names_it(sharded, folders, tmp_path, part, asked):
    folder = shutil.copytree(folders / "llamagen", tmp_path / "copy")
    shutil.rmtree(folder / part)
    shutil.copytree(sharded / "fp16" / part, folder / part)
    with pytest.raises(ValueError, match=f"{part} holds weights of the variant 'fp16' only: give variant='fp16'"):
        AutoPipeline.from_pretrained(folder, variant=asked)


@pytest.mark.every(2)
@pytest.mark.parametrize("variant", [None, "fp16"])
@pytest.mark.parametrize("part", ["transformer", "text_encoder", "vq"])
def test_shards_without_their_index_or_without_one_of_them_are_refused(sharded, tmp_path, part, variant):
    folder = shutil.copytree(sharded / str(variant), tmp_path / "copy")
    (index,) = (folder / part).glob("*.index*.json")
    index.rename(tmp_path / index.name)
    with pytest.raises(
        ValueError, match=f"{part} holds .*-00001-of-.*safetensors but not {index.name}: get all files"
    ):
        AutoPipeline.from_pretrained(folder, variant=variant)
    (tmp_path / index.name).rename(index)
    (shard,) = (folder / part).glob("*-00002-of-*.safetensors")
    shard.unlink()
    with pytest.raises(ValueError, match=f"{shard.name} is missing, which {index.name} names: get all files"):
        AutoPipeline.from_pretrained(folder, variant=variant)
