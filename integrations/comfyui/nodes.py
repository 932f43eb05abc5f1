"""The nodes. arimage is imported when a node runs: without it the pack loads, and the node says what is missing."""

from collections.abc import Callable
from pathlib import Path
from typing import get_args

import comfy.model_management as management
import folder_paths
import torch
from comfy_api.latest import io

from .calls import (
    OF_MODEL,
    GeneratedTokens,
    LoadedModel,
    condition,
    count_edits,
    generate,
    given,
    pictures_of,
    settings_of,
    split_prompts,
    to_batch,
    to_pictures,
)


CATEGORY = "arimage"
FOLDER = "arimage"
# The largest number that a field of ComfyUI's page holds exactly.
MAX_SEED = 2**53 - 1
# Pictures that an image may be made from, with references among those of image.
INPUTS = ("image", "mask_image")
MISSING = "arimage is not installed"

Pipe = io.Custom("ARIMAGE_PIPE")
DecodingName = io.Custom("ARIMAGE_DECODING")
Tokens = io.Custom("ARIMAGE_TOKENS")


def model_folders() -> dict[str, Path]:
    """The folders of pipelines in models/arimage."""
    root = Path(folder_paths.models_dir) / FOLDER
    return {path.parent.name: path.parent for path in sorted(root.glob("*/model_index.json"))}


def model_names() -> list[str]:
    from arimage.auto import packaged_models, published_models

    return [*packaged_models(), *model_folders(), *published_models()]


def decoding_names() -> list[str]:
    from arimage.decoding.names import PRESETS

    return list(PRESETS)


def order_names() -> list[str]:
    from arimage.decoding.names import Order

    return [OF_MODEL, *get_args(Order)]


def choices(names: Callable[[], list[str]]) -> list[str]:
    """The entries of a list, whose names are those of arimage."""
    try:
        return names()
    except ImportError:
        return [MISSING]


def check_installed() -> None:
    try:
        import arimage  # noqa: F401
    except ImportError as error:
        raise RuntimeError(
            f"{MISSING}: install it from its clone into the Python of ComfyUI, and start ComfyUI again"
        ) from error


def seed_input():
    return io.Int.Input("seed", default=0, min=0, max=MAX_SEED, control_after_generate=True)


def number_input(name: str, most: int, step: float | None = None, about: str = ""):
    """A setting, a whole number unless it has a `step`; -1 stands for the model's own."""
    kind = io.Int if step is None else io.Float
    return kind.Input(name, default=-1, min=-1, max=most, step=step, tooltip=f"{about}-1: the model's")


def sampling_inputs() -> list:
    """Settings of the distribution."""
    return [
        number_input("guidance_scale", 100, 0.1),
        number_input("temperature", 100, 0.05),
        number_input("top_k", 2**20, about="0: off; "),
        number_input("top_p", 1, 0.01, "1: off; "),
        number_input("min_p", 1, 0.01, "0: off; "),
    ]


class LoadModel(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="ArimageLoadModel",
            display_name="Load AR model",
            category=CATEGORY,
            inputs=[
                io.Combo.Input(
                    "model", options=choices(model_names), tooltip="Packaged, from models/arimage, or published"
                ),
                io.Combo.Input("dtype", options=["auto", "float32", "bfloat16", "float16"]),
                io.Combo.Input("device", options=["default", "cpu"]),
                io.String.Input("other", default="", tooltip="A folder or a repository of the Hub, instead of model"),
            ],
            outputs=[Pipe.Output(display_name="model")],
        )

    @classmethod
    def execute(cls, model, dtype, device, other):
        check_installed()
        from arimage.cli.options import fast_dtype, load_pipeline

        name = other.strip() or str(model_folders().get(model, model))
        load = offload = torch.device("cpu")
        if device == "default":
            load, offload = management.get_torch_device(), management.unet_offload_device()
        if dtype == "auto":
            dtype = str(fast_dtype(str(load))).removeprefix("torch.")
        pipe = load_pipeline(name, str(offload), dtype, videos=True, continues=True)
        pipe.set_progress_bar_config(disable=True)
        return io.NodeOutput(LoadedModel(pipe, load, offload, name))


class LoadLora(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="ArimageLoadLora",
            display_name="Load LoRA for AR model",
            category=CATEGORY,
            description="Adds an adapter to a model. Several in a row are active together.",
            inputs=[
                Pipe.Input("model"),
                io.Combo.Input("lora", options=folder_paths.get_filename_list("loras"), tooltip="From models/loras"),
                io.Float.Input("strength", default=1.0, min=-10.0, max=10.0, step=0.05),
            ],
            outputs=[Pipe.Output(display_name="model")],
        )

    @classmethod
    def execute(cls, model, lora, strength):
        return io.NodeOutput(model.with_lora(Path(folder_paths.get_full_path_or_raise("loras", lora)), strength))


class ChooseDecoding(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="ArimageDecoding",
            display_name="AR decoding",
            category=CATEGORY,
            inputs=[
                io.Combo.Input("decoding", options=choices(decoding_names)),
                io.Int.Input("window", default=0, min=0, max=4096, tooltip="0: the decoding's own"),
                io.String.Input("settings", default="", tooltip="Others, as in init=left,refresh=coupled"),
            ],
            outputs=[DecodingName.Output(display_name="decoding_settings")],
        )

    @classmethod
    def execute(cls, decoding, window, settings):
        check_installed()
        from arimage.decoding import decoding_from_text

        parts = ([f"window={window}"] if window else []) + ([settings.strip()] if settings.strip() else [])
        text = f"{decoding}:{','.join(parts)}" if parts else decoding
        decoding_from_text(text)
        return io.NodeOutput(text)


class GenerateImages(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="ArimageGenerate",
            display_name="Generate with AR model",
            category=CATEGORY,
            description="Generates images, or edits those of a batch: with a mask, where the mask is 1.",
            inputs=[
                Pipe.Input("model"),
                io.String.Input(
                    "prompt", default="a red heart", multiline=True, tooltip="Or the name or id of a class"
                ),
                seed_input(),
                io.Int.Input("batch_size", default=1, min=1, max=64),
                *sampling_inputs(),
                io.Int.Input("width", default=0, min=0, max=8192, tooltip="0: the model's"),
                io.Int.Input("height", default=0, min=0, max=8192, tooltip="0: the model's"),
                io.String.Input("negative_prompt", default="", multiline=True),
                io.Boolean.Input("one_per_line", default=False, tooltip="Every line of prompt is a prompt of its own"),
                io.Combo.Input(
                    "order", options=choices(order_names), tooltip="Of the tokens, for models of any order"
                ),
                number_input("num_inference_steps", 1000, about="Denoising steps; "),
                number_input("decoder_guidance_scale", 100, 0.1, "Guidance of a diffusion decoder; "),
                DecodingName.Input("decoding", optional=True),
                io.Image.Input(
                    "image", optional=True, tooltip="To edit with mask, or a reference for models that take one"
                ),
                io.Mask.Input("mask", optional=True),
                io.Image.Input("references", optional=True, tooltip="Reference images of a call with a mask"),
            ],
            outputs=[
                io.Image.Output(display_name="images"),
                Tokens.Output(display_name="tokens"),
                io.String.Output(display_name="stats"),
                io.String.Output(display_name="settings", tooltip="For Save image with AR settings"),
            ],
        )

    @classmethod
    def execute(
        cls,
        model,
        prompt,
        seed,
        batch_size,
        width,
        height,
        one_per_line,
        decoding=None,
        image=None,
        mask=None,
        references=None,
        **settings,
    ):
        pipe = model.ready()
        if pipe.abilities.generates_video:
            raise ValueError("this model generates videos: use the node Generate video with AR model")
        if references is not None and (image is None or mask is None):
            raise ValueError("references belong to an edit with image and mask: without a mask connect them to image")
        pictures, masks = pictures_of(image), pictures_of(mask, 2)
        edits = count_edits(pipe, pictures, masks)
        subjects = condition(pipe, split_prompts(prompt, one_per_line), edits)
        sources = {"image": pictures, "mask_image": masks, "image_reference": pictures_of(references)}
        chosen = given(pipe, settings)
        out, progress = generate(
            pipe,
            seed,
            **subjects,
            **given(pipe, sources),
            **chosen,
            width=width or None,
            height=height or None,
            num_images_per_prompt=batch_size,
            decoding=decoding,
        )
        images = to_batch(out.images)
        progress.finish(images[0])
        made = chosen | {"decoding": decoding, "made_from": [name for name in INPUTS if sources[name]]}
        reads = bool(sources["image_reference"] or (pictures and not masks))
        texts = settings_of(model, made, subjects, images, out.seeds, reads)
        tokens = GeneratedTokens(pipe, progress.call, progress.decoded)
        return io.NodeOutput(images, tokens, out.stats.summary, texts)


class GenerateVideo(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="ArimageGenerateVideo",
            display_name="Generate video with AR model",
            category=CATEGORY,
            inputs=[
                Pipe.Input("model"),
                io.String.Input("prompt", default="a red heart, moving right", multiline=True),
                seed_input(),
                *sampling_inputs(),
                io.Int.Input("num_frames", default=0, min=0, max=1024, tooltip="0: the model's"),
                DecodingName.Input("decoding", optional=True),
                io.Image.Input(
                    "image", optional=True, tooltip="The first frame, or the frames of a video to continue"
                ),
            ],
            outputs=[
                io.Image.Output(display_name="frames"),
                io.Float.Output(display_name="fps"),
                io.String.Output(display_name="stats"),
            ],
        )

    @classmethod
    def execute(cls, model, prompt, seed, num_frames, decoding=None, image=None, **sampling):
        pipe = model.ready()
        if not pipe.abilities.generates_video:
            raise ValueError("this model generates images: use the node Generate with AR model")
        frames = pictures_of(image)
        source = {"video": frames} if len(frames) > 1 else {"image": frames and frames[0]}
        asked = given(pipe, {**source, "num_frames": num_frames or None, **sampling})
        subject = {"prompt": prompt} if prompt.strip() else {}
        out, progress = generate(pipe, seed, **subject, **asked, decoding=decoding)
        frames = to_batch(out.frames[0])
        progress.finish(frames[-1])
        return io.NodeOutput(frames, float(pipe.config.fps), out.stats.summary)


class DecodeTokens(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="ArimageDecodeTokens",
            display_name="Decode AR tokens",
            category=CATEGORY,
            description="Decodes the tokens of Generate to pixels again, for example in tiles.",
            inputs=[
                Pipe.Input("model"),
                Tokens.Input("tokens"),
                io.Int.Input("tile_size", default=0, min=0, max=8192, tooltip="Pixels of a tile; 0: the whole image"),
            ],
            outputs=[io.Image.Output(display_name="images")],
        )

    @classmethod
    def execute(cls, model, tokens, tile_size):
        pipe, call = model.ready(), tokens.call
        if tokens.pipe is not pipe:
            raise ValueError("tokens are those of another model: connect the model that generated them")
        if tile_size:
            pipe.enable_vae_tiling(tile_size, tile_size)
        try:
            with torch.no_grad():
                images = pipe.to_images(call, pipe.decode_result(call, tokens.tokens).float())
        finally:
            if tile_size:
                pipe.disable_vae_tiling()
        return io.NodeOutput(to_batch(images))


class SaveImages(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="ArimageSave",
            display_name="Save image with AR settings",
            category=CATEGORY,
            description="Saves images as PNG files that say how they were made, for `arimage generate --from`.",
            inputs=[
                io.Image.Input("images"),
                io.String.Input("settings", force_input=True),
                io.String.Input("filename_prefix", default="arimage"),
            ],
            outputs=[],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, images, settings, filename_prefix):
        check_installed()
        from arimage.media.metadata import saving

        pictures, texts, saved = to_pictures(images), settings.split("\n"), []
        if len(pictures) != len(texts):
            raise ValueError(f"images holds {len(pictures)} and settings {len(texts)}: connect both to one node")
        output, size = folder_paths.get_output_directory(), pictures[0].size
        folder, name, number, subfolder, _ = folder_paths.get_save_image_path(filename_prefix, output, *size)
        for count, (picture, text) in enumerate(zip(pictures, texts, strict=True), number):
            file = f"{name}_{count:05}_.png"
            picture.save(Path(folder) / file, **saving(".png", text))
            saved.append({"filename": file, "subfolder": subfolder, "type": "output"})
        return io.NodeOutput(ui={"images": saved})


NODES = [LoadModel, LoadLora, ChooseDecoding, GenerateImages, GenerateVideo, DecodeTokens, SaveImages]
