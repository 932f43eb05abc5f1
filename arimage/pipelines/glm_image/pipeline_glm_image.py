"""GLM-Image (https://huggingface.co/zai-org/GLM-Image): images from text, or from text and reference images, by a
language model and a diffusion decoder that reads its tokens."""

import json
import os
from pathlib import Path
from typing import Unpack

import diffusers
import torch
from diffusers import AutoencoderKL, DiffusionPipeline, FlowMatchEulerDiscreteScheduler, GlmImageTransformer2DModel
from diffusers.utils import logging
from PIL import Image
from transformers import ByT5Tokenizer, GlmImageForConditionalGeneration, GlmImageProcessor, T5EncoderModel

from ...decoding import Layout
from ...settings.schema import read_object
from ..abilities import Abilities
from ..arguments import ImageArguments, pipeline_call
from ..call import GenerationCall
from ..kinds.hybrid import HybridPipeline
from ..output import ImagePipelineOutput, Tokens
from ..pictures.references import References, as_references
from ..saving.mixin import GENERATION_CONFIG
from ..saving.saved_folder import INDEX
from ..text.checks import MAX_PROMPT_CHARACTERS, as_texts, check_sides
from .family import FAMILY
from .prompts import GlmImagePrompt, Source, encode_prompts
from .transformer_glm_image import bind_prompts, grids_of, source_codes


EXAMPLE = """
# downloaded once; `arimage models` says how large it is
pipe = AutoPipeline.from_pretrained("glm-image", dtype=torch.bfloat16).to("cuda")
pipe.compile()
image = pipe("a poster that says 'HELLO'", decoding="sjd-coupled").images[0]
"""
logger = logging.get_logger(__name__)
PIXELS_PER_TOKEN = 32
IMAGE_SIZES = [(1024, 1024), (1152, 768), (768, 1152), (1280, 960), (960, 1280), (512, 512), (2048, 2048)]
# transformers' number where a generation config has none.
TOP_K = 50
# The field of model_index.json that names the file with the defaults of a folder that we have saved.
DEFAULTS = "_defaults"


class GlmImagePipeline(HybridPipeline):
    """Generates images from text, or from text and reference images, with GLM-Image. The components are those of
    `diffusers.GlmImagePipeline`, and the published folder loads as it is; `from_pipe` takes a loaded pipeline.

    The language model generates the tokens of a small grid, about 16 x 16, then of the large grid, one per 32 x 32
    pixels; with references, of the large grid only. Their distribution is the model's own, given that special tokens
    do not occur inside a grid, which diffusers does not prevent. The decoder of diffusers then generates the pixels.

    Args:
        tokenizer (`ByT5Tokenizer`): tokenizes quoted text for the decoder.
        processor (`GlmImageProcessor`): tokenizes prompts and preprocesses images.
        text_encoder (`T5EncoderModel`): encodes quoted text for the decoder.
        vision_language_encoder (`GlmImageForConditionalGeneration`): the language model, with an image tokenizer.
        vae (`AutoencoderKL`): decodes the latents of the decoder to pixels.
        transformer (`GlmImageTransformer2DModel`): the decoder.
        scheduler (`FlowMatchEulerDiscreteScheduler`): its noise schedule.
    """

    family = FAMILY
    abilities = Abilities(
        "tokens",
        frozenset({"image", "temperature", "top_k", "top_p", "min_p"}),
        several_grids=True,
        max_references=8,
        decoder=frozenset({"guidance_scale", "num_inference_steps"}),
    )
    model_cpu_offload_seq = "vision_language_encoder->text_encoder->transformer->vae"
    _lora_loadable_modules = ["vision_language_encoder", "transformer"]
    encode_prompts = staticmethod(encode_prompts)

    def __init__(
        self,
        tokenizer: ByT5Tokenizer,
        processor: GlmImageProcessor,
        text_encoder: T5EncoderModel,
        vision_language_encoder: GlmImageForConditionalGeneration,
        vae: AutoencoderKL,
        transformer: GlmImageTransformer2DModel,
        scheduler: FlowMatchEulerDiscreteScheduler,
    ):
        super().__init__()
        self.register_modules(
            tokenizer=tokenizer,
            processor=processor,
            text_encoder=text_encoder,
            vision_language_encoder=vision_language_encoder,
            vae=vae,
            transformer=transformer,
            scheduler=scheduler,
        )
        config = getattr(vision_language_encoder, "generation_config", None)
        given = {name: getattr(config, name, None) for name in ("temperature", "top_k", "top_p", "min_p")}
        self.generation_config |= {"guidance_scale": 1.5, "num_inference_steps": 50, "top_k": TOP_K}
        self.generation_config |= {name: value for name, value in given.items() if value is not None}

    @classmethod
    def load_config(cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs) -> dict:
        config = super().load_config(pretrained_model_name_or_path, **kwargs)
        # diffusers names its own folder, which has the name of a module of transformers.
        return {
            name: ["transformers", entry[1]] if isinstance(entry, list) and entry[0] == "glm_image" else entry
            for name, entry in config.items()
        }

    def save_config(self, save_directory: str | os.PathLike, **kwargs) -> None:
        # All components are of other libraries, and diffusers has a pipeline of this name.
        DiffusionPipeline.save_config(self, save_directory, **kwargs)
        path = Path(save_directory) / INDEX
        path.write_text(json.dumps(read_object(path) | {DEFAULTS: GENERATION_CONFIG}, indent=2, sort_keys=True) + "\n")

    def load_defaults(self, path: Path) -> None:
        if path.is_file() or DEFAULTS in read_object(path.with_name(INDEX)):
            super().load_defaults(path)
            return
        # In the published folder, the language model has its own.
        published = path.parent / "vision_language_encoder" / GENERATION_CONFIG
        if not published.is_file():
            raise ValueError(f"{published} is missing, which holds the sampling defaults: get all files again")

    @property
    def image_sizes(self) -> list[tuple[int, int]]:
        return IMAGE_SIZES

    def check_size(self, height: int | None, width: int | None) -> tuple[int, int]:
        """Height and width of the images of a call."""
        default = self.image_sizes[0]
        sides = (default[0] if height is None else height, default[1] if width is None else width)
        size = check_sides(sides, PIXELS_PER_TOKEN)
        if min(size) < 512 or max(size) > 2048:
            logger.warning(f"GLM-Image was trained for sides of 512 to 2048 pixels, not for {size[0]}x{size[1]}")
        return size

    def num_tokens(self, size: tuple[int, int]) -> int:
        large, small = grids_of(size)
        return large[0] * large[1] + small[0] * small[1]

    def _references(self, image: References, count: int) -> list[list[Image.Image]]:
        references = as_references("image", image, count, self.abilities.max_references)
        nested = isinstance(image, list | tuple) and any(isinstance(part, list | tuple) for part in image)
        if count > 1 and len(references[0]) > 1 and not nested:
            raise ValueError(f"image is one list for {count} prompts: give one list for each")
        if len(set(map(len, references))) > 1:
            raise ValueError(
                f"image holds {sorted(set(map(len, references)))} references per prompt: give equally many for each"
            )
        return references

    def whole_tokens(self, call: GenerationCall, tokens: torch.LongTensor) -> Tokens:
        return call.layout.parts(tokens)

    def latents_of(self, tokens: Tokens) -> Tokens:
        return tokens[-1]

    def latent_shape(self, size: tuple[int, int]) -> tuple[int, int, int]:
        scale = 2 ** (len(self.vae.config.block_out_channels) - 1)
        return self.transformer.config.in_channels, size[0] // scale, size[1] // scale

    def decoder_inputs(self, call: GenerationCall, tokens: torch.LongTensor) -> list[torch.LongTensor]:
        """The tokens [4 * rows * columns] of each large grid, every one twice in each direction."""
        return [_doubled(grid) for grid in call.layout.to_places(tokens)]

    def denoise(self, call: GenerationCall, read: list[torch.LongTensor], latents: torch.FloatTensor) -> torch.Tensor:
        """Run the decoder image by image: in a batch, diffusers pads the quoted texts of prompts, and attends to the
        padding."""
        height, width = call.size
        denoised = []
        for prompt, ids, noise in zip(call.conditions, read, latents.to(self.transformer.dtype), strict=True):
            sources = {}
            if prompt.sources:
                ids_of = [_doubled(source.codes.view(source.grid)) for source in prompt.sources]
                sources = {
                    "image": [[_resized(source) for source in prompt.sources]],
                    "prior_token_image_ids": [torch.cat(ids_of)],
                    "source_image_grid_thw": [
                        torch.tensor([(1, 2 * source.grid[0], 2 * source.grid[1]) for source in prompt.sources])
                    ],
                }
            # A scheduler and a pipeline hold the state of their run.
            scheduler = type(self.scheduler).from_config(self.scheduler.config)
            decoder = diffusers.GlmImagePipeline(**{**self.components, "scheduler": scheduler})
            decoder.set_progress_bar_config(**getattr(self, "_progress_bar_config", {}))
            output = decoder(
                prompt.text,
                height=height,
                width=width,
                num_inference_steps=call.decoder.num_inference_steps,
                guidance_scale=call.decoder.guidance_scale,
                latents=noise[None],
                prior_token_ids=ids[None],
                output_type="latent",
                **sources,
            )
            denoised.append(output.images)
        return torch.cat(denoised)

    def decode_latents(self, latents: torch.Tensor) -> torch.Tensor:
        config = self.vae.config
        mean, std = (
            torch.tensor(values, dtype=torch.float32).view(1, -1, 1, 1).to(latents)
            for values in (config.latents_mean, config.latents_std)
        )
        # One at a time, for which there is room after the decoder.
        return torch.cat([self.vae.decode(one.to(self.vae.dtype)).sample for one in (latents * std + mean).split(1)])

    @pipeline_call(EXAMPLE, ImagePipelineOutput)
    def __call__(
        self,
        prompt: str | list[str],
        *,
        image: References | None = None,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        latents: torch.Tensor | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        **common: Unpack[ImageArguments],
    ) -> GenerationCall:
        r"""
        Generate images. The `tokens` of the output are a list of grids: the small one, unless references are given,
        and the large one.

        Args:
            prompt (`str` or `list[str]`):
                What to generate. The decoder renders text in quotation marks.
            image (`PIL.Image.Image`, a list of them or a list of lists, *optional*):
                Reference images that the images are generated from: those of one prompt, or a list per prompt, equally
                many each. They may have any size up to a ratio of sides of 4.
            {decoder}
            guidance_scale (`float`, *optional*, defaults to the checkpoint's, 1.5):
                s in u + s (c - u), with predictions c of the decoder under the condition and u without it. 1 or less
                disables guidance. The tokens have none.
            {cuts}
            {call}
        """
        texts = as_texts(prompt, limit=MAX_PROMPT_CHARACTERS)
        call = self.begin_call(len(texts), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, **common)
        call.decoder = self.decoder_settings(call, latents, num_inference_steps, guidance_scale=guidance_scale)
        references = None if image is None else self._references(image, len(texts))
        inputs = self.encode_prompts(self.processor, texts, references, call.size)
        encoder, device = self.on_device(self.vision_language_encoder), self._execution_device
        # Of each prompt the grids of its references, then those that are generated, from fine to coarse.
        shapes = [(rows, columns) for _, rows, columns in inputs.image_grid_thw.tolist()]
        each, count = len(shapes) // len(texts), 0 if references is None else len(references[0])
        grids = [shapes[i * each : i * each + count] for i in range(len(texts))]
        sources = [grid for own in grids for grid in own]
        codes = source_codes(encoder, inputs.pixel_values.to(device), sources) if sources else []
        image, *before = shapes[count:each]
        layout = Layout(image, before=before)
        call.bind(bind_prompts(encoder, inputs.input_ids, inputs.attention_mask, sources, codes, layout, device))
        prompts = []
        for i, text in enumerate(texts):
            own = codes[i * count : (i + 1) * count]
            read = zip([] if references is None else references[i], grids[i], own, strict=True)
            prompts.append(GlmImagePrompt(text, [Source(*parts) for parts in read]))
        call.conditions = [prompt for prompt in prompts for _ in range(call.num_images_per_prompt)]
        return call


def _doubled(grid: torch.LongTensor) -> torch.LongTensor:
    """The tokens [4 * rows * columns] of a grid [rows, columns], each of them twice in both directions."""
    return grid.repeat_interleave(2, 0).repeat_interleave(2, 1).flatten()


def _resized(source: Source) -> Image.Image:
    """A reference in the size of its grid, which the decoder expects."""
    rows, columns = source.grid
    return source.reference.resize((columns * PIXELS_PER_TOKEN, rows * PIXELS_PER_TOKEN), Image.Resampling.BICUBIC)
