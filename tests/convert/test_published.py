"""From a name to an image: every published checkpoint through a stand-in for the Hub."""

import re
import shlex
import shutil
from collections import namedtuple
from dataclasses import replace
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path

import published_layouts as layouts
import pytest
import torch
import typer
from huggingface_hub import snapshot_download
from pipelines.chameleon.published import chameleon_tokenizer
from stand_in_hub import TOKEN, StandInHub
from transformers import T5Config, T5EncoderModel

from arimage import AutoPipeline
from arimage.cli import main as cli
from arimage.pipelines.arpg.transformer_arpg import ARPGTransformer
from arimage.pipelines.base import ARImagePipeline
from arimage.pipelines.cosmos import family as cosmos
from arimage.pipelines.cosmos.fsq_cosmos import CosmosVideoTokenizer
from arimage.pipelines.lpd.transformer_lpd import LPDTransformer
from arimage.pipelines.lumina_dimoo.pipeline_lumina_dimoo import LuminaDiMOOPipeline
from arimage.pipelines.published_parts import LLAMAGEN_VQ, T5_XL_ENCODER
from arimage.pipelines.randar.transformer_randar import RandARTransformer
from arimage.pipelines.var import family as var
from arimage.published import fetch, registry
from arimage.published.fetch import load_published
from arimage.published.registry import PUBLISHED, find_published
from arimage.tokenizers.vq_llamagen import LlamaGenVQModel
from arimage.tokenizers.vq_var import VARVQModel


ANY_ORDER = [entry for entry in PUBLISHED if entry.family in ("arpg", "lpd", "randar")]
# Their repositories hold several models.
SEVERAL = ("rar", "llamagen", "var", "infinitystar", "arpg", "randar", "halton_maskgit")
# Name or Hub id: what publishes a tiny one, how it is called, the class of its pipeline, and what the tiny files need
# in place of the published settings.
MODELS = {}
for file in sorted(Path(__file__).parents[1].glob("pipelines/*/published.py")):
    MODELS |= import_module(f"pipelines.{file.parent.name}.published").MODELS
TINY = {find_published(name).name: options for name, (*_, options) in MODELS.items() if options}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A running stand-in, whose client keeps what it downloads in `tmp_path / "home"`."""
    Usage = namedtuple("Usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**12))
    table = [replace(entry, options=TINY.get(entry.name, entry.options)) for entry in PUBLISHED]
    monkeypatch.setattr(registry, "PUBLISHED", table)
    with StandInHub().running(monkeypatch, tmp_path / "home") as hub:
        yield hub


@pytest.fixture
def publish(hub, tmp_path):
    """Put the tiny model of a name on the stand-in."""

    def publish(name):
        root = tmp_path / "published"
        root.mkdir()
        MODELS[name][0](root)
        hub.repositories |= {f"{p.parent.name}/{p.name}": p for p in root.glob("*/*") if p.is_dir()}
        return hub

    return publish


@pytest.fixture
def janus(publish):
    return publish("janus-pro-1b")


def half_written(tmp_path):
    """What is in the folder of converted pipelines besides locks, whole pipelines and Meta's tokenizer."""
    paths = (tmp_path / "home" / "arimage").iterdir()
    others = {path for path in paths if path.suffix != ".lock" and path.name != "chameleon-tokenizer"}
    return [path for path in others if not (path / "model_index.json").is_file() or path.suffix == ".partial"]


# From a name to an image


# Laid out or downloaded as another. The tests of their families convert each.
ALIKE = (
    "janus-1.3b", "deepseek-ai/Janus-Pro-7B", "Alpha-VLLM/Lumina-mGPT-7B-768", "emu3-gen", "BAAI/Emu3-Gen-hf",
    "emu3.5-image", "glm-image", "mammothmoda2-preview", "anole-7b", "leloy/Anole-7b-v0.1-hf", "infinitystar-480p",
    "randar-0.3b-256",
)  # fmt: skip


@pytest.mark.every(6)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in ALIKE else name for name in MODELS]
)
def test_a_name_is_listed_downloaded_converted_once_and_generates(name, publish, tmp_path, caplog):
    hub, entry = publish(name), find_published(name)
    if entry.requested:
        chameleon_tokenizer(tmp_path / "home" / "arimage" / "chameleon-tokenizer")
    pipe = AutoPipeline.from_pretrained(name)
    _, call, class_name, _ = MODELS[name]
    images = pipe(**call, generator=torch.Generator().manual_seed(0), return_dict=False)[0]
    image = images[0][0] if pipe.abilities.generates_video else images[0]
    assert type(pipe).__name__ == class_name and image.width >= 16
    # Nothing that the converter does not read is downloaded.
    downloaded = hub.downloaded()
    for file in downloaded:
        repository, path = re.fullmatch(r"([^/]+/[^/]+)/(.*)", file).groups()
        content = (hub.repositories[repository] / path).read_bytes()
        assert content != layouts.UNUSED or path.endswith((".json", ".chk", ".yaml", ".txt"))
    # What it takes is logged once, before the first file.
    (said,) = [record.getMessage() for record in caplog.records if record.name == fetch.__name__]
    size = sum((hub.repositories["/".join(f.split("/")[:2])] / f.split("/", 2)[2]).stat().st_size for f in downloaded)
    assert said.startswith(f"{entry.name} ") and f"{size / 1e6:.1f} MB to download" in said

    hub.requests.clear()
    again = AutoPipeline.from_pretrained(name if entry.family in SEVERAL else entry.repository)
    assert hub.requests == [] and type(again) is type(pipe) and not half_written(tmp_path)


def test_what_is_downloaded_already_is_not_counted(janus, tmp_path, caplog):
    # As `hf download` does it.
    snapshot_download("deepseek-ai/Janus-Pro-1B")
    janus.requests.clear()
    load_published("janus-pro-1b")
    assert janus.downloaded() == [] and "0.0 MB to download, 4.2 GB more of disk" in caplog.text


def test_the_table_tells_where_the_hub_does_not(janus, monkeypatch, tmp_path, caplog):
    snapshot_download("deepseek-ai/Janus-Pro-1B")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert (load_published("janus-pro-1b") / "model_index.json").is_file()
    assert "4.2 GB to download" in caplog.text and "2.1 billion parameters take 4.2 GB" in caplog.text
    assert "8.3 GB in float32" in caplog.text


def test_a_disk_that_is_too_small_is_refused_before_the_download(janus, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: namedtuple("Usage", "free")(4 * 10**9))
    with pytest.raises(OSError, match=r"janus-pro-1b needs 4.2 GB of disk in .* where 4.0 GB are free"):
        load_published("janus-pro-1b")
    assert janus.downloaded() == []


# Options


def test_options_of_the_hub_are_passed_on(janus, tmp_path):
    janus.gated.add("deepseek-ai/Janus-Pro-1B")
    janus.revisions.add("refs/pr/1")
    options = {"token": TOKEN, "revision": "refs/pr/1", "cache_dir": tmp_path / "elsewhere"}
    pipe = AutoPipeline.from_pretrained("janus-pro-1b", **options)
    assert type(pipe).__name__ == "JanusPipeline" and TOKEN in janus.tokens
    folder = tmp_path / "elsewhere" / "arimage" / "janus-pro-1b@refs--pr--1"
    assert (folder / "model_index.json").is_file() and not (tmp_path / "home" / "hub").exists()

    janus.requests.clear()
    written = (folder / "model_index.json").stat().st_mtime_ns
    assert load_published("janus-pro-1b", **options) == folder and janus.requests == []
    assert load_published("janus-pro-1b", **options, local_files_only=True, force_download=False) == folder
    load_published("janus-pro-1b", **options, force_download=True)
    assert "deepseek-ai/Janus-Pro-1B/pytorch_model.bin" in janus.downloaded()
    assert (folder / "model_index.json").stat().st_mtime_ns > written
    # Another revision has its own folder.
    assert load_published("janus-pro-1b", token=TOKEN, cache_dir=tmp_path / "elsewhere") != folder


def test_what_a_killed_conversion_left_is_removed(janus, tmp_path):
    folder = load_published("janus-pro-1b")
    part = folder.with_name(".janus-pro-1b.1a2b3c4d.partial")
    part.mkdir()
    (folder / "model_index.json").unlink()
    assert load_published("janus-pro-1b") == folder and (folder / "model_index.json").is_file()
    assert not part.exists() and not half_written(tmp_path)


def test_local_files_only_converts_what_is_there_and_downloads_nothing(janus, caplog):
    with pytest.raises(ConnectionError, match="not in the cache"):
        load_published("janus-pro-1b", local_files_only=True)
    assert janus.requests == [] and caplog.text == ""
    snapshot_download("deepseek-ai/Janus-Pro-1B")
    janus.requests.clear()
    assert load_published("janus-pro-1b", local_files_only=True).name == "janus-pro-1b"
    assert janus.requests == []


# What goes wrong


@pytest.mark.parametrize("token", [None, "hf_of_somebody_else"])
def test_a_gated_repository_is_explained(janus, token, tmp_path):
    janus.gated |= {"deepseek-ai/Janus-Pro-1B", "somebody/hearts"}
    janus.repositories["somebody/hearts"] = tmp_path
    with pytest.raises(PermissionError, match="Janus-Pro-1B is gated.*hf auth login.*token=") as refusal:
        AutoPipeline.from_pretrained("janus-pro-1b", token=token)
    assert "\n" not in str(refusal.value) and not half_written(tmp_path)
    with pytest.raises(PermissionError, match="somebody/hearts is gated"):
        AutoPipeline.from_pretrained("somebody/hearts", token=token)


def test_what_the_hub_does_not_have_is_explained(publish, tmp_path):
    hub = publish("lumina-mgpt-2")
    checkpoint = hub.repositories["ai-forever/MoVQGAN"] / "movqgan_270M.ckpt"
    checkpoint.rename(checkpoint.with_name("movqgan.ckpt"))
    for name, options, said in (
        ("lumina-mgpt-2", {}, "ai-forever/MoVQGAN has no movqgan_270M.ckpt"),
        ("lumina-mgpt-2", {"revision": "v9"}, "has no revision 'v9'"),
        ("janus-pro-1b", {}, "deepseek-ai/Janus-Pro-1B does not exist on .* or is private"),
        ("somebody/gone", {}, "somebody/gone does not exist"),
    ):
        with pytest.raises(FileNotFoundError, match=said):
            AutoPipeline.from_pretrained(name, **options)


def test_a_broken_connection_continues_where_it_broke(janus, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 2**16)
    weights = janus.repositories["deepseek-ai/Janus-Pro-1B"] / "pytorch_model.bin"
    janus.cut = weights.stat().st_size // 2
    load_published("janus-pro-1b")
    first, second = [r for method, file, r in janus.requests if method == "GET" and file.endswith(weights.name)]
    assert first is None and int(second.removeprefix("bytes=").removesuffix("-")) > 2**16


def test_an_interrupted_download_keeps_what_is_complete(publish, tmp_path):
    hub = publish("deepseek-ai/Janus-Pro-7B")
    hub.failing.add("deepseek-ai/Janus-Pro-7B/pytorch_model-00002-of-00002.bin")
    with pytest.raises(ConnectionError, match="fails with 500 for deepseek-ai/Janus-Pro-7B: try again later, or copy"):
        load_published("janus-pro-7b")
    assert not half_written(tmp_path)
    (snapshot,) = (tmp_path / "home" / "hub").glob("*/snapshots/*")
    complete = {f"deepseek-ai/Janus-Pro-7B/{path.name}" for path in snapshot.iterdir()}
    hub.failing.clear()
    hub.requests.clear()
    load_published("janus-pro-7b")
    assert complete and complete.isdisjoint(hub.downloaded()) and not half_written(tmp_path)


@pytest.mark.every(2)
@pytest.mark.parametrize("force_download", [False, True])
def test_an_interrupted_conversion_leaves_nothing_and_starts_again(janus, monkeypatch, force_download, tmp_path):
    if force_download:
        load_published("janus-pro-1b")
    with monkeypatch.context() as patch:

        def save(pipeline, folder, **options):
            (folder / "model_index.json").write_text("{}")
            raise KeyboardInterrupt

        patch.setattr(ARImagePipeline, "save_pretrained", save)
        with pytest.raises(KeyboardInterrupt):
            load_published("janus-pro-1b", force_download=force_download)
    assert not half_written(tmp_path)
    janus.requests.clear()
    folder = load_published("janus-pro-1b")
    assert (folder / "model" / "config.json").is_file() and janus.downloaded() == []


# Names


def test_lumina_mgpt_1_says_how_to_get_its_tokenizer(publish, tmp_path):
    hub = publish("lumina-mgpt-7b-512")
    with pytest.raises(FileNotFoundError) as refusal:
        AutoPipeline.from_pretrained("lumina-mgpt-7b-512")
    for part in ("ai.meta.com", "vqgan.ckpt", str(tmp_path / "home" / "arimage" / "chameleon-tokenizer"), "anole-7b"):
        assert part in str(refusal.value)
    assert hub.requests == []


def test_the_authors_repository_of_lumina_dimoo_is_refused_before_its_weights_are_downloaded(publish):
    hub = publish("lumina-dimoo")
    with pytest.raises(ValueError, match="arimage convert lumina-dimoo"):
        LuminaDiMOOPipeline.from_pretrained("Alpha-VLLM/Lumina-DiMOO")
    assert hub.downloaded() == ["Alpha-VLLM/Lumina-DiMOO/model_index.json"]


@pytest.mark.parametrize("name", registry.INSTEAD)
def test_repositories_that_generate_no_images_say_what_does(name):
    with pytest.raises(ValueError, match=f"^{name} .*: give ") as refusal:
        AutoPipeline.from_pretrained(name)
    remedy = str(refusal.value).partition(": give ")[2]
    instead = re.findall(r"[a-z0-9.]+(?:-[a-z0-9.]+)+", remedy)
    assert "`arimage convert" in remedy or (instead and all(find_published(each.rstrip(".")) for each in instead))


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("config.json", '{"model_type": "multi_modality"}', "has no model_index.json: .*arimage convert janus"),
        ("config.json", '{"model_type": "chameleon"}', "has no model_index.json: .*arimage convert lumina-mgpt"),
        ("config.json", '{"model_type": "bert"}', "has no model_index.json: .*holds a model of type 'bert'"),
        ("other.json", "{}", "has no model_index.json: .*a name that `arimage models` lists"),
        (
            "model_index.json",
            '{"_class_name": "StableDiffusionPipeline"}',
            "'StableDiffusionPipeline', not one of arimage .* the library that wrote it",
        ),
    ],
)
def test_other_repositories_and_folders_say_what_to_do(hub, file, content, said, tmp_path):
    folder = tmp_path / "somebody" / "else"
    folder.mkdir(parents=True)
    (folder / file).write_text(content)
    hub.repositories["somebody/else"] = folder
    for name in ("somebody/else", folder):
        with pytest.raises(ValueError, match=said):
            AutoPipeline.from_pretrained(name)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("FoundationVision/var", "FoundationVision/var holds several models: give one of var-d16-256, "),
        ("llamagen-b", "'llamagen-b'.*llamagen-c2i-b-256"),
    ],
)
def test_names_of_no_or_several_models_are_answered_with_those_that_there_are(name, said):
    with pytest.raises(ValueError, match=said):
        load_published(name)


@pytest.mark.every(10)
@pytest.mark.parametrize("entry", PUBLISHED, ids=lambda entry: entry.name)
def test_out_of_reach_one_sentence_says_how_to_convert_copied_files(entry, tmp_path, monkeypatch):
    if entry.requested:
        chameleon_tokenizer(tmp_path / "arimage" / "chameleon-tokenizer")
    with pytest.raises(ConnectionError) as refusal:
        load_published(entry.name, cache_dir=tmp_path, local_files_only=True)
    said = str(refusal.value)
    assert entry.repository in said and "\n" not in said
    if not entry.family:
        assert said.endswith("or copy the files here and give the folder")
        return
    command = shlex.split(re.search("`arimage (.*)`", said)[1])
    # The command checks its files before it begins.
    monkeypatch.chdir(tmp_path)
    for files in entry.files.values():
        Path(files.file).touch() if files.file else Path(files.repository.rpartition("/")[2]).mkdir()
    group = typer.main.get_command(cli.app)
    while hasattr(group, "commands"):
        group = group.commands[command.pop(0)]
    parameters = group.make_context("convert", command).params
    for argument, files in entry.files.items():
        assert str(parameters[argument]) in (files.file or files.repository)
    assert parameters.items() >= entry.options.items()
    assert not entry.requested or parameters["tokenizer"] == tmp_path / "arimage" / "chameleon-tokenizer"
    assert not (tmp_path / "arimage" / entry.name).exists()


# The table


@pytest.mark.parametrize("entry", PUBLISHED, ids=lambda entry: entry.name)
def test_the_patterns_of_the_table_match_what_a_converter_needs(entry):
    sizes = []
    for files in entry.files.values():
        listing = layouts.LISTINGS.get(files.repository)
        if listing is None:
            continue
        matched = {n: size for n, size in listing.items() if any(fnmatch(n, pattern) for pattern in files.patterns)}
        assert matched and not any(name.endswith((".py", ".md", ".msgpack", ".png")) for name in matched)
        assert all(
            any(fnmatch(name, pattern) for name in listing) for pattern in files.patterns if pattern != "*.jinja"
        )
        # The weights once, in one format.
        assert len({name.rpartition(".")[2] for name in matched} & {"safetensors", "bin"}) <= 1
        sizes += matched.values()
    listed = all(files.repository in layouts.LISTINGS for files in entry.files.values())
    if listed and None not in sizes:
        assert sum(sizes) == pytest.approx(entry.download, rel=0.02)


def test_names_and_repositories_find_one_entry():
    for entry in PUBLISHED:
        assert find_published(entry.name) is entry
    assert find_published("deepseek-ai/Janus-Pro-7B").name == "janus-pro-7b"
    assert find_published("somebody/else") is None and len({entry.name for entry in PUBLISHED}) == len(PUBLISHED)


@pytest.mark.parametrize("entry", ANY_ORDER, ids=lambda entry: entry.name)
def test_the_table_agrees_with_the_sizes_of_any_order_models(entry):
    names = {"300m": "l", "0.3b": "l", "700m": "xl", "0.7b": "xl", "1b": "xxl"}
    size = entry.name.split("-")[1]
    width, layers = {"l": (1024, 24), "xl": (1280, 36), "xxl": (1536, 48)}[names.get(size, size)]
    transformer, inner = {
        "arpg": (ARPGTransformer, -(-(8 * width // 3) // 256) * 256),
        "lpd": (LPDTransformer, 4 * width),
        "randar": (RandARTransformer, -(-(8 * width // 3) // 256) * 256),
    }[entry.family]
    with torch.device("meta"):
        model = transformer(
            grid_size=entry.image_size // 16,
            hidden_size=width,
            intermediate_size=inner,
            num_layers=layers,
            num_attention_heads=width // 64,
        )
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(entry.parameters, rel=5e-4)


def test_the_table_agrees_with_the_sizes_of_tokenizers_and_text_encoders():
    config = T5Config(
        vocab_size=32128, d_model=2048, d_kv=64, d_ff=5120, num_layers=24, num_heads=32, feed_forward_proj="gated-gelu"
    )
    largest = T5Config(vocab_size=32128, d_model=1024, d_kv=128, d_ff=65536, num_layers=24, num_heads=128)
    with torch.device("meta"):
        models = (
            LlamaGenVQModel(),
            VARVQModel(),
            T5EncoderModel(config),
            CosmosVideoTokenizer(),
            T5EncoderModel(largest),
        )
    sizes = [sum(p.numel() for p in model.parameters()) for model in models]
    expected = (LLAMAGEN_VQ, var.VQ, T5_XL_ENCODER, cosmos.VQ, cosmos.T5_ENCODER)
    assert sizes == [pytest.approx(size, rel=5e-3) for size in expected]


def test_every_checkpoint_has_a_licence_and_the_page_that_names_it():
    for entry in PUBLISHED:
        assert entry.licence and re.fullmatch(r"https://[a-z.]+/\S+", entry.licence_source), entry.name
    # The licence of its code is MIT, that of the weights is not.
    assert all("DeepSeek" in entry.licence for entry in PUBLISHED if entry.family == "janus")


@pytest.mark.parametrize("page", ["choosing", "editing"])
def test_the_guides_give_the_licences_of_the_table(page):
    place, told = 0, 0
    for line in (Path(__file__).parents[2] / f"docs/{page}.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if "| --- |" not in line and "model" in cells:
            place = cells.index("licence") if "licence" in cells else 0
        for entry in PUBLISHED:
            if place and len(cells) > place and f"`{entry.name}`" in line and cells[place] != "the same":
                told += 1
                assert entry.licence in cells[place], entry.name
    assert told >= 5
