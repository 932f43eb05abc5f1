"""`python -m arimage_icons.package`: the folder of a packaged model from what `arimage train model` wrote, or from the
weights of the script that trained before it."""

import argparse
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import torch
from safetensors import safe_open
from transformers import T5Config, T5EncoderModel

from arimage import (
    ARPGPipeline,
    ARPGTransformer,
    AutoPipeline,
    LlamaGenPipeline,
    LlamaGenTransformer,
    NeighbourModel,
    PatchVQModel,
    SpeculativeJacobiDecoding,
)
from arimage.decoding import decoding_from_name
from arimage.pipelines.base import ARImagePipeline
from arimage.pipelines.text.known import KnownCaptions
from arimage.training.patches import plain
from arimage.training.saving import save_float16

from .words import STYLES, word_tokenizer


PIPELINES = {"arpg": (ARPGPipeline, ARPGTransformer), "llamagen": (LlamaGenPipeline, LlamaGenTransformer)}
# Nothing is cut from the distribution: temperature 1, all tokens.
SAMPLING = {"guidance_scale": 2.0, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
# The patches of earlier runs, see `PatchSettings`.
PLAIN = 0.9
# For models of neighbours.
CORRECTIONS = 4
DECODINGS = {"arpg": {"window": 64, "init": "common"}, "llamagen": {"window": 64, "init": "above"}}
PATTERNS = ["{style} {picture}", "{style} {style} {picture}", "{picture} icon", "{style} {picture} icon"]


def known(names: Iterable[str]) -> KnownCaptions:
    """What a model knows that was trained on icons with these names."""
    return KnownCaptions({name: [] for name in sorted(set(names))}, {"style": [*STYLES]}, list(PATTERNS))


def load_run(path: Path) -> tuple[ARImagePipeline, dict]:
    """The pipeline of the weights that the earlier script wrote, in float32, and what the run says about itself."""
    with safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["about"])
        weights = {name: file.get_tensor(name).float() for name in file.keys()}
    codebook = weights.pop("codebook")
    vq = PatchVQModel(int(codebook.shape[1] ** 0.5), len(codebook), channels=1)
    vq.load_state_dict({"codebook.weight": plain(codebook, PLAIN)})
    tokenizer = word_tokenizer(about["words"][3:])
    if tokenizer.convert_ids_to_tokens([*range(len(tokenizer))]) != about["words"]:
        raise ValueError(f"{path} was trained with other words: package it with the version that trained it")
    build, network = PIPELINES[about["model"]]
    parts = {
        "transformer": network(**about["transformer"] | {"dropout": 0.0}),
        "text_encoder": T5EncoderModel(
            T5Config(vocab_size=len(tokenizer), pad_token_id=0, eos_token_id=1, **about["text"])
        ),
    }
    for name, part in parts.items():
        own = {key.removeprefix(f"{name}."): value for key, value in weights.items() if key.startswith(f"{name}.")}
        shared = {"encoder.embed_tokens.weight"} if name == "text_encoder" else set()
        missing, unexpected = part.load_state_dict(own, strict=False)
        if set(missing) - shared or unexpected:
            raise ValueError(f"{path} does not fit {name}: {missing} are missing, {unexpected} unexpected")
        part.eval()
    pipe = build(vq=vq.eval(), tokenizer=tokenizer, **parts)
    pipe.generation_config = dict(SAMPLING)
    pipe.decoding = decoding_from_name("sjd-coupled", **DECODINGS[about["model"]])
    pipe.known_captions = known(about["captions"])
    return pipe, about


def name_modules(folder: Path) -> None:
    """Let the index of a saved pipeline name modules of arimage, in place of files with one import, which a package
    does without."""
    index = json.loads((folder / "model_index.json").read_text("utf-8"))
    classes = [ARPGTransformer, LlamaGenTransformer, NeighbourModel, PatchVQModel]
    modules = {kind.__name__: kind.__module__ for kind in classes}
    index["_class_name"] = index["_class_name"][1]
    for name, entry in list(index.items()):
        if entry == [None, None]:
            del index[name]
        elif isinstance(entry, list) and entry[1] in modules:
            index[name] = [modules[entry[1]], entry[1]]
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    for file in folder.rglob("*.py"):
        file.unlink()
    for file in folder.rglob("*.safetensors"):
        file.chmod(0o644)


def package(source: Path, out: Path, data: Path | None = None) -> None:
    """Write the folder `out` from the folder of a pipeline, which knows the names in train.parquet of `data`, or from
    the file of an earlier run."""
    if source.is_dir():
        pipe = AutoPipeline.from_pretrained(source, dtype=torch.float32)
        if data is None:
            raise ValueError(f"{source} does not say which names it was trained on: give --data")
        pipe.known_captions = known(pq.read_table(data / "train.parquet", columns=["caption"])["caption"].to_pylist())
    else:
        pipe, _ = load_run(source)
    if pipe.components.get("neighbours") is not None:
        assert isinstance(pipe.decoding, SpeculativeJacobiDecoding)
        pipe.decoding = replace(pipe.decoding, corrections=CORRECTIONS)
    with torch.no_grad():
        save_float16(pipe, out)
    name_modules(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="OUT/best of a training, or the .safetensors file of an earlier one")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--data", type=Path, help="folder with train.parquet, of OUT/best")
    given = parser.parse_args()
    package(given.source, given.out, given.data)
