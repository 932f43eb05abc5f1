"""Recipes: a TOML file that says how a packaged model was trained, and the commands that follow it."""

import copy
import json
import os
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from ..decoding import decoding_from_name
from ..eval.runs.prompts import read_prompts
from ..models.transformer_latent_llama import LatentLlamaTransformer
from ..pipelines.base import ARImagePipeline, ARPipeline
from ..pipelines.pipeline_cosmos import CosmosPipeline
from ..pipelines.pipeline_llamagen import LlamaGenPipeline
from ..pipelines.pipeline_llamagen_dd import LlamaGenDDPipeline
from ..pipelines.pipeline_var import VARPipeline
from ..tokenizers.vq_frames import FramewiseVQModel
from ..tokenizers.vq_llamagen import LlamaGenVQModel
from ..tokenizers.vq_var import VARVQModel
from .animation import ClipSettings, frames_of, known_clips, make_clips
from .beginning import Beginning
from .captions.known import known_captions
from .captions.scenes import SceneSettings, make_scenes
from .captions.text import TextSettings
from .collaborate import train_collaborate
from .data import ImageCaptions, load_captioned_images, load_image_folder
from .denoiser import DenoiserSettings, train_denoiser
from .distill import DistillSettings, train_distill
from .drafter import DrafterSettings, train_drafter
from .loop import OptimizerSettings
from .processes import processes
from .tokenizer import TOKENIZERS, TokenizerSettings, train_tokenizer
from .transformer import TransformerTask, train_transformer
from .transformer_arpg import ARPGTask
from .transformer_cosmos import VideoSettings, train_cosmos_transformer
from .transformer_latent_llama import LatentLlamaSettings, train_latent_llama
from .transformer_var import VARTransformerSettings, train_refiner, train_var_transformer


Settings = TypeVar("Settings")
RECIPES = Path(__file__).parent / "recipes"
# By the class of the transformer.
TASKS = {"LlamaGenTransformer": TransformerTask, "ARPGTransformer": ARPGTask}


def load_recipe(name_or_path: str | Path, *parts: str) -> dict:
    """The recipe of a packaged model by its name, or of a TOML file.

    Args:
        parts: names of tables that it must have, besides the number `image_size`.

    Raises:
        ValueError: if the recipe does not exist, or a part is missing.
    """
    path = Path(name_or_path)
    if not path.is_file():
        path = RECIPES / f"{name_or_path}.toml"
    if not path.is_file():
        known = ", ".join(sorted(recipe.stem for recipe in RECIPES.glob("*.toml")))
        raise ValueError(f"unknown recipe {name_or_path}: give a TOML file or one of {known}")
    try:
        recipe = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not TOML ({error}): correct the recipe") from error
    if parts and not isinstance(recipe.get("image_size"), int):
        raise ValueError(f"{path} has no whole number image_size: add it, in pixels")
    for part in parts:
        if not isinstance(recipe.get(part), dict):
            raise ValueError(f"{path} has no table [{part}]: add it, as in the recipe of a packaged model")
    return recipe


def _settings(kind: Callable[..., Settings], optimizer: dict, training: dict, **more) -> Settings:
    """The settings of a recipe's tables `optimizer` and `training`.

    Raises:
        ValueError: if one of them has a setting that there is not, or lacks one.
    """
    lists = {name: tuple(value) for name, value in training.items() if isinstance(value, list)}
    try:
        return kind(OptimizerSettings(**optimizer), **training | lists, **more)
    except (TypeError, KeyError) as error:
        raise ValueError(f"the recipe does not fit {kind.__name__}: {error}") from error


def _load(recipe: dict, part: str, path: str | Path) -> ImageCaptions:
    if Path(path).is_dir():
        if part != "tokenizer":
            raise ValueError(
                f"{path} is a folder, whose images have no captions: give a parquet file to train a {part}"
            )
        return load_image_folder(path, recipe["image_size"])
    return load_captioned_images(path, recipe["image_size"], **recipe[part].get("data", {}))


def _with_scenes(recipe: dict, part: str, data: ImageCaptions) -> ImageCaptions:
    """`data` with the pictures that the table `scenes` of `part` asks for; images of a folder stay alone.

    Raises:
        ValueError: if the table has a setting that there is not.
    """
    if "scenes" not in recipe[part] or not data.groups:
        return data
    try:
        settings = SceneSettings(**recipe[part]["scenes"])
    except TypeError as error:
        raise ValueError(f"the recipe's table {part}.scenes does not fit SceneSettings: {error}") from error
    return make_scenes(data, settings)


def _clips(recipe: dict, part: str, train: str | Path, heldout: str | Path) -> tuple[ImageCaptions, ImageCaptions]:
    """The clips of the objects in the file `train`, but for the held-out pairs of object and motion, and those of `heldout`."""
    try:
        settings = ClipSettings(**recipe["clips"])
    except TypeError as error:
        raise ValueError(f"the recipe's table clips does not fit ClipSettings: {error}") from error
    data, heldout_data = (_load(recipe, part, path) for path in (train, heldout))
    return make_clips(data, settings), make_clips(heldout_data, settings, held_out=True)


def run_tokenizer(
    recipe: dict, train: str | Path, heldout: str | Path, out: str | Path, device: str
) -> LlamaGenVQModel | VARVQModel:
    """Train the tokenizer of `recipe`, a `LlamaGenVQModel` unless `class` says otherwise, on `train`: a parquet file, or a
    folder of images, all of which are taken. The result lies in `out`/tokenizer.

    Raises:
        ValueError: if `class` is not a tokenizer.
    """
    part = recipe["tokenizer"]
    model_class = part.get("class", "LlamaGenVQModel")
    if model_class not in TOKENIZERS:
        raise ValueError(f"the recipe's tokenizer is a {model_class}: choose the class from {', '.join(TOKENIZERS)}")
    settings = _settings(TokenizerSettings, part["optimizer"], part["training"])
    folder = Path(out) / "tokenizer"
    if "clips" in recipe:
        data, heldout_data = map(frames_of, _clips(recipe, "tokenizer", train, heldout))
    else:
        data, heldout_data = _load(recipe, "tokenizer", train), _load(recipe, "tokenizer", heldout)
        data = _with_scenes(recipe, "tokenizer", data)
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
    recipe: dict,
    train: str | Path,
    heldout: str | Path,
    out: str | Path,
    device: str,
    *,
    start_from: str | Path | None = None,
    compile: bool = False,
) -> ARPipeline:
    """Train the transformer of `recipe`, for VAR its refiner too, with the tokenizer in `out`; the pipeline lies in
    `out`/model, in float16. On the tokens of a `LlamaGenVQModel` it is a `LlamaGenTransformer` unless `class` says otherwise.

    Every report writes the model again, so that an interrupted run leaves its latest. `start_from` and `compile` are those
    of `Beginning`; a table `text_training` says how a fresh text encoder is trained before.

    Raises:
        ValueError: if `out` has no trained tokenizer, or `class` is none of those.
    """
    out = Path(out)
    if not (out / "tokenizer" / "tokenizer").is_dir():
        raise ValueError(f"{out} has no trained tokenizer: run `arimage train tokenizer` with the same --out first")
    text = recipe.get("text_training")
    text_settings = None if text is None else _settings(TextSettings, text["optimizer"], text["training"])
    beginning = Beginning(start_from, text_settings, compile)
    if "clips" in recipe:
        return _run_video(recipe, train, heldout, out, device, beginning)
    folder, part = out / "tokenizer" / "tokenizer", recipe["transformer"]
    model_class = part.get("class", "LlamaGenTransformer")
    classes = (*TASKS, LatentLlamaTransformer.__name__)
    if model_class not in classes:
        raise ValueError(f"the recipe's transformer is a {model_class}: choose the class from {', '.join(classes)}")
    plain, heldout_data = _load(recipe, "transformer", train), _load(recipe, "transformer", heldout)
    data = _with_scenes(recipe, "transformer", plain)
    known = known_captions(plain, data, framed=part["training"].get("framed_share", 0) > 0)
    samples = {"sampling": recipe["generation"]["sampling"]}

    def save(pipe: ARImagePipeline) -> None:
        pipe.generation_config.update(recipe["generation"]["sampling"])
        pipe.decoding = decoding_from_name(**recipe["generation"]["decoding"])
        pipe.known_captions = known
        save_float16(pipe, out / "model")

    if recipe["tokenizer"].get("class") == "VARVQModel":
        vq = VARVQModel.from_pretrained(folder)
        settings = _settings(VARTransformerSettings, part["optimizer"], part["training"], **samples)
        parts = (part["model"], recipe["text_encoder"], vq, data, heldout_data, settings)
        pipe = train_var_transformer(*parts, out / "transformer", device, on_report=save, beginning=beginning)
        part = recipe["refiner"]
        training = recipe["transformer"]["training"] | part["training"]
        settings = _settings(VARTransformerSettings, part["optimizer"], training, **samples)
        parts = (part["model"], data, heldout_data, settings, out / "refiner")
        pipe = train_refiner(pipe, *parts, on_report=save, compile=compile)
    elif model_class == LatentLlamaTransformer.__name__:
        vq = LlamaGenVQModel.from_pretrained(folder)
        settings = _settings(LatentLlamaSettings, part["optimizer"], part["training"], **samples)
        parts = (part["model"], part.get("drafter"), recipe["text_encoder"], vq, data, heldout_data, settings)
        pipe = train_latent_llama(*parts, out, device, on_report=save, beginning=beginning)
    else:
        vq = LlamaGenVQModel.from_pretrained(folder)
        task = TASKS[model_class]
        settings = _settings(task.settings_class, part["optimizer"], part["training"], **samples)
        parts = (part["model"], recipe["text_encoder"], vq, data, heldout_data, settings)
        more = {"on_report": save, "task_class": task, "beginning": beginning}
        pipe = train_transformer(*parts, out / "transformer", device, **more)
    save(pipe)
    return pipe


def _run_video(
    recipe: dict, train: str | Path, heldout: str | Path, out: Path, device: str, beginning: Beginning
) -> CosmosPipeline:
    """`run_transformer` for clips: a `CosmosTransformer` and a `FramewiseVQModel`."""
    data, heldout_data = _clips(recipe, "transformer", train, heldout)
    known, part = known_clips(data), recipe["transformer"]
    sampling = recipe["generation"]["sampling"]
    settings = _settings(VideoSettings, part["optimizer"], part["training"], sampling=sampling)
    vq = FramewiseVQModel.from_pretrained(out / "tokenizer" / "tokenizer")

    def save(pipe: CosmosPipeline) -> None:
        pipe.generation_config.update(sampling)
        pipe.decoding = decoding_from_name(**recipe["generation"]["decoding"])
        pipe.known_captions = known
        save_float16(pipe, out / "model")

    parts = (part["model"], recipe["text_encoder"], vq, data, heldout_data, settings)
    pipe = train_cosmos_transformer(*parts, out / "transformer", device, on_report=save, beginning=beginning)
    save(pipe)
    return pipe


def run_collaborate(
    recipe: dict, pipe: VARPipeline, train: str | Path, heldout: str | Path, out: str | Path
) -> VARPipeline:
    """Fine-tune the two transformers of `pipe` by `recipe` for collaborative decoding; the pipeline lies in `out`/model, in
    float16."""
    part, out = recipe["collaborate"], Path(out)
    drafter, refiner = (
        _settings(
            VARTransformerSettings,
            part[name]["optimizer"],
            recipe["transformer"]["training"] | part[name]["training"],
            sampling=recipe.get("generation", {}).get("sampling", {}),
        )
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
    settings = _settings(DrafterSettings, part["optimizer"], part["training"])
    data, heldout_data = _load(recipe, "transformer", train), _load(recipe, "transformer", heldout)
    pipe = train_drafter(pipe, data, heldout_data, settings, out / "drafter")
    save_float16(pipe, out / "model")
    return pipe


def run_distill(
    recipe: dict, pipe: LlamaGenPipeline, prompts: str | Path | None, out: str | Path
) -> LlamaGenDDPipeline:
    """Distil the transformer of `pipe` by `recipe`; the student and its teacher lie in `out`/model, in float16.

    Args:
        prompts: a file of prompts, see `read_prompts`; None for the classes of `pipe`, or the captions that it knows.

    Raises:
        ValueError: if `pipe` is not a LlamaGen pipeline, or no prompts are given and it knows none.
    """
    if not isinstance(pipe, LlamaGenPipeline):
        raise ValueError(f"--model is a {type(pipe).__name__}: give a LlamaGenPipeline to distil")
    part, out = recipe["distill"], Path(out)
    settings = _settings(DistillSettings, part["optimizer"], part["training"])
    if prompts is not None:
        if pipe.num_classes is not None:
            raise ValueError(f"--prompts is {prompts}, and this model generates classes: leave it out")
        chosen = [row["prompt"] for row in read_prompts(Path(prompts))]
    elif pipe.num_classes is not None:
        chosen = [*range(pipe.num_classes)]
    else:
        chosen = [] if pipe.known_captions is None else [*pipe.known_captions.pictures]
    if not chosen:
        raise ValueError("the model names no captions: give --prompts a file of them")
    student = train_distill(
        pipe, chosen, settings, out / "distill", on_report=lambda it: save_float16(it, out / "model")
    )
    save_float16(student, out / "model")
    return student


def run_denoiser(
    recipe: dict, pipe: LlamaGenPipeline, train: str | Path, heldout: str | Path, out: str | Path
) -> LlamaGenPipeline:
    """Train a denoiser by `recipe` for `pipe`; the pipeline with it lies in `out`/model, in float16."""
    part, out = recipe["denoiser"], Path(out)
    settings = _settings(DenoiserSettings, part["optimizer"], part["training"])
    data, heldout_data = _load(recipe, "transformer", train), _load(recipe, "transformer", heldout)
    pipe = train_denoiser(pipe, data, heldout_data, settings, out / "denoiser")
    save_float16(pipe, out / "model")
    return pipe


def save_float16(pipe: ARPipeline, folder: Path) -> None:
    """Save a copy of the pipeline in float16; a folder that exists is replaced when the new one is complete. Of processes that train
    together the first one saves."""
    if processes()[0] > 0:
        return
    halves = {
        name: copy.deepcopy(part).half() if isinstance(part, torch.nn.Module) else part
        for name, part in pipe.components.items()
    }
    _, options = pipe._get_signature_keys(pipe)
    half = type(pipe)(**halves, **{name: pipe.config[name] for name in options - halves.keys() if name in pipe.config})
    half.generation_config, half.decoding = pipe.generation_config, pipe.decoding
    half.known_captions = pipe.known_captions
    # The model card tells the name of the folder.
    partial, old = folder.with_name("partial") / folder.name, folder.with_name(folder.name + ".old")
    shutil.rmtree(partial.parent, ignore_errors=True)
    half.save_pretrained(partial)
    # The path that a part was loaded from means nothing elsewhere.
    for file in partial.glob("*/config.json"):
        config = json.loads(file.read_text())
        config.pop("_name_or_path", None)
        file.write_text(json.dumps(config, indent=2) + "\n")
    if folder.exists():
        # What a run that was killed here left.
        shutil.rmtree(old, ignore_errors=True)
        os.replace(folder, old)
    os.replace(partial, folder)
    partial.parent.rmdir()
    shutil.rmtree(old, ignore_errors=True)
