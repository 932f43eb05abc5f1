"""The tiny random Lumina-DiMOO of the fixtures, as the authors publish it, and what their code computes with it; and
one with fewer codes."""

import json
import lzma
import shutil
from copy import deepcopy
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from diffusers import VQModel
from PIL import Image
from safetensors.torch import load_file
from tiny import CODES, randomise
from transformers import PreTrainedTokenizerFast

from arimage.convert import convert_lumina_dimoo
from arimage.decoding import ConfidenceDecoding, MLCache
from arimage.decoding.contract.noise import Purpose
from arimage.pipelines.lumina_dimoo.pipeline_lumina_dimoo import LuminaDiMOOPipeline
from arimage.pipelines.lumina_dimoo.transformer_lumina_dimoo import LuminaDiMOOTransformer


FOLDER = Path(__file__).parent / "fixtures"
EXPECTED = load_file(FOLDER / "expected.safetensors")
REFERENCE = json.loads((FOLDER / "reference.json").read_text(encoding="utf-8"))
RUNS = [name for name, run in REFERENCE.items() if isinstance(run, dict) and "sequence" in run]

# Of the pipeline in the authors' folder.
AUTHORS_INDEX = {
    "_class_name": "LuminaDiMOOPipeline",
    "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
    "vqvae": ["diffusers", "VQModel"],
}


def write_original(folder: Path) -> Path:
    """A copy of the authors' folder."""
    ignored = shutil.ignore_patterns("expected.safetensors", "reference.json", "*.xz")
    shutil.copytree(FOLDER, folder, ignore=ignored)
    weights = lzma.decompress((FOLDER / "model.safetensors.xz").read_bytes())
    (folder / "model.safetensors").write_bytes(weights)
    return folder


@cache
def converted() -> LuminaDiMOOPipeline:
    """In float32; not to be changed."""
    with TemporaryDirectory() as folder:
        pipe = convert_lumina_dimoo(write_original(Path(folder) / "original"))
    pipe.transformer.float()
    return pipe


@cache
def random_parts() -> dict:
    """The components of a pipeline with 48 codes; not to be changed."""
    shape = {"hidden_size": 32, "num_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    settings = json.loads((FOLDER / "vqvae" / "config.json").read_text()) | {"num_vq_embeddings": CODES}
    return {
        "transformer": randomise(LuminaDiMOOTransformer(num_codes=CODES, **shape), 0),
        "vq": randomise(VQModel.from_config(settings), 1),
        "tokenizer": PreTrainedTokenizerFast.from_pretrained(FOLDER),
    }


def pipeline(image_size: int = 64) -> LuminaDiMOOPipeline:
    """Text to images, by default of 4x4 codes."""
    pipe = LuminaDiMOOPipeline(**deepcopy(random_parts()), image_size=image_size)
    pipe.decoding = "confidence:steps=5"
    return pipe


def decoding_of(name: str) -> ConfidenceDecoding | MLCache:
    """The decoding of a run of the authors."""
    run = REFERENCE[name]
    if run.get("cache"):
        return MLCache(steps=run["steps"], **run["cache"])
    return ConfidenceDecoding(steps=run["steps"])


def arguments_of(name: str) -> dict:
    """The arguments of a call for a run of the authors, whose scales are 0 without guidance."""
    run = REFERENCE[name]
    arguments = {
        "prompt": run["prompt"],
        "guidance_scale": 1 + run["guidance"],
        "temperature": max(run["temperature"], 1e-6),
    }
    size = {"height": run["height"], "width": run["width"]}
    given = [
        Image.fromarray(EXPECTED[key].numpy())
        for end in ("given", "reference")
        if (key := f"{name}.{end}") in EXPECTED
    ]
    if run.get("kind") == "paint":
        return arguments | size | {"image": given[0], "mask_image": mask_of(run)}
    if run.get("kind") == "edit":
        scale = 1 + run["image_guidance"]
        return arguments | {"image": given, "task": run["edit_type"], "image_guidance_scale": scale}
    return arguments | size


def mask_of(run: dict) -> Image.Image:
    """The authors' mask: a rectangle in the middle, or all around it."""
    (height, width), marked = (run["height"], run["width"]), run["mode"] == "inpainting"
    rows, columns = round(run["mask_h_ratio"] * height), round(run["mask_w_ratio"] * width)
    mask = np.full((height, width), 0 if marked else 255, np.uint8)
    top, left = (height - rows) // 2, (width - columns) // 2
    mask[top : top + rows, left : left + columns] = 255 - mask[0, 0]
    return Image.fromarray(mask)


def authors_noise(name: str):
    """The `exponentials` of a run of the authors, by the rule of their reference: a stream for each step, in which all
    numbers of the tokens come before those of the ratings."""
    run = REFERENCE[name]
    places = run["height"] * run["width"] // 16**2

    def exponentials(seeds, positions, steps, purpose, count):
        numbers = []
        for where, step in zip(positions, steps.tolist(), strict=True):
            stream = np.random.RandomState(1000 * run["noise_seed"] + step)
            both = stream.random_sample((places, 8192)), stream.random_sample((places, 1))
            uniform = np.floor(both[purpose == Purpose.GUMBEL] * 2**24) / 2**24
            chosen = torch.from_numpy(uniform.astype(np.float32))[where.clamp(max=places - 1)]
            numbers.append(-torch.log(chosen + 1e-20) + 1e-20)
        return torch.stack(numbers)

    return exponentials


PIPELINES = {
    "lumina-dimoo": (pipeline, {"special", "text"}),
}
