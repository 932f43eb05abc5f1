"""Tiny models of Lumina-mGPT and Anole under the names of published files."""

import json
import shutil
import string
from collections.abc import Callable
from pathlib import Path

import published_layouts as layouts
import torch
from pipelines.chameleon import tiny
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

from arimage.convert.folder import load_original_folder


SMALL = {"height": 64, "width": 64}


def chameleon_tokenizer(folder: Path) -> None:
    """Meta's image tokenizer, and a text tokenizer with a token per character."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(tiny.FIXTURE / "tokenizer" / "vqgan.ckpt", folder)
    names = json.loads((tiny.FIXTURE / "tokenizer" / "text_tokenizer.json").read_text())["model"]["vocab"]
    ids = {token: name for name, token in names.items()}
    # The names of these ids serve nothing here.
    characters = dict(enumerate([*string.printable, "ab"], start=8300))
    vocabulary = {name: token for token, name in (ids | characters).items()}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    tokenizer.save(str(folder / "text_tokenizer.json"))


def lumina(repository: str) -> Callable[[Path], None]:
    def write(root: Path) -> None:
        source = root / "source"
        source.mkdir()
        for name in ("config.json", "model.safetensors"):
            shutil.copy(tiny.FIXTURE / name, source)
        if "tokenizer.json" in layouts.LISTINGS[repository]:
            chameleon_tokenizer(source)
            (source / "vqgan.ckpt").unlink()
            _name_as_transformers(source)
        layouts.publish(root, repository, source)

    return write


def _name_as_transformers(folder: Path) -> None:
    (folder / "text_tokenizer.json").rename(folder / "tokenizer.json")
    specials = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(specials))


def lumina_2(root: Path) -> None:
    source = tiny.write_version_2(root / "source")
    (source / "tokenizer_config.json").write_text(json.dumps({"bos_token": None, "eos_token": "</s>"}))
    layouts.publish(root, "Alpha-VLLM/Lumina-mGPT-2.0", source)
    layouts.copy(tiny.MOVQGAN, root / "ai-forever/MoVQGAN/movqgan_270M.ckpt")


def anole(root: Path) -> None:
    source = tiny.write_meta(root / "source")
    chameleon_tokenizer(source / "tokenizer")
    layouts.publish(root, "GAIR/Anole-7b-v0.1", source)


def anole_of_transformers(root: Path) -> None:
    source = root / "source"
    chameleon_tokenizer(source)
    vqgan = torch.load(source / "vqgan.ckpt", weights_only=True)
    vqgan = {f"model.vqmodel.{key}": value for key, value in vqgan.get("state_dict", vqgan).items()}
    (source / "vqgan.ckpt").unlink()
    _name_as_transformers(source)
    shutil.copy(tiny.FIXTURE / "config.json", source)
    save_file(load_original_folder(tiny.FIXTURE) | vqgan, source / "model.safetensors")
    layouts.publish(root, "leloy/Anole-7b-v0.1-hf", source)


MODELS = {
    "lumina-mgpt-7b-512": (
        lumina("Alpha-VLLM/Lumina-mGPT-7B-512"),
        {"prompt": "a cat"} | SMALL,
        "LuminaMGPTPipeline",
        {},
    ),
    "Alpha-VLLM/Lumina-mGPT-7B-768": (
        lumina("Alpha-VLLM/Lumina-mGPT-7B-768"),
        {"prompt": "a cat"} | SMALL,
        "LuminaMGPTPipeline",
        {},
    ),
    "lumina-mgpt-2": (lumina_2, {"prompt": "a cat"} | SMALL, "LuminaMGPTPipeline", {}),
    "anole-7b": (anole, {"prompt": "a cat"}, "AnolePipeline", {"image_size": 64}),
    "leloy/Anole-7b-v0.1-hf": (anole_of_transformers, {"prompt": "a cat"}, "AnolePipeline", {"image_size": 64}),
}
