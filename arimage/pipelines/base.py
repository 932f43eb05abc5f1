"""The base of all pipelines: the body of a call, and abilities."""

import functools
import numbers
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline
from diffusers.image_processor import PipelineImageInput, VaeImageProcessor
from diffusers.utils import logging
from PIL import Image

from ..decoding import PRESETS, AutoregressiveDecoding, Decoding, Sampling, decoding_names
from ..decoding.contract.supports import Traits
from ..models.layers import refine_norms
from ..models.mixin import align_weights
from ..tokenizers.tiling import Tiling, TilingMixin
from . import forked
from .abilities import Abilities
from .arguments import CallMixin
from .call import GenerationCall, RunOptions, running_call
from .compiling import CompileMixin
from .fusing import FuseMixin
from .output import ImagePipelineOutput, Tokens
from .pictures.images import known_tokens, prepare_image, round_levels_down
from .quantized import quantize_weights
from .saving.mixin import SavingMixin
from .seeds import image_seeds, noise_key
from .text.checks import as_decoding, as_texts, with_dtype
from .text.known import KnownCaptions


logger = logging.get_logger(__name__)

OUTPUT_TYPES = ("pil", "np", "pt", "latent")
MAX_IMAGES_PER_PROMPT = 1000


class ARPipeline(CallMixin, SavingMixin, FuseMixin, CompileMixin):
    """Base class of image and video pipelines. A family adds

    - `__call__`, of a function that checks the arguments of a call and returns its `GenerationCall`, model included:
      see `pipeline_call`;
    - `decode_tokens(call, tokens)`, from tokens to pixels, and `to_images(call, pixels)`, from these to what a call
    returns;
    - its `abilities`, and properties of the checkpoint such as `image_sizes`.

    Its constructor raises a ValueError if the components do not fit together.

    Attributes:
        decoding: the default decoding method of calls; a decoding object or a name may be assigned, see `as_decoding`.
        generation_config: the sampling defaults of the checkpoint: guidance_scale, temperature, top_k, top_p, and
            min_p and guided_tokens if they are on.
        known_captions: the captions that a model with a small vocabulary of images was trained on; a call warns about
            any other prompt. None for models of arbitrary text, or to turn the warning off.

    `from_pretrained`, `save_pretrained` and `from_pipe` keep them. `Pipeline(**pipe.components)` starts with the
    defaults.
    """

    _callback_tensor_inputs = ["tokens", "decided", "work"]
    # What a call returns, and the name of the argument for the number of them per prompt.
    _output: type = ImagePipelineOutput
    per_prompt = "num_images_per_prompt"
    abilities: Abilities
    # The name of the state's tensor [B, ...] that is decoded to pixels.
    decoded_tensor = "tokens"

    def __init__(self):
        super().__init__()
        forked.limit_forks()
        if os.environ.get("ARIMAGE_EAGER") != "1":
            self.capture()
        self.generation_config = {"guidance_scale": 1.0, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        self._own_decoding: Decoding | None = None
        self.decoding = AutoregressiveDecoding()
        self.known_captions: KnownCaptions | None = None
        self._tiling: Tiling | None = None

    # Abilities

    @property
    def image_sizes(self) -> list[tuple[int, int]]:
        """The sizes (height, width) in pixels of images or frames that the weights were trained for, the default
        first."""
        raise NotImplementedError

    def num_tokens(self, size: tuple[int, int]) -> int | None:
        """The number of tokens of an image of `size`; None if it is in proportion to the pixels."""
        return None

    @property
    def num_classes(self) -> int | None:
        """The number of classes that `class_labels` chooses from; None if the model generates from text."""
        return None

    @property
    def begins_with_text(self) -> bool:
        """Whether videos begin with a text alone, and not only with an image or a video."""
        return True

    @property
    def reference_guidance_scale(self) -> float | None:
        """The default of `guidance_scale` with reference images; None for that of all calls."""
        return None

    @property
    def class_names(self) -> list[str] | None:
        """The names of the classes, indexed by id; None if the checkpoint does not name them."""
        return None

    @classmethod
    def traits_with(cls, parts: Collection[str]) -> Traits:
        """The `traits` of a pipeline of this class with the components `parts`, but for those that are settings of a
        component."""
        return Traits(
            cls.abilities.kind,
            raster=not cls.abilities.accepts("order"),
            one_grid=not cls.abilities.several_grids,
            groups=cls.abilities.predicts_groups,
            frames=cls.abilities.generates_video,
            drafter="drafter" in parts,
            denoiser="denoiser" in parts,
            neighbours="neighbours" in parts,
            codebook=cls.abilities.kind == "tokens",
            refiner="refiner" in parts,
            prunes=cls.abilities.kind == "scales",
        )

    @property
    def traits(self) -> Traits:
        """The properties of the model that determine which decodings it can run, for a call in the default order."""
        return self.traits_with([name for name, part in vars(self).items() if part is not None])

    @property
    def decoding_names(self) -> list[str]:
        """The names of the decodings that this pipeline can run."""
        return decoding_names(self.traits)

    # State

    @property
    def order(self) -> str | None:
        """The default order of the tokens; None for families that generate in raster order only."""
        return None

    @property
    def decoding(self) -> Decoding:
        return self._decoding

    @decoding.setter
    def decoding(self, decoding: Decoding | str):
        self._decoding = self.as_decoding(decoding)

    def as_decoding(self, decoding: Decoding | str) -> Decoding:
        """A decoding, or the one that a text such as "sjd" or "sjd-coupled:window=16" describes. Settings that a text
        leaves out are those of the checkpoint's own decoding, if it names that one, else those of the preset.

        Raises:
            ValueError: if it is neither, or the decoding is not hashable.
        """
        if isinstance(decoding, str) and (name := decoding.partition(":")[0]) not in PRESETS:
            raise ValueError(f"unknown decoding {name[:80]!r}: this model runs {', '.join(self.decoding_names)}")
        return as_decoding(decoding, self._own_decoding)

    @property
    def current_call(self) -> GenerationCall | None:
        """The call of this pipeline that runs in this thread, for callbacks; None outside of a call."""
        return running_call(self)

    @property
    def guidance_scale(self) -> float | None:
        """The guidance scale of the running call, for callbacks, the largest of several; None outside of a call."""
        call = self.current_call
        if call is None:
            return None
        scale = (call.decoder if "guidance_scale" in self.abilities.decoder else call.sampling).guidance_scale
        return max(scale) if isinstance(scale, tuple) else scale

    @property
    def num_timesteps(self) -> int | None:
        """The largest number of forward passes per image in the running call, for callbacks; None outside of a
        call."""
        return None if self.current_call is None else self.current_call.num_timesteps

    @property
    def do_classifier_free_guidance(self) -> bool:
        """Whether the running call also computes unconditional logits, or those of its diffusion decoder, where
        `guidance_scale` is that of the decoder."""
        if "guidance_scale" in self.abilities.decoder:
            return (self.guidance_scale or 1) > 1
        return self.current_call is not None and self.current_call.guided

    @property
    def interrupt(self) -> bool:
        """Whether a callback has interrupted the running call."""
        return self.current_call is not None and self.current_call.interrupted

    @property
    def _interrupt(self) -> bool:
        return self.interrupt

    @_interrupt.setter
    def _interrupt(self, value: bool):
        if self.current_call is not None:
            self.current_call.interrupted = bool(value)
        elif value:
            raise RuntimeError("_interrupt is set outside of a call: set it in the callback of the call to stop")

    # Loading and saving

    def __setattr__(self, name: str, value: Any):
        # Also components that others have loaded, such as those of diffusers and transformers.
        if isinstance(value, torch.nn.Module):
            align_weights(value)
            refine_norms(value)
        super().__setattr__(name, value)

    @classmethod
    def from_pipe(cls, pipeline: DiffusionPipeline, **kwargs):
        """A pipeline that shares the components of `pipeline`, which is one of this library, or one of diffusers with
        the same components. Unlike in diffusers, they keep their dtypes.

        Args:
            kwargs: components to replace, and `dtype` or `torch_dtype`, which `pipeline` has from then on too.

        Raises:
            ValueError: if `pipeline` is no pipeline, the components do not fit together, or a dtype is not a
                floating-point type.
        """
        if not isinstance(pipeline, DiffusionPipeline):
            raise ValueError(
                f"from_pipe got {type(pipeline).__name__}: give a pipeline, or load one by from_pretrained"
            )
        given = {name: kwargs.pop(name, None) for name in ("dtype", "torch_dtype")}
        dtypes = {name: dtype for name, dtype in given.items() if dtype is not None}
        dtype = next(iter(with_dtype(dtypes).values()))
        if isinstance(dtype, dict):
            raise ValueError(f"dtype is {dtype}: give from_pipe one for all components")
        modules, options = cls._get_signature_keys(cls)
        parts = {name: part for name, part in pipeline.components.items() if name in modules}
        settings = {name: pipeline.config[name] for name in options if name in pipeline.config}
        pipe = cls(**{**settings, **parts, **kwargs})
        pipe.register_to_config(_name_or_path=pipeline.name_or_path)
        if isinstance(pipeline, ARPipeline):
            pipe.take_defaults(pipeline)
            pipe._tiling = pipeline._tiling
        if dtypes:
            pipe.to(dtype=dtype)
        return pipe

    def take_defaults(self, pipeline: "ARPipeline") -> None:
        """Take the defaults of calls from another pipeline, such as sampling settings, decoding and order, and the
        captions that it knows."""
        self.generation_config = dict(pipeline.generation_config)
        self.decoding, self._own_decoding = pipeline.decoding, pipeline._own_decoding
        for name in set(self._saved_defaults) & set(pipeline._saved_defaults):
            setattr(self, name, getattr(pipeline, name))
        self.known_captions = pipeline._own_captions

    # Memory

    def quantize_weights(self, dtype: torch.dtype = torch.int8) -> None:
        """Store the weights of the linear layers in the blocks of the transformer, or of a language model's decoder
        (of Janus, also in the head and the aligner of image tokens), in 8 bits, with one scale per row: half the
        memory of bfloat16, and half the bytes that a step reads. The weights are rounded, so images follow another
        distribution.

        Adapters are loaded before, fused and unloaded. The pipeline cannot be saved afterwards; load it again for the
        full weights.

        Args:
            dtype: `torch.int8` or `torch.float8_e4m3fn`.

        Raises:
            ValueError: if it is another dtype, the weights are quantised or offloaded, or have adapters.
        """
        quantize_weights(self, dtype)

    # Image tokenizer

    @property
    def tiling(self) -> TilingMixin:
        """The image tokenizer, on which `enable_vae_slicing` and `enable_vae_tiling` act, if it is one of this
        library."""
        return self.vq if self._tiling is None else self._tiling

    def enable_vae_slicing(self) -> None:
        """Decode the images of a batch to pixels one at a time; see `TilingMixin.enable_slicing`."""
        self.tiling.enable_slicing()

    def disable_vae_slicing(self) -> None:
        """Decode all images of a batch to pixels at once again."""
        self.tiling.disable_slicing()

    def enable_vae_tiling(self, *args: int | None, **kwargs: int | None) -> None:
        """Decode large images to pixels in overlapping tiles; takes the arguments of `TilingMixin.enable_tiling`."""
        self.tiling.enable_tiling(*args, **kwargs)

    def disable_vae_tiling(self) -> None:
        """Decode whole images to pixels again."""
        self.tiling.disable_tiling()

    # Parts of a family's call

    def sampling(self, **settings) -> Sampling:
        """The `Sampling` of a call: the checkpoint's defaults, overridden by `settings` that are not None."""
        given = self.generation_config | {name: value for name, value in settings.items() if value is not None}
        sampling = Sampling(**{name: value for name, value in given.items() if name not in self.abilities.decoder})
        if self.abilities.kind != "scales":
            sampling.check_scales(None)
        return sampling

    def check_size(self, height: int | None, width: int | None) -> tuple[int, int]:
        """Height and width of the images of a call. Refuses all but `image_sizes`."""
        sizes = [size for size in self.image_sizes if height in (None, size[0]) and width in (None, size[1])]
        if not sizes:
            known = " or ".join(f"{size[0]}x{size[1]}" for size in self.image_sizes)
            raise ValueError(
                f"height and width are {height} and {width}: this checkpoint generates {known} pixels only, leave "
                "them out"
            )
        return sizes[0]

    def begin_call(
        self,
        count: int,
        size: tuple[int, int] | None = None,
        *,
        height: int | None = None,
        width: int | None = None,
        num_images_per_prompt: int = 1,
        generator: torch.Generator | list[torch.Generator] | None = None,
        **sampling,
    ) -> GenerationCall:
        """Check the arguments that all families share and return a call with `count` prompts or classes, without a
        model yet. The size is that of `check_size`, unless the family gives it."""
        self.check_offloading()
        size = self.check_size(height, width) if size is None else size
        images = num_images_per_prompt
        if not isinstance(images, numbers.Integral) or not 1 <= images <= MAX_IMAGES_PER_PROMPT or images is True:
            raise ValueError(f"{self.per_prompt} is {images!r}: give a whole number from 1 to {MAX_IMAGES_PER_PROMPT}")
        image_seeds, seeds = self.prepare_seeds(generator, count * images)
        return GenerationCall(
            sampling=self.sampling(**sampling),
            seeds=seeds,
            image_seeds=image_seeds,
            size=size,
            num_images_per_prompt=int(images),
        )

    def prepare_seeds(
        self, generator: torch.Generator | list[torch.Generator] | None, batch: int
    ) -> tuple[list[int], torch.LongTensor]:
        """The `image_seeds` of a batch, all from one generator or each from its own in a list, and the keys of their
        random numbers, int64 [batch]."""
        generators: Sequence[Any] = generator if isinstance(generator, list | tuple) else [generator]
        listed = generators is generator
        if not all(isinstance(one, torch.Generator) or (one is None and not listed) for one in generators):
            raise ValueError(f"generator is {generator!r}: give a torch.Generator, or a list with one per image")
        if listed and len(generators) != batch:
            raise ValueError(
                f"generator holds {len(generators)} for {batch} images: give one per image, or a single one"
            )
        count = 1 if listed else batch
        used = [torch.default_generator if one is None else one for one in generators]
        found = [(seed, one.device) for one in used for seed in image_seeds(one, count)]
        keys = torch.tensor([noise_key(*each) for each in found], device=self._execution_device)
        return [seed for seed, _ in found], keys

    def check_known(self, prompt: str | list[str] | None) -> None:
        """Warn once about every prompt that is not among `known_captions`."""
        if self.known_captions is not None and prompt is not None:
            for text in as_texts(prompt):
                unknown = self.known_captions.check(text, Path(self.name_or_path or "this model").name)
                if unknown is not None:
                    _warn_once(unknown.message)

    # The body of a call

    def check_options(
        self,
        decoding: Decoding | str | None,
        output_type: str,
        return_dict: bool,
        callback_on_step_end: Callable | None,
        callback_on_step_end_tensor_inputs: list[str],
        batch_size: int | None,
    ) -> RunOptions:
        """Check the arguments of `__call__` that all families share, before any computation."""
        for name, part in self.components.items():
            if part is None and name not in self._optional_components:
                raise ValueError(f"this pipeline has no {name}: load it without {name}=None")
        if output_type not in OUTPUT_TYPES:
            raise ValueError(f"output_type is {output_type!r}: choose among {', '.join(OUTPUT_TYPES)}")
        names = callback_on_step_end_tensor_inputs
        if not isinstance(names, list | tuple) or any(name not in self._callback_tensor_inputs for name in names):
            raise ValueError(
                f"callback_on_step_end_tensor_inputs is {names!r}: give a list of some of "
                f"{self._callback_tensor_inputs}"
            )
        if callback_on_step_end is not None and not callable(callback_on_step_end):
            raise ValueError(f"callback_on_step_end is {callback_on_step_end!r}: give a function")
        whole = isinstance(batch_size, numbers.Integral) and batch_size is not True
        if batch_size is not None and not (whole and batch_size >= 1):
            raise ValueError(
                f"batch_size is {batch_size!r}: give a whole number of at least 1, or None for all at once"
            )
        if forked.limited:
            forked.warn()
        decoding = self.decoding if decoding is None else self.as_decoding(decoding)
        return RunOptions(decoding, output_type, return_dict, callback_on_step_end, list(names), batch_size)

    def whole_tokens(self, call: GenerationCall, tokens: torch.LongTensor) -> Tokens:
        """Rearrange the tokens [B, N] of a call's model to their places, [B, *shape], including given panels."""
        placed = call.layout.to_places(tokens)
        return placed if call.given_tokens is None else torch.cat([call.given_tokens, placed], dim=1)

    def latents_of(self, tokens: Tokens) -> Tokens:
        """What a call returns for "latent", of its `whole_tokens`."""
        return tokens

    def preview(self, call: GenerationCall, tokens: torch.Tensor) -> torch.Tensor:
        """Pixels [1, 3, H, W] that show the tokens so far of one image, [1, N] or continuous [1, N, D]."""
        if call.model.kind in ("tokens", "masked_tokens"):
            # What the image tokenizer decodes an unknown token to would tint the known ones around it.
            tokens = call.layout.fill(tokens)
        return self.decode_tokens(call, tokens)

    def decode_result(self, call: GenerationCall, result: torch.Tensor) -> torch.Tensor:
        """The pixels [B, 3, H, W] of finished images of a call, from their `decoded_tensor`."""
        return self.decode_tokens(call, result)

    def to_images(self, call: GenerationCall, pixels: torch.Tensor) -> Any:
        """Convert pixels to the `output_type` of the call."""
        raise NotImplementedError

    def check_finite(self, pixels: torch.Tensor) -> None:
        """Refuse decoded pixels that are not finite."""
        if not pixels.isfinite().all():
            raise ValueError(
                "the decoded pixels are not finite: check the weights of the image or video tokenizer, or load it in "
                "float32"
            )


class ARImagePipeline(ARPipeline):
    """Base class of image pipelines. To support editing, a family adds `encode_image(pixels)`, from pixels to
    tokens."""

    # Whether the authors' code rounds pixel levels down instead of to the nearest.
    _truncates_levels = False

    def edit(
        self, call: GenerationCall, image: PipelineImageInput | None, mask_image: PipelineImageInput | None
    ) -> None:
        """Make a call edit given images, if there are any."""
        if image is None and mask_image is None:
            return
        count = len(call.seeds) // call.num_images_per_prompt
        call.pixels, call.repaint = map(call.per_image, prepare_image(image, mask_image, call.size, count))
        forced = self.encode_known_tokens(call.pixels, call.repaint)
        call.sampling = replace(call.sampling, forced=forced)

    def encode_known_tokens(self, pixels: torch.Tensor, repaint: torch.BoolTensor) -> torch.LongTensor:
        """The tokens [B, N] of images [B, 3, H, W] in [-1, 1], but -1 where any pixel of a token is in `repaint`
        [B, 1, H, W]."""
        return known_tokens(self.encode_image(pixels), repaint)

    def to_images(self, call: GenerationCall, pixels: torch.Tensor) -> list[Image.Image] | np.ndarray | torch.Tensor:
        """Convert pixels [B, 3, H, W], nominally in [-1, 1], to the `output_type` of the call.

        Raises:
            ValueError: if they are not finite.
        """
        self.check_finite(pixels)
        if self._truncates_levels and call.output_type == "pil":
            pixels = round_levels_down(pixels)
        if call.pixels is not None:
            pixels = torch.where(call.repaint, pixels, call.pixels)
        return VaeImageProcessor().postprocess(pixels, output_type=call.output_type)


@functools.lru_cache(maxsize=1000)
def _warn_once(message: str) -> None:
    logger.warning(message)
