"""Recipes: a TOML file that says how a packaged model was trained, and the commands that follow it."""

import copy
import json
import os
import shutil
import tomllib
from pathlib import Path

import torch

from ..decoding import decoding_from_name
from ..pipelines.base import ARImagePipeline
from ..pipelines.pipeline_llamagen import LlamaGenPipeline
from ..pipelines.pipeline_var import VARPipeline
from ..tokenizers.vq_llamagen import LlamaGenVQModel
from ..tokenizers.vq_var import VARVQModel
from .collaborate import train_collaborate
from .data import ImageCaptions, load_captioned_images, load_image_folder
from .drafter import DrafterSettings, train_drafter
from .loop import OptimizerSettings
from .tokenizer import TOKENIZERS, TokenizerSettings, train_tokenizer
from .transformer import TransformerSettings, train_transformer
from .transformer_var import VARTransformerSettings, train_refiner, train_var_transformer


RECIPES = Path(__file__).parent / "recipes"


def load_recipe(name_or_path: str | Path) -> dict:
    """The recipe of a packaged model by its name, or of a TOML file.

    Raises:
        ValueError: if there is neither.
    """
    path = Path(name_or_path)
    if not path.is_file():
        path = RECIPES / f"{name_or_path}.toml"
    if not path.is_file():
        known = ", ".join(sorted(recipe.stem for recipe in RECIPES.glob("*.toml")))
        raise ValueError(f"there is no recipe {name_or_path}: give a TOML file or one of {known}")
    return tomllib.loads(path.read_text())


def _load(recipe: dict, part: str, path: str | Path) -> ImageCaptions:
    if Path(path).is_dir():
        if part != "tokenizer":
            raise ValueError(
                f"{path} is a folder, whose images have no captions: give a parquet file to train a {part}"
            )
        return load_image_folder(path, recipe["image_size"])
    return load_captioned_images(path, recipe["image_size"], **recipe[part].get("data", {}))


def run_tokenizer(
    recipe: dict, train: str | Path, heldout: str | Path, out: str | Path, device: str
) -> LlamaGenVQModel | VARVQModel:
    """Train the tokenizer of `recipe`, a `LlamaGenVQModel` unless `class` says otherwise, on `train`: a parquet file, or a
    folder of images, all of which are taken. The result lies in `out`/tokenizer.

    Raises:
        ValueError: if `class` is no tokenizer.
    """
    part = recipe["tokenizer"]
    model_class = part.get("class", "LlamaGenVQModel")
    if model_class not in TOKENIZERS:
        raise ValueError(f"the recipe's tokenizer is a {model_class}: choose the class from {', '.join(TOKENIZERS)}")
    settings = TokenizerSettings(OptimizerSettings(**part["optimizer"]), **part["training"])
    folder = Path(out) / "tokenizer"
    data, heldout_data = _load(recipe, "tokenizer", train), _load(recipe, "tokenizer", heldout)
    return train_tokenizer(
        part["model"],
        data,
        heldout_data,
        settings,
        folder,
        device,
        model_class=TOKENIZERS[model_class],
        start_from=part.get("start_from"),
    )


def run_transformer(
    recipe: dict, train: str | Path, heldout: str | Path, out: str | Path, device: str
) -> ARImagePipeline:
    """Train the transformer of `recipe`, for VAR its refiner too, with the tokenizer in `out`; the pipeline lies in
    `out`/model, in float16.

    The model is written again at every report, so that an interrupted run leaves the best so far.

    Raises:
        ValueError: if `out` has no trained tokenizer.
    """
    out = Path(out)
    if not (out / "tokenizer" / "tokenizer").is_dir():
        raise ValueError(f"{out} has no trained tokenizer: run `arimage train tokenizer` with the same --out first")
    folder, part = out / "tokenizer" / "tokenizer", recipe["transformer"]
    data, heldout_data = _load(recipe, "transformer", train), _load(recipe, "transformer", heldout)

    def save(pipe: ARImagePipeline) -> None:
        pipe.generation_config.update(recipe["generation"]["sampling"])
        pipe.decoding = decoding_from_name(**recipe["generation"]["decoding"])
        save_float16(pipe, out / "model")

    if recipe["tokenizer"].get("class") == "VARVQModel":
        vq, settings = VARVQModel.from_pretrained(folder), _var_settings(part["optimizer"], part["training"])
        parts = (part["model"], recipe["text_encoder"], vq, data, heldout_data, settings)
        pipe = train_var_transformer(*parts, out / "transformer", device, on_report=save)
        part = recipe["refiner"]
        settings = _var_settings(part["optimizer"], recipe["transformer"]["training"] | part["training"])
        pipe = train_refiner(pipe, part["model"], data, heldout_data, settings, out / "refiner", on_report=save)
    else:
        vq, training = LlamaGenVQModel.from_pretrained(folder), dict(part["training"])
        training["sample_prompts"] = tuple(training["sample_prompts"])
        settings = TransformerSettings(OptimizerSettings(**part["optimizer"]), **training)
        parts = (part["model"], recipe["text_encoder"], vq, data, heldout_data, settings)
        pipe = train_transformer(*parts, out / "transformer", device, on_report=save)
    save(pipe)
    return pipe


def _var_settings(optimizer: dict, training: dict) -> VARTransformerSettings:
    lists = {name: tuple(value) for name, value in training.items() if isinstance(value, list)}
    return VARTransformerSettings(OptimizerSettings(**optimizer), **training | lists)


def run_collaborate(
    recipe: dict, pipe: VARPipeline, train: str | Path, heldout: str | Path, out: str | Path
) -> VARPipeline:
    """Fine-tune the two transformers of `pipe` by `recipe` for collaborative decoding; the pipeline lies in `out`/model, in
    float16."""
    part, out = recipe["collaborate"], Path(out)
    drafter, refiner = (
        _var_settings(part[name]["optimizer"], recipe["transformer"]["training"] | part[name]["training"])
        for name in ("drafter", "refiner")
    )
    data, heldout_data = _load(recipe, "transformer", train), _load(recipe, "transformer", heldout)
    pipe = train_collaborate(pipe, data, heldout_data, part["drafter_scales"], drafter, refiner, out)
    save_float16(pipe, out / "model")
    return pipe


def run_drafter(
    recipe: dict, pipe: LlamaGenPipeline, train: str | Path, heldout: str | Path, out: str | Path
) -> LlamaGenPipeline:
    """Train a drafter by `recipe` for `pipe`; the pipeline with it lies in `out`/model, in float16."""
    part, out = recipe["drafter"], Path(out)
    settings = DrafterSettings(OptimizerSettings(**part["optimizer"]), **part["training"])
    data, heldout_data = _load(recipe, "transformer", train), _load(recipe, "transformer", heldout)
    pipe = train_drafter(pipe, data, heldout_data, settings, out / "drafter")
    save_float16(pipe, out / "model")
    return pipe


def save_float16(pipe: ARImagePipeline, folder: Path) -> None:
    """Save a copy of the pipeline in float16; a folder that exists is replaced when the new one is complete."""
    halves = {
        name: copy.deepcopy(part).half() if isinstance(part, torch.nn.Module) else part
        for name, part in pipe.components.items()
    }
    half = type(pipe)(**halves)
    half.generation_config, half.decoding = pipe.generation_config, pipe.decoding
    partial, old = folder.with_name(folder.name + ".partial"), folder.with_name(folder.name + ".old")
    shutil.rmtree(partial, ignore_errors=True)
    half.save_pretrained(partial)
    # Where the parts were loaded from says something about this machine only.
    for file in partial.glob("*/config.json"):
        config = json.loads(file.read_text())
        config.pop("_name_or_path", None)
        file.write_text(json.dumps(config, indent=2) + "\n")
    if folder.exists():
        os.replace(folder, old)
    os.replace(partial, folder)
    shutil.rmtree(old, ignore_errors=True)
