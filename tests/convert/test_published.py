import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError

from arimage.convert import fetch
from arimage.convert.fetch import load_published
from arimage.convert.llamagen import NUM_HEADS
from arimage.convert.registry import PUBLISHED, PublishedCheckpoint
from arimage.models.transformer_llamagen import LlamaGenTransformer
from arimage.models.transformer_var import VARTransformer


FIXTURES = Path(__file__).parents[1] / "fixtures"
TINY = PublishedCheckpoint(
    name="tiny",
    family="llamagen",
    repository="llamagen_c2i",
    transformer_file="c2i_tiny.pt",
    tokenizer_repository="llamagen_c2i",
    tokenizer_file="vq_ds4_c2i.pt",
    image_size=24,
    num_heads=4,
    parameters=100_000,
)
TINY_VAR = PublishedCheckpoint(
    name="tiny-var",
    family="var",
    repository="var",
    transformer_file="var_d2.pth",
    tokenizer_repository="var",
    tokenizer_file="vae_ch32v64z8.pth",
    image_size=16,
    parameters=100_000,
)
LLAMAGEN, VAR = ([entry for entry in PUBLISHED if entry.family == family] for family in ("llamagen", "var"))


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for the Hub that holds the fixtures, and the list of what was asked of it."""
    asked = []

    def download(repository, file, **kwargs):
        asked.append((repository, file))
        return str(FIXTURES / repository / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr(fetch, "PUBLISHED", [TINY, TINY_VAR])
    return asked


@pytest.fixture
def offline(monkeypatch):
    def fail(*args, **kwargs):
        raise LocalEntryNotFoundError("many words")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fail)
    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)


@pytest.mark.parametrize("entry", [TINY, TINY_VAR], ids=lambda entry: entry.name)
def test_a_published_checkpoint_is_fetched_and_converted_once(entry, hub, tmp_path):
    folder = load_published(entry.name, cache_dir=tmp_path)
    assert folder == tmp_path / "arimage" / entry.name
    assert (folder / "model_index.json").is_file()
    assert hub == [(entry.repository, entry.transformer_file), (entry.repository, entry.tokenizer_file)]
    written = (folder / "model_index.json").stat().st_mtime_ns
    assert load_published(entry.name, cache_dir=tmp_path) == folder
    assert len(hub) == 2 and (folder / "model_index.json").stat().st_mtime_ns == written


def test_token_revision_and_force_download_reach_the_hub(monkeypatch, tmp_path):
    asked, converted = [], []

    def download(repository, file="text encoder", **kwargs):
        asked.append((repository, kwargs["token"], kwargs.get("revision"), kwargs["force_download"]))
        return file

    def convert(*files, out, **kwargs):
        assert not out.exists()
        out.mkdir()
        (out / "model_index.json").write_text(str(len(converted)))
        converted.append(out)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr("arimage.convert.llamagen.convert_llamagen", convert)
    name = "llamagen-t2i-xl-512"
    for force_download in (False, False, True):
        options = {"token": "secret", "revision": "refs/pr/1", "force_download": force_download}
        folder = load_published(name, cache_dir=tmp_path, **options)
    assert folder.name == f"{name}@refs--pr--1" and converted == [folder, folder]
    # The revision is one of the checkpoint's repository.
    revisions = {"peizesun/llamagen_t2i": "refs/pr/1", "google/flan-t5-xl": None}
    for i, (repository, token, revision, forced) in enumerate(asked):
        assert (token, revision, forced) == ("secret", revisions[repository], i >= 3)
    assert len(asked) == 6
    assert load_published(name, cache_dir=tmp_path, force_download=False, revision=None) != folder


def test_the_hubs_home_is_the_default_place(hub, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path))
    assert load_published("tiny") == tmp_path / "arimage" / "tiny"


def test_an_unknown_name_is_refused_with_those_that_there_are():
    with pytest.raises(ValueError, match=r"'llamagen-b'.*llamagen-c2i-b-256.*llamagen-t2i-xl-512"):
        load_published("llamagen-b")


@pytest.mark.parametrize("entry", PUBLISHED, ids=lambda entry: entry.name)
def test_offline_one_sentence_names_the_files_and_how_to_convert_them(entry, offline, tmp_path):
    with pytest.raises(ConnectionError) as refusal:
        load_published(entry.name, cache_dir=tmp_path)
    said = str(refusal.value)
    for part in (entry.repository, entry.transformer_file, entry.tokenizer_file):
        assert part in said
    assert f"arimage convert {entry.family} " in said and "\n" not in said
    assert (f"--image-size {entry.image_size}" in said) == (entry.family == "llamagen")
    assert ("google/flan-t5-xl" in said) == (entry.text_encoder_repository is not None)
    assert not (tmp_path / "arimage" / entry.name).exists()


def test_a_text_model_is_converted_with_its_text_encoder_and_what_its_files_do_not_tell(monkeypatch, tmp_path):
    asked, converted = [], []

    def download(repository, file="text encoder", **kwargs):
        asked.append((repository, kwargs["cache_dir"], kwargs["local_files_only"]))
        return file

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr(
        "arimage.convert.llamagen.convert_llamagen", lambda *args, **kwargs: converted.append((args, kwargs))
    )
    out = load_published("llamagen-t2i-xl-512", cache_dir=tmp_path, local_files_only=True)
    repositories = ("peizesun/llamagen_t2i", "peizesun/llamagen_t2i", "google/flan-t5-xl")
    assert asked == [(repository, tmp_path, True) for repository in repositories]
    files = ("t2i_XL_stage2_512.pt", "vq_ds16_t2i.pt", 512)
    assert converted == [(files, {"num_heads": 20, "text_encoder": "text encoder", "out": out})]


@pytest.mark.parametrize("entry", VAR, ids=lambda entry: entry.name)
def test_the_table_agrees_with_the_sizes_of_next_scale_models(entry):
    depth = int(entry.name.split("-")[1].removeprefix("d"))
    scales = {256: (1, 2, 3, 4, 5, 6, 8, 10, 13, 16), 512: (1, 2, 3, 4, 6, 9, 13, 18, 24, 32)}[entry.image_size]
    with torch.device("meta"):
        transformer = VARTransformer(
            scales=scales,
            hidden_size=64 * depth,
            num_layers=depth,
            num_attention_heads=depth,
            shared_adaln=entry.image_size == 512,
        )
    assert sum(p.numel() for p in transformer.parameters()) == pytest.approx(entry.parameters, rel=5e-4)
    assert entry.image_size == 16 * scales[-1]


@pytest.mark.parametrize("entry", LLAMAGEN, ids=lambda entry: entry.name)
def test_the_table_agrees_with_the_sizes_of_the_models(entry):
    size = entry.name.split("-")[2]
    hidden_size, num_layers = {"b": (768, 12), "l": (1024, 24), "xl": (1280, 36), "xxl": (1536, 48), "3b": (3200, 24)}[
        size
    ]
    text = entry.text_encoder_repository is not None
    with torch.device("meta"):
        transformer = LlamaGenTransformer(
            conditioning="text" if text else "class",
            hidden_size=hidden_size,
            intermediate_size=-(-(8 * hidden_size // 3) // 256) * 256,
            num_layers=num_layers,
            num_attention_heads=entry.num_heads,
            num_condition_tokens=120 if text else 1,
        )
    assert entry.num_heads == NUM_HEADS[hidden_size, num_layers]
    assert sum(p.numel() for p in transformer.parameters()) == pytest.approx(entry.parameters, rel=5e-4)
    assert str(entry.image_size) in entry.transformer_file


def test_listing_the_table_does_not_import_torch():
    code = "import sys, arimage.convert.registry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
