"""The beginning of a training on a cache of tokens: the pipeline of a recipe, its sets of images, and its plan."""

import inspect
import math
import reprlib
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import torch
from diffusers import ModelMixin
from torch import nn
from transformers import PreTrainedTokenizerFast, T5EncoderModel

from ...auto import AutoPipeline
from ...cli.options import fast_dtype
from ...families import PIPELINES
from ...pipelines.base import ARPipeline
from ...pipelines.cosmos.pipeline_cosmos import CosmosPipeline
from ...pipelines.kinds.class_or_text import ClassOrTextPipeline
from ...settings.schema import check
from ..adapters.lora import target_names
from ..loop import OptimizerSettings
from ..losses import reads_text
from ..processes import processes
from ..recipe import TokenRecipe, new_model
from .cache import Index, TokenCache, image_tokenizer_of, norms_of
from .encoders import load_encoder
from .heldout import Part, apart, hold_out
from .task import TokenSettings, TokenTask
from .text import new_text_encoder, train_text_tokenizer


# What of the optimizer may be given apart from a recipe.
OF_OPTIMIZER = ("steps", "learning_rate", "accumulate", "gradient_clip")
# The argument of a transformer that says how many tokens of a text it reads.
READ = "num_condition_tokens"
# What the arguments of a transformer have in common with those of the model whose image tokenizer made the tokens.
OF_TOKENS = ("vocab_size", "grid_size", "scales", "codebook_dim", "token_dim", "patch_size")


def token_settings(recipe: TokenRecipe, **given: Any) -> TokenSettings:
    """The settings of a recipe; those that are `given`, not None, replace its own.

    Raises:
        ValueError: if one is wrong.
    """
    given = {name: value for name, value in given.items() if value is not None}
    optimizer = {name: given.pop(name) for name in OF_OPTIMIZER if name in given}
    changed = check(OptimizerSettings, vars(recipe.optimizer) | optimizer, "the settings")
    return check(TokenSettings, recipe.training | given | {"optimizer": changed}, "table [training]")


def new_pipeline(
    recipe: TokenRecipe,
    cache: TokenCache,
    of_tokens: ARPipeline,
    *,
    text: tuple[PreTrainedTokenizerFast, T5EncoderModel] | None = None,
    fresh: bool = True,
) -> ARPipeline:
    """The pipeline of a recipe with random weights, or with none (`fresh` is False). Its image tokenizer is that of
    `of_tokens`, which made the tokens, and so is its text encoder if they have captions and none is given as `text`.
    """
    kind = getattr(import_module(f"arimage.{PIPELINES[recipe.pipeline]}"), recipe.pipeline)
    network = get_type_hints(kind.__init__).get("transformer")
    if network is None or not hasattr(network, "init_weights"):
        raise ValueError(f"a {recipe.pipeline} is not trained from random weights: give --start-from and a model")
    _check_kind(kind, cache)
    given, parts = _arguments(network, cache, of_tokens, text)
    # The state of the last token of a text is enough for some.
    given = {name: value for name, value in given.items() if text is None or name != READ or name not in recipe.model}
    transformer = new_model(network, recipe.model, "model", **given)
    if fresh:
        transformer = network(**given, **recipe.model)
        transformer.init_weights()
    pipe = kind(transformer=transformer, vq=of_tokens.components["vq"], **parts)
    if recipe.generation is not None:
        recipe.generation.give(pipe)
    return pipe


def _arguments(network: type, cache: TokenCache, of_tokens: ARPipeline, text: tuple | None) -> tuple[dict, dict]:
    """The arguments of a transformer that follow from tokens and captions, and the other parts of its pipeline."""
    source = of_tokens.components["transformer"].config
    known = inspect.signature(network).parameters.keys()
    given = {name: source[name] for name in OF_TOKENS if name in known and source.get(name) is not None}
    if isinstance(of_tokens, CosmosPipeline):
        parts = {"begins_with_text": reads_text(of_tokens), "fps": cache.index.about["fps"]}
        parts |= {name: of_tokens.components[name] for name in ("tokenizer", "text_encoder")}
        return given | {"shape": _clip_shape(of_tokens, cache), "context_dim": source.context_dim}, parts
    if "grid_size" in given:
        given["grid_size"] = math.isqrt(cache.index.shape[0])
    if cache.index.labelled:
        names = cache.index.classes
        parts = {"id2label": None if names is None else dict(enumerate(names))}
        return given | {"conditioning": "class", "num_classes": cache.index.num_classes}, parts
    if text is not None:
        tokenizer, encoder = text
        length = tokenizer.model_max_length
    else:
        tokenizer, encoder = (of_tokens.components.get(name) for name in ("tokenizer", "text_encoder"))
        length = source.get(READ)
    if encoder is None:
        raise ValueError(
            f"the tokens have captions, and {cache.index.about['model']} has no text encoder: add a table "
            "[text_encoder] to the recipe, or make them with a model that has one"
        )
    text_given = {"conditioning": "text", "caption_dim": encoder.config.d_model, READ: length}
    return given | text_given, {"tokenizer": tokenizer, "text_encoder": encoder}


def new_text(
    recipe: TokenRecipe, settings: TokenSettings, cache: TokenCache, folder: Path | None
) -> tuple[PreTrainedTokenizerFast, T5EncoderModel] | None:
    """The text encoder of a recipe and its tokenizer: those of a trained pipeline, or random weights and the tokenizer
    in `folder`, or one that is learned from the captions of a cache. None if the recipe has no text encoder."""
    table = recipe.text_encoder
    if table is None:
        if folder is not None:
            raise ValueError("--text-tokenizer is given, and the recipe has no table [text_encoder]: add it")
        return None
    if cache.index.labelled:
        raise ValueError("the recipe has a table [text_encoder], and the tokens have classes: leave it out")
    if table.start_from is not None:
        if folder is not None:
            raise ValueError("--text-tokenizer is given, and text_encoder.start_from has its own: leave out one")
        trained = AutoPipeline.from_pretrained(table.start_from, dtype=torch.float32)
        tokenizer, encoder = trained.tokenizer, trained.text_encoder
        tokenizer.model_max_length = settings.caption_length
        return tokenizer, encoder
    if folder is None:
        tokenizer = train_text_tokenizer(cache.captions(), settings.text_vocab_size, settings.caption_length)
    else:
        if not (folder / "tokenizer.json").is_file():
            raise ValueError(f"{folder} has no tokenizer.json: give the folder of a tokenizer of transformers")
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        if tokenizer.pad_token_id is None or tokenizer.eos_token_id is None:
            raise ValueError(f"the tokenizer in {folder} has no token for padding or for the end: give another one")
    tokenizer.model_max_length = settings.caption_length
    return tokenizer, new_text_encoder(tokenizer, table.model_dump(exclude={"start_from"}))


def _check_kind(kind: type[ARPipeline], cache: TokenCache) -> None:
    """Refuse tokens of videos for a pipeline of images, and the other way round."""
    if kind.abilities.generates_video != ("frames" in cache.index.about):
        has, needs = ("videos", "images") if "frames" in cache.index.about else ("images", "videos")
        raise ValueError(f"the tokens are of {has}, and a {kind.__name__} generates {needs}: give another one")


def _clip_shape(pipe: CosmosPipeline, cache: TokenCache) -> tuple[int, int, int]:
    """The maps of a clip, and their rows and columns."""
    height, width = (side // pipe.vq.scale_factor for side in cache.index.about["image_size"])
    return pipe.vq.num_maps(cache.index.about["frames"]), height, width


def _check_clips(pipe: CosmosPipeline, cache: TokenCache) -> None:
    """Refuse clips of another size than those of a trained pipeline, or without the captions that it needs."""
    shape, trained = _clip_shape(pipe, cache), tuple(pipe.transformer.config.shape)
    if shape != trained:
        raise ValueError(f"the tokens have maps of {shape}, and the model to start from {trained}: make them with it")
    if reads_text(pipe) and cache.index.about["columns"][1] is None:
        raise ValueError("the tokens have no captions, and the model to start from needs them: make them with it")


def check_heldout(cache: TokenCache, held: TokenCache) -> None:
    """Refuse held-out tokens of which a model of the tokens in `cache` knows nothing."""
    ours, theirs, names = cache.index, held.index, f"{held.folder} holds tokens of"
    same = ours.shape == theirs.shape and all(ours.about.get(one) == theirs.about.get(one) for one in ("vq", "fps"))
    if not same:
        raise ValueError(f"{names} another image tokenizer or size than {cache.folder}: make them alike")
    # Without names classes are known by their ids, and some may have no held-out image.
    others = ours.classes != theirs.classes or theirs.num_classes > ours.num_classes
    if (
        ours.labelled != theirs.labelled
        or others
        or (ours.about["columns"][1] is None) != (theirs.about["columns"][1] is None)
    ):
        has, needs = (_conditions(one) for one in (theirs, ours))
        raise ValueError(
            f"{names} {has}, and {cache.folder} of {needs}: encode it with the same classes or captions; --classes of "
            "`arimage train tokens` names all classes where a data set lacks some"
        )


def _conditions(index: Index) -> str:
    """What a cache has with its images or clips, in words."""
    if not index.labelled:
        return "clips without captions" if index.about["columns"][1] is None else "captions"
    return f"{index.num_classes} classes" + ("" if index.classes is None else f", {reprlib.repr(index.classes)}")


def with_classes(pipe: ARPipeline, cache: TokenCache, *, adapter: bool = False) -> ARPipeline:
    """A trained pipeline for the classes of a cache. If they are not as many as its own, or their names have other
    ids, the embeddings of those whose names it does not have are new. All other weights are kept, and so are image
    tokenizer and upscaler; other parts are left out, and a decoding that needs them becomes the family's usual one.

    Args:
        adapter: whether only an adapter is trained, which keeps the classes of its model.
    """
    if isinstance(pipe, CosmosPipeline):
        _check_kind(type(pipe), cache)
        _check_clips(pipe, cache)
    check_fits(pipe, cache, "the model to start from has another one")
    if not cache.index.labelled:
        return pipe
    if adapter:
        check_classes(pipe, cache, "lora_rank is above 0, which keeps the model's")
        return pipe
    names, own, count, parts = cache.index.classes, pipe.class_names, cache.index.num_classes, dict(pipe.components)
    same = _same_classes(pipe, cache)
    if pipe.num_classes != count or any(new != old for new, old in same.items()):
        changed = _with_embeddings(pipe.components["transformer"], count, same)
        parts = {"transformer": changed} | {name: parts[name] for name in ("vq", "upscaler") if name in parts}
    # Classes without names are the model's own if they are as many.
    names = own if names is None and pipe.num_classes == count else names
    kind: Any = type(pipe)
    new = kind(**parts, id2label=None if names is None else dict(enumerate(names)))
    usual = new.decoding
    new.take_defaults(pipe)
    with torch.no_grad():
        if new.decoding.supports(new.prepare(class_labels=0).model) is not None:
            new.decoding = usual
    return new


def _same_classes(pipe: ARPipeline, cache: TokenCache) -> dict[int, int]:
    """The ids in a cache of the classes whose names a model has too, and their ids in the model."""
    own = {name: number for number, name in enumerate(pipe.class_names or ())}
    return {number: own[name] for number, name in enumerate(cache.index.classes or ()) if name in own}


def check_classes(pipe: ARPipeline, cache: TokenCache, what: str) -> None:
    """Refuse tokens whose classes are not those of a model that keeps its own, as `what` says: "--model has"."""
    if not cache.index.labelled:
        return
    names, own, count = cache.index.classes, pipe.class_names, pipe.num_classes or 0
    moved = any(new != old for new, old in _same_classes(pipe, cache).items())
    # Of classes without names any number may have no image.
    fewer = cache.index.num_classes < count and names is not None and own is not None
    if moved or fewer or cache.index.num_classes > count:
        raise ValueError(
            f"{what} {count} classes{'' if own is None else f', {reprlib.repr(own)}'}, and the tokens have "
            f"{_conditions(cache.index)}: encode them with --classes and a file of the classes of the model"
        )


def _with_embeddings(transformer: ModelMixin, count: int, same: dict[int, int]) -> ModelMixin:
    """A transformer for `count` classes with the weights of another one: of its classes those that are the `same`."""
    kind, config = type(transformer), {key: it for key, it in transformer.config.items() if not key.startswith("_")}
    wider = new_model(kind, {}, "model", **config | {"num_classes": count + 1}).state_dict()
    changed = kind(**config | {"num_classes": count})
    changed.init_weights()
    ours, theirs = changed.state_dict(), transformer.state_dict()
    for key, weight in ours.items():
        if weight.shape == wider[key].shape:
            weight.copy_(theirs[key])
            continue
        for new, old in same.items():
            weight[new] = theirs[key][old]
    return changed


def check_fits(pipe: ARPipeline, cache: TokenCache, what: str) -> None:
    """Refuse a pipeline whose image tokenizer did not make the tokens of a cache (`what` says it), or which generates
    from text where they have classes, or the other way round."""
    _check_kind(type(pipe), cache)
    if (pipe.num_classes is not None) != cache.index.labelled:
        has, needs = ("classes", "captions") if cache.index.labelled else ("captions", "classes")
        raise ValueError(f"the tokens have {has}, and the model needs {needs}: give another one")
    _check_tokenizer(pipe, cache, what)


def _check_tokenizer(pipe: ARPipeline, cache: TokenCache, what: str) -> None:
    """Refuse a pipeline whose image tokenizer did not make the tokens of a cache."""
    norms = norms_of(image_tokenizer_of(pipe))
    # Trained models are saved in bfloat16 too, which rounds by up to 2**-8.
    if len(norms) != len(cache.index.norms) or not np.allclose(norms, cache.index.norms, rtol=2**-8):
        raise ValueError(
            f"the tokens are of the image tokenizer of {cache.index.about['model']}, and {what}: make them with it"
        )


def trained_pipeline(
    recipe: TokenRecipe,
    settings: TokenSettings,
    cache: TokenCache,
    start_from: str | None,
    *,
    text_tokenizer: Path | None = None,
    fresh: bool = True,
) -> ARPipeline:
    """The pipeline that a training begins with: that of `start_from` or, with random weights, of the recipe; see
    `with_classes`, `new_pipeline` and `new_text`."""
    if start_from is not None:
        if text_tokenizer is not None:
            raise ValueError(
                "--text-tokenizer and --start-from are given, and a trained model has its own: leave out one"
            )
        pipe = AutoPipeline.from_pretrained(start_from, dtype=torch.float32)
        return with_classes(pipe, cache, adapter=settings.lora_rank > 0)
    if settings.lora_rank:
        raise ValueError("lora_rank is above 0, which needs a trained model: give --start-from")
    load = partial(AutoPipeline.from_pretrained, dtype=torch.float32)
    of_tokens = load_encoder(cache.index.about["model"], load)
    if fresh:
        _check_tokenizer(of_tokens, cache, "that has another one now")
    text = new_text(recipe, settings, cache, text_tokenizer)
    return new_pipeline(recipe, cache, of_tokens, text=text, fresh=fresh)


def open_sets(
    tokens: Path, heldout: Sequence[Path]
) -> tuple[TokenCache, TokenCache | Part, Mapping[str, TokenCache | Part]]:
    """The cache in the folder `tokens`, its images to train on, and those that are held out by the names of their
    sets: those in the folders `heldout`, by default some of the cache, see `hold_out`."""
    cache = TokenCache(tokens)
    if not heldout:
        trained, some = hold_out(cache)
        return cache, trained, {} if some is None else {"": some}
    caches = {folder.resolve().name: TokenCache(folder) for folder in heldout}
    if len(caches) < len(heldout):
        raise ValueError("--heldout names two folders that are called alike: rename one")
    for one in caches.values():
        check_heldout(cache, one)
    return cache, apart(cache, list(caches.values())), caches


def begin_training(
    recipe: TokenRecipe,
    settings: TokenSettings,
    tokens: Path,
    heldout: Sequence[Path],
    start_from: str | None,
    device: str,
    *,
    text_tokenizer: Path | None = None,
    compile: bool = False,
    prompts: Sequence[str] = (),
    gradient_checkpointing: bool = False,
) -> TokenTask:
    """The training of a recipe on the cache in the folder `tokens`. No step sees an image of the caches in the folders
    `heldout`, by default some of those in `tokens`, see `hold_out`.

    Args:
        start_from: name or folder of a trained pipeline, whose weights and shape are taken.
        text_tokenizer: folder of the tokenizer of a new text encoder, see `new_text`.
        compile: whether to compile the blocks of the transformer.
        prompts: what samples are of; by default the captions or classes of held-out images.
        gradient_checkpointing: whether the layers of a language model are computed again in the backward pass, which
            takes less memory and more time.
    """
    cache, trained, held = open_sets(tokens, heldout)
    torch.manual_seed(settings.seed)
    pipe = trained_pipeline(recipe, settings, cache, start_from, text_tokenizer=text_tokenizer)
    if isinstance(pipe, CosmosPipeline):
        # A report is too late to learn that samples need a package.
        pipe._guardrail()
    (key,) = pipe._lora_loadable_modules
    network = pipe.components[key]
    learning = [] if settings.lora_rank else [network]
    if recipe.text_encoder is not None and learning:
        learning.append(_text_encoder_of(pipe))
    for part in pipe.components.values():
        if isinstance(part, nn.Module):
            part.requires_grad_(any(part is one for one in learning))
    pipe.to(device)
    if compile:
        if not isinstance(network, ModelMixin):
            raise ValueError(f"a {type(network).__name__} of transformers is not compiled here: leave out --compile")
        network.compile_repeated_blocks()
    more = {"prompts": prompts, "gradient_checkpointing": gradient_checkpointing}
    task = TokenTask(pipe, trained, settings, heldout=held, base=start_from, **more)
    if start_from is None:
        # Weights do not show all of them.
        text = recipe.text_encoder and recipe.text_encoder.model_dump()
        task.about |= {"arguments": recipe.model, "text_encoder": text}
    return task


def _text_encoder_of(pipe: ARPipeline) -> nn.Module:
    """The text encoder that is trained too."""
    encoder = pipe.components.get("text_encoder")
    if encoder is None or not isinstance(pipe, ClassOrTextPipeline) or pipe.num_classes is not None:
        raise ValueError(
            f"the recipe has a table [text_encoder], and this {type(pipe).__name__} has none to train: leave it out"
        )
    return encoder


def plan_of(
    recipe: TokenRecipe,
    settings: TokenSettings,
    cache: TokenCache,
    start_from: str | None = None,
    text_tokenizer: Path | None = None,
    device: str = "cpu",
    sharded: bool = False,
) -> dict[str, Any]:
    """What a training needs: parameters, those that are trained, images or clips, their size, tokens, steps, epochs,
    FLOP and the bytes per process, by what they hold; `sharded` says whether processes divide what is trained.
    Activations come on top."""
    pipe = trained_pipeline(recipe, settings, cache, start_from, text_tokenizer=text_tokenizer, fresh=False)
    (key,) = pipe._lora_loadable_modules
    network, optimizer = pipe.components[key], settings.optimizer
    learning = nn.ModuleDict({key: network})
    if recipe.text_encoder is not None and not settings.lora_rank:
        learning["text_encoder"] = _text_encoder_of(pipe)
    parameters = trained = sum(weight.numel() for weight in learning.parameters())
    by_muon = sum(
        weight.numel()
        for name, weight in learning.named_parameters()
        if weight.ndim == 2 and name.startswith(optimizer.muon)
    )
    if settings.lora_rank:
        layers = [network.get_submodule(name) for name in target_names(network, settings.lora_targets)]
        trained, by_muon = sum(settings.lora_rank * sum(layer.weight.shape) for layer in layers), 0
    count = processes()[1]
    batch = settings.batch_size * optimizer.accumulate
    images = batch * optimizer.steps * count
    what = "clip" if "frames" in cache.index.about else "image"
    height, width = cache.index.about["image_size"]
    half = fast_dtype(device).itemsize
    every = [part for part in pipe.components.values() if isinstance(part, nn.Module)]
    # Parts that do not learn are in float32, what an adapter changes is not.
    frozen = 4 * (sum(p.numel() for part in every for p in part.parameters()) - parameters)
    frozen += half * (parameters - trained if settings.lora_rank else 0)
    parts = {
        # In float32, and while a step is computed also in the dtype that is fast.
        "trained weights": (4 + half % 4) * trained,
        "averaged weights": 4 * trained,
        "gradients": 4 * trained,
        "moments of AdamW": 8 * (trained - by_muon),
        **({"momentum of Muon": 4 * by_muon} if by_muon else {}),
    }
    if sharded:
        parts = {name: -(-value // count) for name, value in parts.items()}
    parts["other weights"] = frozen
    return {
        "parameters": parameters,
        "trained parameters": trained,
        f"{what}s": len(cache),
        f"tokens per {what}": cache.index.shape[0],
        f"pixels that each {what} is brought to": f"{height} x {width}",
        f"{what}s per step and process": batch,
        "steps": optimizer.steps,
        "processes": count,
        "epochs": round(images / len(cache), 2),
        # Two per weight and token forward, two backward, and two for the gradient of a weight that is trained.
        "FLOP": (4 * parameters + 2 * trained) * images * cache.index.shape[0],
        "bytes per process": sum(parts.values()),
        **{f"bytes of {name}": value for name, value in parts.items()},
    }
