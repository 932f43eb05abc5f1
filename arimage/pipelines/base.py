"""What the pipelines of all families share: loading and saving, seeds, the decoding loop, images."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import DiffusionPipeline
from diffusers.image_processor import PipelineImageInput, VaeImageProcessor
from huggingface_hub import snapshot_download
from PIL import Image

from ..decoding import (
    AutoregressiveDecoding,
    Decoding,
    Sampling,
    TokenModel,
    decode,
    decoding_from_dict,
    decoding_from_name,
    decoding_to_dict,
)
from ..decoding.state import DecodingState
from .output import DecodingStats, Tokens


GENERATION_CONFIG = "generation_config.json"
OUTPUT_TYPES = ("pil", "np", "pt", "latent")


class ARImagePipeline(DiffusionPipeline):
    """Base of the pipelines. Each has `bind`, which takes the condition of a call and returns the `TokenModel` of its images.

    Attributes:
        decoding: the decoding method of calls that name none; a decoding object or a name may be assigned.
        generation_config: the sampling defaults of the checkpoint: guidance_scale, temperature, top_k, top_p.

    Both are kept in `generation_config.json` by `save_pretrained` and `from_pretrained`.
    """

    _callback_tensor_inputs = ["tokens", "decided"]

    def __init__(self):
        super().__init__()
        self.generation_config = {"guidance_scale": 1.0, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        self.decoding = AutoregressiveDecoding()
        self._interrupt = False

    @property
    def decoding(self) -> Decoding:
        return self._decoding

    @decoding.setter
    def decoding(self, decoding: Decoding | str):
        self._decoding = as_decoding(decoding)

    @property
    def interrupt(self) -> bool:
        """Set `_interrupt` to True in a callback to end the call after the running pass."""
        return self._interrupt

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs) -> None:
        # First, since the parent may push the folder to the Hub.
        config = {**self.generation_config, "decoding": decoding_to_dict(self.decoding)}
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        (Path(save_directory) / GENERATION_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        super().save_pretrained(save_directory, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs):
        folder = Path(pretrained_model_name_or_path)
        if not folder.is_dir():
            folder = Path(cls.download(str(pretrained_model_name_or_path), **kwargs))
        # transformers would load in the dtype of the file, diffusers in float32: one default for all parts.
        if "dtype" not in kwargs and "torch_dtype" not in kwargs:
            kwargs["dtype"] = torch.float32
        pipe = super().from_pretrained(folder, **kwargs)
        if (folder / GENERATION_CONFIG).exists():
            pipe._load_generation_config(folder / GENERATION_CONFIG)
        return pipe

    def _load_generation_config(self, path: Path) -> None:
        try:
            config = json.loads(path.read_text())
            if "decoding" in config:
                self.decoding = decoding_from_dict(config.pop("decoding"))
            self.generation_config.update(config)
            self.sampling()
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"{path} does not hold the sampling defaults of a pipeline ({error}): save the pipeline again, or mend it"
            ) from error

    @classmethod
    def download(cls, pretrained_model_name: str, **kwargs) -> str:
        """Download the files of a Hub repository into the cache and return their folder."""
        names = ("cache_dir", "force_download", "local_files_only", "token", "revision")
        return snapshot_download(
            pretrained_model_name,
            allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"],
            **{name: kwargs[name] for name in names if kwargs.get(name) is not None},
        )

    def sampling(self, **settings) -> Sampling:
        """The `Sampling` of a call: `settings` that are not None over the checkpoint's defaults."""
        given = {name: value for name, value in settings.items() if value is not None}
        return Sampling(**{**self.generation_config, **given})

    def check_call(
        self,
        height: int | None,
        width: int | None,
        trained_size: int | None,
        output_type: str,
        callback_on_step_end_tensor_inputs: list[str],
        num_images_per_prompt: int,
    ) -> None:
        """Refuse what no pipeline can do, before any work; `trained_size` is None where several sizes are drawn."""
        if trained_size and {height or trained_size, width or trained_size} != {trained_size}:
            raise ValueError(
                f"height and width are {height} and {width}: this checkpoint draws {trained_size}x{trained_size} pixels "
                "only, leave them out"
            )
        if output_type not in OUTPUT_TYPES:
            raise ValueError(f"output_type is {output_type!r}: choose among {', '.join(OUTPUT_TYPES)}")
        unknown = set(callback_on_step_end_tensor_inputs) - set(self._callback_tensor_inputs)
        if unknown:
            raise ValueError(
                f"callback_on_step_end_tensor_inputs has {sorted(unknown)}: choose among {self._callback_tensor_inputs}"
            )
        if num_images_per_prompt < 1:
            raise ValueError(f"num_images_per_prompt is {num_images_per_prompt}: give at least 1")

    def prepare_image(
        self,
        image: PipelineImageInput | None,
        mask_image: PipelineImageInput | None,
        size: int | tuple[int, int],
        count: int,
        num_images_per_prompt: int,
    ) -> tuple[torch.Tensor, torch.BoolTensor]:
        """A picture to change for each image of a call with `count` prompts or classes, resized to `size`, the side of a
        square or (height, width).

        Returns:
            float32 [B, 3, H, W] in [-1, 1], and where it is drawn anew, bool [B, 1, H, W].

        Raises:
            ValueError: if one of the two is missing, or they are not pictures, one for all prompts or one a prompt.
        """
        if image is None or mask_image is None:
            raise ValueError("image and mask_image belong together: give both, or neither")
        height, width = (size, size) if isinstance(size, int) else size
        if isinstance(mask_image, np.ndarray | torch.Tensor):
            # A mask may be boolean.
            mask_image = mask_image * 1.0
        masks = VaeImageProcessor(
            vae_scale_factor=1, do_normalize=False, do_binarize=True, do_convert_grayscale=True
        ).preprocess(mask_image, height, width)
        pixels = VaeImageProcessor(vae_scale_factor=1, do_convert_rgb=True).preprocess(image, height, width)
        if not pixels.is_floating_point() or pixels.abs().max() > 1:
            raise ValueError("image has values outside [0, 1]: give PIL images, or arrays of floats from 0 to 1")
        for name, values, channels in (("image", pixels, 3), ("mask_image", masks, 1)):
            if values.shape[1] != channels:
                raise ValueError(f"{name} has {values.shape[1]} channels where {channels} are expected: convert it")
            if len(values) not in (1, count):
                raise ValueError(
                    f"{name} holds {len(values)} pictures for {count} prompts or classes: give one for all, or one for each"
                )
        pixels, masks = (
            values.to(self._execution_device).expand(count, -1, -1, -1).repeat_interleave(num_images_per_prompt, dim=0)
            for values in (pixels.float(), masks.bool())
        )
        return pixels, masks

    def on_device(self, module: torch.nn.Module) -> torch.nn.Module:
        """A component on the device where it works, for calls of its parts: `enable_model_cpu_offload` brings it there when
        it is called as a whole, which some never are."""
        if hasattr(module, "_hf_hook"):
            module._hf_hook.pre_forward(module)
        return module

    def draw_seeds(
        self, generator: torch.Generator | list[torch.Generator] | None, batch_size: int
    ) -> torch.LongTensor:
        """One seed an image [B], from one generator in turn or from one generator an image."""
        if isinstance(generator, list):
            if len(generator) != batch_size:
                raise ValueError(
                    f"{len(generator)} generators for {batch_size} images: give one an image, or a single one"
                )
            seeds = torch.cat([self.draw_seeds(one, 1).cpu() for one in generator])
        else:
            device = "cpu" if generator is None else generator.device
            seeds = torch.randint(2**63 - 1, (batch_size,), generator=generator, device=device)
        return seeds.to(self._execution_device)

    def run_decoding(
        self,
        model: TokenModel,
        decoding: Decoding | str | None,
        sampling: Sampling,
        seeds: torch.LongTensor,
        callback: Callable | None,
        callback_tensor_inputs: list[str],
    ) -> tuple[DecodingState, dict]:
        """Decode the codes of a batch; the second value holds the fields of `DecodingStats` known by then."""
        decoding = self.decoding if decoding is None else as_decoding(decoding)
        self._interrupt = False
        on_cpu = seeds.device.type == "cpu"
        began = self._now()
        prefill_seconds = 0.0

        with self.progress_bar(total=model.num_tokens) as progress:

            def on_step(state: DecodingState) -> bool:
                nonlocal prefill_seconds
                passes = state.forward_passes
                if passes == 1:
                    prefill_seconds = self._now() - began
                # Reading how far an accelerator is waits for it.
                if on_cpu or passes % 8 == 0:
                    progress.update(int(state.decided.sum(1).min()) - progress.n)
                if callback is not None:
                    tensors = {}
                    for name in callback_tensor_inputs:
                        tensors[name] = getattr(state, name)
                    callback(self, passes - 1, passes, tensors)
                return self._interrupt

            state = decode(model, decoding, sampling, seeds, on_step)
            progress.update(int(state.decided.sum(1).min()) - progress.n)
        return state, {
            "forward_passes": state.forward_passes,
            "tokens_per_pass": float(state.decided.sum(1).float().mean()) / state.forward_passes,
            "exact": decoding.exact,
            "prefill_seconds": prefill_seconds,
            "decode_seconds": self._now() - began - prefill_seconds,
            "accepted": torch.stack(state.accepted).cpu(),
        }

    def to_images(
        self, tokens: Tokens, draw: Callable[[], torch.Tensor], output_type: str, stats: dict
    ) -> tuple[list[Image.Image] | np.ndarray | torch.Tensor | Tokens, DecodingStats]:
        """The `tokens` themselves for "latent", else the pictures that `draw` returns, [B, 3, H, W] in [-1, 1], as
        `output_type`; and the completed statistics."""
        began = self._now()
        images = tokens
        if output_type != "latent":
            images = VaeImageProcessor().postprocess(draw().float(), output_type=output_type)
        return images, DecodingStats(**stats, tokenizer_seconds=self._now() - began)

    def _now(self) -> float:
        if self._execution_device.type == "cuda":
            torch.cuda.synchronize(self._execution_device)
        return time.perf_counter()


def as_texts(texts: str | list[str], name: str = "prompt") -> list[str]:
    """One text or several as a list.

    Raises:
        ValueError: if they are something else, or none.
    """
    listed = [texts] if isinstance(texts, str) else texts
    if not isinstance(listed, list) or not listed or not all(isinstance(text, str) for text in listed):
        raise ValueError(f"{name} is {texts!r}: give a string or a list of strings")
    return listed


def codes_to_keep(codes: torch.LongTensor, repaint: torch.BoolTensor) -> torch.LongTensor:
    """The codes [B, N] of pictures from codes [B, h, w], but -1 where any pixel of a code is in `repaint` [B, 1, H, W]."""
    drawn = F.max_pool2d(repaint.float(), repaint.shape[-1] // codes.shape[-1])[:, 0] > 0
    return torch.where(drawn, -1, codes).flatten(1)


def as_decoding(decoding: Decoding | str) -> Decoding:
    """A decoding, or the one of that name."""
    return decoding_from_name(decoding) if isinstance(decoding, str) else decoding
