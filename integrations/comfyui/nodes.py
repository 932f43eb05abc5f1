"""The nodes. arimage is imported when a node runs: without it the pack loads, and the node says what is missing."""

import copy
import hashlib
from pathlib import Path
from time import monotonic
from typing import NamedTuple, get_args

import comfy.model_management as management
import folder_paths
import torch
from comfy.model_patcher import ModelPatcher
from comfy.utils import ProgressBar
from comfy_api.latest import io
from PIL import Image


CATEGORY = "arimage"
FOLDER = "arimage"
# The entry of a list that leaves a setting to the model.
OF_MODEL = "default"
# The largest number that a field of ComfyUI's page holds exactly.
MAX_SEED = 2**53 - 1
# Pictures that an image may be made from, with references among those of image.
INPUTS = ("image", "mask_image")
# Previews take at most this part of the time.
PREVIEW_SHARE = 0.1
MISSING = "arimage is not installed"

Pipe = io.Custom("ARIMAGE_PIPE")
DecodingName = io.Custom("ARIMAGE_DECODING")
Tokens = io.Custom("ARIMAGE_TOKENS")


class ArimageWeights(torch.nn.Module):
    """The weights of a pipeline, for ComfyUI's memory manager. They are no submodules: the manager would move some
    layers without the others, and a step needs all of them."""

    def __init__(self, pipe):
        super().__init__()
        self.pipe = pipe

    def to(self, device):
        # This also frees what the pipeline keeps between calls.
        self.pipe.to(device)
        return self


class LoadedModel:
    """A pipeline whose weights ComfyUI loads and unloads.

    Args:
        pipe: the pipeline, on `offload_device`.
        load_device: where it generates.
        offload_device: where its weights are while others need the memory.
        name: what it was loaded by.

    Attributes:
        loras: files and strengths of the adapters that are active when this one generates, by their names in the
            pipeline. Models that share the pipeline may have others.
    """

    def __init__(self, pipe, load_device: torch.device, offload_device: torch.device, name: str):
        self.pipe, self.name = pipe, name
        self.loras: dict[str, tuple[Path, float]] = {}
        parts = torch.nn.ModuleList(part for part in pipe.components.values() if isinstance(part, torch.nn.Module))
        size = sum(each.nbytes for each in [*parts.parameters(), *parts.buffers()])
        self.patcher = ModelPatcher(ArimageWeights(pipe), load_device, offload_device, size=size)

    def with_lora(self, file: Path, strength: float) -> "LoadedModel":
        """This model with one more adapter. Its weights are loaded once, next to those of the pipeline."""
        changed = file.stat().st_mtime_ns
        name = f"[{hashlib.sha256(f'{file} {changed}'.encode()).hexdigest()}]"
        if name not in {each for names in self.pipe.get_list_adapters().values() for each in names}:
            self.pipe.load_lora_weights(file, adapter_name=name)
        model = copy.copy(self)
        model.loras = {**self.loras, name: (file, strength)}
        return model

    def ready(self):
        """The pipeline, after ComfyUI has made room for it and loaded it, with the adapters of this model."""
        management.load_models_gpu([self.patcher], force_full_load=True)
        if self.loras:
            self.pipe.enable_lora()
            self.pipe.set_adapters(list(self.loras), [strength for _, strength in self.loras.values()])
        elif self.pipe.get_list_adapters():
            self.pipe.disable_lora()
        return self.pipe


class GeneratedTokens(NamedTuple):
    """What the image tokenizer of `pipe` decodes to the pixels of a call: tokens [B, N], for some models vectors."""

    pipe: object
    call: object
    tokens: torch.Tensor


def model_folders() -> dict[str, Path]:
    """The folders of pipelines in models/arimage."""
    root = Path(folder_paths.models_dir) / FOLDER
    return {path.parent.name: path.parent for path in sorted(root.glob("*/model_index.json"))}


def model_names() -> list[str]:
    try:
        from arimage.auto import packaged_models, published_models
    except ImportError:
        return [MISSING]
    return [*packaged_models(), *model_folders(), *published_models()]


def decoding_names() -> list[str]:
    try:
        from arimage.decoding.names import PRESETS
    except ImportError:
        return [MISSING]
    return list(PRESETS)


def order_names() -> list[str]:
    try:
        from arimage.decoding.names import Order
    except ImportError:
        return [MISSING]
    return [OF_MODEL, *get_args(Order)]


def check_installed() -> None:
    try:
        import arimage  # noqa: F401
    except ImportError as error:
        raise RuntimeError(
            f"{MISSING}: install it from its clone into the Python of ComfyUI, and start ComfyUI again"
        ) from error


class Progress:
    """A callback of a call: it moves the node's bar by the work that is done, shows the first image so far, and ends
    the call when the user interrupts. `call` and `decoded` are those of the last step, the latter what becomes
    pixels."""

    def __init__(self):
        self.bar = self.call = self.decoded = None
        self.next_preview = 0.0

    def __call__(self, pipe, step, passes, tensors):
        management.throw_exception_if_processing_interrupted()
        self.call, self.decoded = pipe.current_call, tensors[pipe.decoded_tensor]
        total, preview, began = tensors["tokens"].numel(), None, monotonic()
        if self.bar is None:
            self.bar = ProgressBar(total)
        if began >= self.next_preview:
            pixels = pipe.preview(self.call.select(slice(1)), tensors["tokens"][:1])
            # Of a video, the last frame.
            pixels = (pixels if pixels.ndim == 4 else pixels[:, :, -1])[0]
            preview = preview_of((pixels.float().permute(1, 2, 0) + 1) / 2)
            self.next_preview = began + (monotonic() - began) / PREVIEW_SHARE
        self.bar.update_absolute(round(float(tensors["work"].mean()) * total), total, preview)

    def finish(self, image: torch.Tensor) -> None:
        """Show a finished image, which stays in the node."""
        self.bar.update_absolute(self.bar.total, self.bar.total, preview_of(image))


def preview_of(image: torch.Tensor) -> tuple[str, Image.Image, int]:
    """A preview for ComfyUI's page, of an image [H, W, 3] in 0 .. 1."""
    return "JPEG", to_pictures(image[None])[0], 512


def callback_inputs(pipe) -> list[str]:
    """The tensors that `Progress` needs."""
    return list(dict.fromkeys(["tokens", "work", pipe.decoded_tensor]))


def to_pictures(images: torch.Tensor) -> list[Image.Image]:
    """ComfyUI's images float32 [B, H, W, C], or masks [B, H, W], in 0 .. 1. An image of one channel is grey."""
    if images.ndim == 4 and images.shape[-1] not in (1, 3, 4):
        raise ValueError(f"image has {images.shape[-1]} channels: give one of 1, 3 or 4")
    if images.ndim == 4 and images.shape[-1] == 1:
        images = images[..., 0]
    return [Image.fromarray(levels) for levels in (images.clamp(0, 1) * 255).round().byte().cpu().numpy()]


def given(pipe, settings: dict) -> dict:
    """The settings that are not at the model's default, which is None, "", `OF_MODEL` or a negative number."""
    chosen = {
        name: value
        for name, value in settings.items()
        if not (value is None or value in ("", OF_MODEL) or (isinstance(value, int | float) and value < 0))
    }
    for name in chosen:
        if not pipe.abilities.accepts(name):
            raise ValueError(f"this model takes no {name}: leave it at its default")
    return chosen


def split_prompts(prompt: str, one_per_line: bool) -> list[str]:
    if not one_per_line:
        return [prompt]
    prompts = [line.strip() for line in prompt.splitlines() if line.strip()]
    if not prompts:
        raise ValueError("prompt has no line with text: write one prompt per line, or switch one_per_line off")
    return prompts


def condition(pipe, prompts: list[str], count: int = 1) -> dict:
    """The prompts, or a single one `count` times. For a class-conditional model they name classes, by id or name."""
    if len(prompts) > 1 and count not in (1, len(prompts)):
        raise ValueError(f"{len(prompts)} prompts and {count} images: give one of either, or as many")
    prompts = prompts * count if len(prompts) == 1 else prompts
    if pipe.num_classes is None:
        return {"prompt": prompts}
    return {"class_labels": [int(text) if text.strip().isdigit() else text.strip() for text in prompts]}


def settings_of(model: LoadedModel, settings: dict, subjects: dict, images: torch.Tensor, seeds: list[int]) -> str:
    """How each image [B, H, W, 3] was made, a line of JSON each, as all of arimage writes it into pictures.

    Args:
        subjects: the prompts or classes of the call, as `condition` returns them.
    """
    from arimage.cli.made import notes_of
    from arimage.decoding import decoding_to_text

    pipe = model.pipe
    [(name, values)] = subjects.items()
    conditions = [{name.replace("labels", "label"): value} for value in values]
    reads = bool(settings["made_from"] and pipe.abilities.max_references)
    loras = [f"{file}:{strength}" for file, strength in model.loras.values()] or None
    about = settings | {
        "model": model.name,
        "lora": loras,
        "decoding": settings["decoding"] or decoding_to_text(pipe.decoding),
        "batch_size": len(seeds),
    }
    texts, _ = notes_of(pipe, about, conditions, to_pictures(images), seeds, reads)
    return "\n".join(texts)


def count_edits(pipe, images: list | None, masks: list | None) -> int:
    """How many prompts a call needs, so that every image is used: each of a batch is edited with its mask, or with the
    only one. Without a mask they are references: one per prompt, or all of them for one."""
    if not images or not masks:
        return len(images) if images and pipe.abilities.max_references == 1 else 1
    count = max(len(images), len(masks))
    if {len(images), len(masks)} - {1, count}:
        raise ValueError(
            f"image holds {len(images)} images and mask {len(masks)} masks: give one of either, or as many"
        )
    return count


def seed_input():
    return io.Int.Input("seed", default=0, min=0, max=MAX_SEED, control_after_generate=True)


def sampling_inputs() -> list:
    """Settings of the distribution; -1 stands for the model's own."""
    return [
        io.Float.Input("guidance_scale", default=-1.0, min=-1.0, max=100.0, step=0.1, tooltip="-1: the model's"),
        io.Float.Input("temperature", default=-1.0, min=-1.0, max=100.0, step=0.05, tooltip="-1: the model's"),
        io.Int.Input("top_k", default=-1, min=-1, max=2**20, tooltip="-1: the model's; 0: off"),
        io.Float.Input("top_p", default=-1.0, min=-1.0, max=1.0, step=0.01, tooltip="-1: the model's; 1: off"),
        io.Float.Input("min_p", default=-1.0, min=-1.0, max=1.0, step=0.01, tooltip="-1: the model's; 0: off"),
    ]


class LoadModel(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="ArimageLoadModel",
            display_name="Load AR model",
            category=CATEGORY,
            inputs=[
                io.Combo.Input("model", options=model_names(), tooltip="Packaged, from models/arimage, or published"),
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
                io.Combo.Input("decoding", options=decoding_names()),
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
                io.Combo.Input("order", options=order_names(), tooltip="Of the tokens, for models of any order"),
                io.Int.Input(
                    "num_inference_steps", default=-1, min=-1, max=1000, tooltip="Denoising steps; -1: the model's"
                ),
                io.Float.Input(
                    "decoder_guidance_scale",
                    default=-1.0,
                    min=-1.0,
                    max=100.0,
                    step=0.1,
                    tooltip="Of a diffusion decoder; -1: the model's",
                ),
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
        # Some nodes give a single image or mask without its dimension.
        pictures = None if image is None else to_pictures(image.reshape(-1, *image.shape[-3:]))
        masks = None if mask is None else to_pictures(mask.reshape(-1, *mask.shape[-2:]))
        edits = count_edits(pipe, pictures, masks)
        prompts = split_prompts(prompt, one_per_line)
        optional = {"image": pictures, "mask_image": masks, **settings}
        if references is not None:
            optional["image_reference"] = to_pictures(references.reshape(-1, *references.shape[-3:]))
        progress = Progress()
        out = pipe(
            **condition(pipe, prompts, edits),
            **given(pipe, optional),
            width=width or None,
            height=height or None,
            num_images_per_prompt=batch_size,
            generator=torch.Generator().manual_seed(seed),
            decoding=decoding,
            output_type="pt",
            callback_on_step_end=progress,
            callback_on_step_end_tensor_inputs=callback_inputs(pipe),
        )
        images = out.images.float().permute(0, 2, 3, 1).cpu()
        progress.finish(images[0])
        made_from = [name for name, used in optional.items() if used and name in INPUTS] or None
        made = given(pipe, settings) | {"decoding": decoding, "made_from": made_from}
        texts = settings_of(model, made, condition(pipe, prompts, edits), images, out.seeds)
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
        frames = [] if image is None else to_pictures(image.reshape(-1, *image.shape[-3:]))
        source = {"video": frames} if len(frames) > 1 else {"image": frames[0] if frames else None}
        progress = Progress()
        out = pipe(
            **({"prompt": prompt} if prompt.strip() else {}),
            **given(pipe, {**source, "num_frames": num_frames or None, **sampling}),
            generator=torch.Generator().manual_seed(seed),
            decoding=decoding,
            output_type="pt",
            callback_on_step_end=progress,
            callback_on_step_end_tensor_inputs=callback_inputs(pipe),
        )
        frames = out.frames[0].float().permute(0, 2, 3, 1).cpu()
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
        return io.NodeOutput(torch.stack(list(images)).permute(0, 2, 3, 1).cpu())


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
