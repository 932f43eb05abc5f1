"""`python -m arimage_icons.package`: a folder of a pipeline from the weights of a run."""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import T5Config, T5EncoderModel

from arimage import (
    ARPGPipeline,
    ARPGTransformer,
    LlamaGenPipeline,
    LlamaGenTransformer,
    NeighbourModel,
    PatchVQModel,
    SpeculativeJacobiDecoding,
)
from arimage.decoding import decoding_from_name
from arimage.pipelines.base import ARImagePipeline
from arimage.pipelines.text.known import KnownCaptions
from arimage.training.acceleration.neighbours import fit_neighbours
from arimage.training.saving import save_float16

from .data import load_packed
from .words import STYLES, word_tokenizer


PIPELINES = {"arpg": (ARPGPipeline, ARPGTransformer), "llamagen": (LlamaGenPipeline, LlamaGenTransformer)}
# Nothing is cut from the distribution: temperature 1, all tokens.
SAMPLING = {"guidance_scale": 2.0, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
# Patches whose pixels all lie so near to paper or ink are plain: their means have a grain that an eye sees.
PLAIN = 0.9
CORRECTIONS = 4
DECODINGS = {"arpg": {"window": 64}, "llamagen": {"window": 64, "init": "above"}}
PATTERNS = ["{style} {picture}", "{style} {style} {picture}", "{picture} icon", "{style} {picture} icon"]


def plain(codebook: torch.Tensor) -> torch.Tensor:
    """Patches [V, D] in [-1, 1], those that are almost paper or ink as pure white or black."""
    sign = codebook.sign()
    return torch.where(((codebook * sign[:, :1]) > PLAIN).all(1, keepdim=True), sign, codebook)


def load_run(path: Path) -> tuple[ARImagePipeline, dict]:
    """The pipeline of the weights that `arimage_icons.train` wrote, in float32, and what the run says about itself."""
    with safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["about"])
        weights = {name: file.get_tensor(name).float() for name in file.keys()}
    codebook = weights.pop("codebook")
    vq = PatchVQModel(int(codebook.shape[1] ** 0.5), len(codebook), channels=1)
    vq.load_state_dict({"codebook.weight": plain(codebook)})
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
    pipe.known_captions = KnownCaptions(
        {caption: [] for caption in about["captions"]}, {"style": [*STYLES]}, list(PATTERNS)
    )
    return pipe, about


@torch.no_grad()
def add_neighbours(pipe: LlamaGenPipeline, packed: Path) -> None:
    """Fit a model of neighbours to the training pictures, and let the default decoding correct its drafts by it."""
    assert isinstance(pipe.decoding, SpeculativeJacobiDecoding)
    pictures = torch.from_numpy(load_packed(packed)[0]["train"]).split(512)
    tokens = torch.cat([pipe.vq.encode((some[:, None] / 127.5 - 1).expand(-1, 3, -1, -1)) for some in pictures])
    with torch.enable_grad():
        pipe.register_modules(neighbours=fit_neighbours(tokens, pipe.vq.config.codebook_size))
    pipe.decoding = replace(pipe.decoding, corrections=CORRECTIONS)


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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("weights", type=Path, help="the .safetensors file of a run")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument(
        "--neighbours", type=Path, help="what `arimage_icons.pack` wrote, for a model of neighbours of a raster model"
    )
    given = parser.parse_args()
    built = load_run(given.weights)[0]
    if given.neighbours is not None:
        if not isinstance(built, LlamaGenPipeline):
            parser.error("--neighbours is for raster models: leave it out")
        add_neighbours(built, given.neighbours)
    with torch.no_grad():
        save_float16(built, given.out)
    name_modules(given.out)
