"""What a folder or repository keeps of a pipeline, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from pipelines.llamagen import tiny as tiny_llamagen

from arimage import AutoPipeline, LlamaGenPipeline, SpeculativeJacobiDecoding, auto
from arimage.auto import packaged_models, published_models
from arimage.pipelines.saving import mixin


DECODING = SpeculativeJacobiDecoding(window=5, refresh="gumbel", init="above")
DEFAULTS = {"guidance_scale": 2.5, "temperature": 0.9, "top_k": 7, "top_p": 0.95, "min_p": 0.01}
PROMPTS = ["a red heart", "Tree &amp; book"]


def install(monkeypatch, folder):
    """Let the models in a folder be the installed ones."""
    models = {index.parent.name: index.parent for index in folder.glob("*/model_index.json")}
    monkeypatch.setattr(auto, "installed_models", lambda: models)


def generate(pipe, **arguments):
    pipe.set_progress_bar_config(disable=True)
    arguments = {"prompt": PROMPTS} | arguments
    return pipe(**arguments, generator=torch.Generator().manual_seed(2), output_type="pt")


@pytest.fixture(scope="module")
def pipe():
    pipe = tiny_llamagen.text_pipeline()
    pipe.decoding = DECODING
    pipe.generation_config.update(DEFAULTS)
    return pipe


@pytest.fixture(scope="module")
def folder(pipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "pipe"
    pipe.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def cache(folder, tmp_path_factory):
    """A cache of the Hub that holds the repository someone/hearts."""
    cache = tmp_path_factory.mktemp("hub")
    repository = cache / "models--someone--hearts"
    shutil.copytree(folder, repository / "snapshots" / ("a" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    return cache


def test_the_defaults_lie_in_a_readable_file(folder):
    config = json.loads((folder / "generation_config.json").read_text())
    assert config.pop("decoding") == {
        "method": "SpeculativeJacobiDecoding",
        "window": 5,
        "refresh": "gumbel",
        "init": "above",
        "acceptance": {"method": "ExactAcceptance"},
        "relax": 1.0,
        "reuse": None,
        "levels": 0,
        "corrections": 0,
    }
    assert config == DEFAULTS


@pytest.mark.every(2)
@pytest.mark.parametrize(("loader", "keyword"), [(LlamaGenPipeline, "torch_dtype"), (AutoPipeline, "dtype")])
def test_a_number_format_may_be_named(folder, loader, keyword):
    for name, expected in {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}.items():
        loaded = loader.from_pretrained(folder, **{keyword: name})
        assert {part.dtype for part in (loaded.transformer, loaded.vq, loaded.text_encoder)} == {expected}
    loaded = loader.from_pretrained(folder, **{keyword: {"transformer": "bfloat16"}})
    assert loaded.transformer.dtype == torch.bfloat16 and loaded.vq.dtype == torch.float32
    assert loader.from_pretrained(folder, **{keyword: None}).transformer.dtype == torch.float32


@pytest.mark.parametrize("dtype", ["fp16", "auto", "torch.nonesuch", torch.int8, 16, {"transformer": "fp16"}])
def test_what_is_no_number_format_is_refused_before_anything_is_downloaded(pipe, folder, monkeypatch, dtype):
    monkeypatch.setattr("arimage.published.fetch.load_published", lambda *_, **__: pytest.fail("it was downloaded"))
    monkeypatch.setattr(mixin, "snapshot_download", lambda *_, **__: pytest.fail("it was downloaded"))
    for load in (
        lambda: AutoPipeline.from_pretrained(folder, dtype=dtype),
        lambda: AutoPipeline.from_pretrained("janus-pro-1b", torch_dtype=dtype),
        lambda: LlamaGenPipeline.from_pretrained("someone/tails", dtype=dtype),
        lambda: LlamaGenPipeline.from_pipe(pipe, dtype=dtype),
    ):
        with pytest.raises(
            ValueError, match='dtype is .*: give a torch.dtype such as torch.bfloat16, or its name, "bfl'
        ):
            load()


def test_a_repository_is_loaded_from_the_cache_of_the_hub(pipe, cache):
    loaded = AutoPipeline.from_pretrained("someone/hearts", cache_dir=cache)
    assert loaded.decoding == DECODING and loaded.generation_config == DEFAULTS
    assert torch.equal(generate(loaded).tokens, generate(pipe).tokens)
    by_class = LlamaGenPipeline.from_pretrained("someone/hearts", cache_dir=cache, dtype=torch.bfloat16)
    assert by_class.transformer.dtype == torch.bfloat16


@pytest.mark.parametrize("variant", [None, "fp16"])
def test_weights_of_one_variant_are_downloaded(folder, monkeypatch, variant):
    plain = ("a/model.safetensors", "a/model-00001-of-00002.safetensors")
    half = ("a/model.fp16.safetensors", "a/model.fp16-00001-of-00002.safetensors")
    others = ("a/model.safetensors.index.json", "a/tokenizer.json", "a/tokenizer.model", "model_index.json")
    fetched, asked = [], []

    def download(repository, allow_patterns, ignore_patterns, **options):
        files = (*plain, *half, *others, "a/pytorch_model.bin", "a/code.py")
        fetched.extend(filter_repo_objects(files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns))
        asked.append(options)
        return str(folder)

    monkeypatch.setattr(mixin, "snapshot_download", download)
    options = {"revision": "main", "local_files_only": True}
    LlamaGenPipeline.download("someone/hearts", variant=variant, **options)
    assert set(fetched) == {*others, *(plain if variant is None else half)} and asked == [options]


def test_a_repository_out_of_reach_is_an_os_error(tmp_path):
    with pytest.raises(OSError):
        AutoPipeline.from_pretrained("someone/tails", cache_dir=tmp_path)


def test_a_published_name_is_converted_and_loaded(folder, monkeypatch, tmp_path):
    asked = []

    def load(name, **options):
        asked.append((name, options))
        return folder

    monkeypatch.setattr("arimage.published.fetch.load_published", load)
    loaded = AutoPipeline.from_pretrained("llamagen-t2i-xl-256", cache_dir=tmp_path, local_files_only=True)
    assert loaded.decoding == DECODING
    assert asked == [("llamagen-t2i-xl-256", {"cache_dir": tmp_path, "local_files_only": True})]


def test_an_installed_name_is_a_folder_of_a_distribution(folder, monkeypatch, tmp_path):
    shutil.copytree(folder, tmp_path / "hearts")
    (tmp_path / "half-written").mkdir()
    install(monkeypatch, tmp_path)
    assert auto.packaged_models() == ["hearts"]
    assert AutoPipeline.from_pretrained("hearts").decoding == DECODING


def test_components_that_are_stored_with_another_installed_model(folder, monkeypatch, tmp_path):
    shutil.copytree(folder, tmp_path / "hearts")
    shutil.copytree(folder, tmp_path / "tails")
    shared = ["text_encoder", "tokenizer", "vq"]
    for name in shared:
        shutil.rmtree(tmp_path / "tails" / name)
    stored = {name: f"hearts/{name}" for name in shared}
    (tmp_path / "tails" / "shared.json").write_text(json.dumps(stored))
    install(monkeypatch, tmp_path)
    whole = AutoPipeline.from_pretrained("hearts", dtype="bfloat16")
    pipe = AutoPipeline.from_pretrained("tails", dtype="bfloat16")
    assert pipe.components.keys() == whole.components.keys() and pipe.decoding == DECODING
    assert Path(pipe.name_or_path).name == "tails"
    for name in ("transformer", "text_encoder", "vq"):
        found, wanted = pipe.components[name].state_dict(), whole.components[name].state_dict()
        assert found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)
    mixed = AutoPipeline.from_pretrained("tails", dtype={"transformer": torch.bfloat16})
    assert mixed.transformer.dtype == torch.bfloat16 and mixed.text_encoder.dtype == mixed.vq.dtype == torch.float32
    given = AutoPipeline.from_pretrained("tails", vq=whole.vq, text_encoder=None)
    assert given.vq is whole.vq and given.text_encoder is None and given.tokenizer is not None
    assert LlamaGenPipeline.from_pretrained(tmp_path / "tails").vq.dtype == torch.float32
    pipe.save_pretrained(tmp_path / "saved")
    assert all((tmp_path / "saved" / name).is_dir() for name in shared)


@pytest.mark.parametrize(("name", "nearest"), [("emoji-llamgen", "emoji-llamagen"), ("Janus-Pro", "janus-pro-1b")])
def test_an_unknown_name_is_refused_with_the_three_nearest(name, nearest):
    with pytest.raises(ValueError, match=f"{name} is neither .*{nearest}") as refusal:
        AutoPipeline.from_pretrained(name)
    known = {*packaged_models(), *published_models()}
    assert len(known.intersection(str(refusal.value).replace(",", "").split())) == 3


@pytest.mark.parametrize("name", ["~/x", "../x", "a/b/c", "x\\y", "owner/x/", "~nobody/x", "./file.txt"])
@pytest.mark.parametrize("loader", [LlamaGenPipeline, AutoPipeline])
def test_a_path_without_a_folder_is_distinguished_from_a_repository(loader, name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.txt").touch()
    with pytest.raises(ValueError) as refusal:
        loader.from_pretrained(name)
    assert str(refusal.value).startswith(f"{name} is not a folder: check the path")


@pytest.mark.parametrize("loader", [LlamaGenPipeline, AutoPipeline])
def test_a_path_may_begin_with_the_home_folder(folder, loader, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    loaded = loader.from_pretrained(f"~/{folder.name}")
    assert loaded.generation_config == DEFAULTS and loaded.name_or_path == str(folder)


def test_pickled_weights_are_not_written(tmp_path):
    pipe = tiny_llamagen.text_pipeline()
    for options in ({"safe_serialization": False}, {"safe_serialization": False, "variant": "fp16"}):
        with pytest.raises(ValueError, match="safe_serialization is False"):
            pipe.save_pretrained(tmp_path / "saved", **options)
    with pytest.raises(ValueError, match="safe_serialization is False"):
        pipe.save_pretrained(tmp_path / "saved", False)
    assert not list(tmp_path.iterdir())


def test_folders_that_hold_no_pipeline_are_refused(tmp_path):
    index = tmp_path / "model_index.json"
    with pytest.raises(ValueError, match="absent"):
        AutoPipeline.from_pretrained(tmp_path / "absent")
    with pytest.raises(ValueError, match="has no model_index.json"):
        AutoPipeline.from_pretrained(tmp_path)
    for content, said in (
        ('{"_class_name": "StableDiffusionPipeline"}', "StableDiffusionPipeline"),
        ('{"transformer": ["diffusers", "X"]}', "model_index.json"),
    ):
        index.write_text(content)
        with pytest.raises(ValueError, match=said):
            AutoPipeline.from_pretrained(tmp_path)


@pytest.mark.parametrize("given", [None, "emoji-llamagen", torch.nn.Linear(1, 1), {}], ids=str)
def test_only_a_pipeline_becomes_another_one(given):
    with pytest.raises(ValueError, match="from_pipe"):
        LlamaGenPipeline.from_pipe(given)


def test_another_pipeline_takes_one_dtype():
    pipe = tiny_llamagen.class_pipeline()
    with pytest.raises(ValueError, match="dtype"):
        LlamaGenPipeline.from_pipe(pipe, dtype={"transformer": torch.bfloat16})
    assert pipe.transformer.dtype == torch.float32
