"""Lumina-DiMOO (https://arxiv.org/abs/2510.06308): images from text, or from text and pictures, with a masked language
model."""

import math
import numbers
import os
from typing import Unpack

import torch
import torch.nn.functional as F
from diffusers import VQModel
from diffusers.image_processor import PipelineImageInput, VaeImageProcessor
from PIL import Image
from transformers import PreTrainedTokenizerFast

from ...decoding import ConfidenceDecoding, Layout
from ...decoding.contract.models import ConfidenceSettings
from ...kernels.codebook import nearest_code
from ...tokenizers.tiling import Tiling
from ..abilities import EDITING, MASKED_TOKEN_SAMPLING, Abilities
from ..arguments import MaskedTokenArguments, pipeline_call
from ..base import ARImagePipeline
from ..call import GenerationCall
from ..components import check_parts
from ..output import ImagePipelineOutput
from ..pictures.references import References, as_references, common_size, each_once, split_references
from ..text.checks import MAX_PROMPT_CHARACTERS, as_text, as_texts, check_sides
from .family import FAMILY
from .masked_model import LuminaDiMOOModel
from .prompts import GENERATE, PATCH, STYLE, LuminaDiMOOPrompts, crop_picture, picture_ids, task_texts
from .transformer_lumina_dimoo import LuminaDiMOOTransformer


EXAMPLE = """
from diffusers.utils import load_image

# downloaded and converted once; `arimage models` says how large it is
pipe = AutoPipeline.from_pretrained("lumina-dimoo", dtype=torch.bfloat16).to("cuda")
image = pipe("a shiba inu in the snow", decoding="ml-cache").images[0]
image = pipe("make it night", image=load_image("street.png")).images[0]
"""
# How the authors sample: 64 steps, whose noise does not fall.
CONFIDENCE = ConfidenceSettings(64, "maskgit", 1.0, "constant", "constant", gumbel=True)


class LuminaDiMOOPipeline(ARImagePipeline):
    """Generates images from text with Lumina-DiMOO, edits parts of images, and changes whole pictures.

    Tokens are sampled from the probabilities of float32 logits. The authors sample in bfloat16, whose coarse random
    numbers and logits make probable tokens more probable than the model says; see `max_gumbel` of
    `ConfidenceDecoding`.

    Args:
        transformer (`LuminaDiMOOTransformer`): the masked language model.
        vq (`VQModel`): the image tokenizer.
        tokenizer (`PreTrainedTokenizerFast`): the text tokenizer.
        image_size (`int`): side in pixels of the square images of calls without a size.

    Attributes:
        image_guidance_scale: the default guidance by the pictures that a call changes.
    """

    family = FAMILY
    abilities = Abilities("masked_tokens", MASKED_TOKEN_SAMPLING | EDITING | {"task"}, max_references=2)
    model_cpu_offload_seq = "transformer->vq"
    _saved_defaults = ("image_guidance_scale",)

    def __init__(
        self,
        transformer: LuminaDiMOOTransformer,
        vq: VQModel,
        tokenizer: PreTrainedTokenizerFast,
        image_size: int = 1024,
    ):
        super().__init__()
        if transformer is not None and vq is not None:
            check_parts("codes", transformer=transformer.config.num_codes, vq=vq.config["num_vq_embeddings"])
        if tokenizer is not None:
            LuminaDiMOOPrompts(tokenizer)
        self.register_modules(transformer=transformer, vq=vq, tokenizer=tokenizer)
        self.register_to_config(image_size=image_size)
        self._tiling = None if vq is None else Tiling(PATCH)
        self.image_guidance_scale = 5.0
        self.generation_config["guidance_scale"] = 5.0
        self.decoding = ConfidenceDecoding()

    @classmethod
    def load_config(cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs) -> dict:
        config = super().load_config(pretrained_model_name_or_path, **kwargs)
        if "transformer" not in config:
            raise ValueError(
                f"{pretrained_model_name_or_path} is a folder as the authors publish it, whose pipeline has no "
                "transformer: convert it with `arimage convert lumina-dimoo`, and give the folder that it writes"
            )
        return config

    @property
    def image_sizes(self) -> list[tuple[int, int]]:
        return [(self.config.image_size,) * 2]

    @property
    def reference_guidance_scale(self) -> float:
        return 3.5

    def check_size(self, height: int | None, width: int | None) -> tuple[int, int]:
        """Height and width of the images of a call: any multiples of 16."""
        own = self.config.image_size
        return check_sides((own if height is None else height, own if width is None else width), PATCH)

    def num_tokens(self, size: tuple[int, int]) -> int:
        return math.prod(side // PATCH for side in size)

    # Between tokens and images

    def codebook(self) -> torch.FloatTensor:
        """The vectors of the codes [V, D]."""
        codes = torch.arange(self.vq.config["num_vq_embeddings"], device=self._execution_device)
        # A look-up, not the weight itself, which offloading brings only for the forward pass of its module.
        return self.on_device(self.vq).quantize.embedding(codes)

    def encode_image(self, pixels: torch.Tensor) -> torch.LongTensor:
        """The tokens [B, h, w] of images [B, 3, H, W] in [-1, 1]."""
        # This tokenizer reads levels from 0 to 1.
        levels = (pixels.to(self._execution_device) / 2 + 0.5).to(self.vq.dtype)
        latents = self.tiling.encoded(lambda part: self.vq.encode(part).latents, levels)
        latents = latents.permute(0, 2, 3, 1).float()
        return nearest_code(latents.flatten(0, 2), self.codebook()).view(latents.shape[:3])

    def decode_image(self, tokens: torch.LongTensor) -> torch.Tensor:
        """Pixels [B, 3, H, W], nominally in [-1, 1], of tokens [B, h, w]."""
        shape = (*tokens.shape, self.vq.config["latent_channels"])
        return 2 * self.vq.decode(tokens, force_not_quantize=True, shape=shape).sample - 1

    @torch.no_grad()
    def decode_tokens(self, call: GenerationCall, tokens: torch.LongTensor) -> torch.Tensor:
        """Pixels [B, 3, H, W], nominally in [-1, 1], of the tokens [B, N] of a call; -1 is not decided yet."""
        tokens = self.whole_tokens(call, tokens.to(self._execution_device).clamp(min=0))
        pixels = self.tiling.in_tiles(self.decode_image, tokens, before=1, after=PATCH)
        if self.current_call is not None:
            # The next forward pass needs it.
            self.on_device(self.transformer)
        return pixels

    def encode_known_tokens(self, pixels: torch.Tensor, repaint: torch.BoolTensor) -> torch.LongTensor:
        """The tokens [B, N] of images [B, 3, H, W] in [-1, 1], but -1 where more than half of the pixels of a token
        are in `repaint` [B, 1, H, W].

        Raises:
            ValueError: if none is.
        """
        generated = F.avg_pool2d(repaint.float(), PATCH)[:, 0].flatten(1) > 0.5
        if not generated.any(1).all():
            raise ValueError(
                f"mask_image selects half of no {PATCH}x{PATCH} pixels that are one token: mark a larger region"
            )
        return self.encode_image(pixels).flatten(1).masked_fill(generated, -1)

    def _pictures(self, references: list[list[Image.Image]]) -> list[list[list[int]]]:
        """The token ids of the pictures of each prompt."""
        processor = VaeImageProcessor(do_resize=False)

        def encode(image: Image.Image) -> list[int]:
            return picture_ids(self.encode_image(processor.preprocess(image))[0])

        return each_once(encode, references)

    @pipeline_call(EXAMPLE, ImagePipelineOutput)
    def __call__(
        self,
        prompt: str | list[str],
        *,
        image: References | None = None,
        mask_image: PipelineImageInput | None = None,
        task: str | None = None,
        image_guidance_scale: float | None = None,
        **common: Unpack[MaskedTokenArguments],
    ) -> GenerationCall:
        r"""
        Generate images, paint parts of given ones, or change whole pictures.

        Args:
            prompt (`str` or `list[str]`):
                What to generate, or how to change pictures.
            image (`PIL.Image.Image`, `np.ndarray`, `torch.Tensor`, a list of them or a list of lists, *optional*):
                Without `mask_image`: the picture to change, or a picture and one whose style it gets. One image or a
                list is for every prompt, a list of lists holds one list per prompt. Pictures are scaled to one of 49
                sizes of about 512x512 pixels and cropped at their centres; the authors crop at random places. Without
                `height` and `width`, images have the size of the last picture. With `mask_image`: an image to edit,
                one for all prompts or one per prompt, which is resized to the size of the call.
            mask_image (as `image`, *optional*):
                White where the image is generated again, black where its pixels stay. A token is generated if more
                than half of its pixels are white. New tokens depend on what stays on all sides of them.
            task (`str`, *optional*):
                What to do with pictures, by the authors' names, such as `"edit_add"`, `"depth_control"`,
                `"subject_driven"`, `"canny_dense"`, `"multi_view_left"`, `"image_ref_transfer"`: which words of a
                prompt they choose is in the family's README. By default `"edit"` with one picture, and
                `"image_ref_transfer"` with two. Tasks with "dense", "ref_transfer" or "multi_view" in their name have
                a prompt of their own, and ignore `prompt`.
            image_guidance_scale (`float`, *optional*, defaults to the checkpoint's):
                s' in c + (s - 1) (c - u) + (s' - 1) (c - w), with logits c, u without the prompt and w without the
                pictures: a further row per image. 1 or less leaves it out.
            {sampling}
            {call}
        """
        texts = as_texts(prompt, "prompt", MAX_PROMPT_CHARACTERS)
        image, given = split_references(image, mask_image, None)
        scale = self.image_guidance_scale if image_guidance_scale is None else image_guidance_scale
        if not isinstance(scale, numbers.Real) or not math.isfinite(scale):
            raise ValueError(f"image_guidance_scale is {scale!r}: give a number")
        for name, value in (("task", task), ("image_guidance_scale", image_guidance_scale)):
            if given is None and value is not None:
                raise ValueError(f"{name} is for calls with pictures to change: give an image, or leave {name} out")
        references, worded = [], [(GENERATE, text) for text in texts]
        if given is not None:
            references = self._references(given, len(texts))
            task = _task_of(task, references)
            worded = [task_texts(task, text) for text in texts]
            if common.get("guidance_scale") is None:
                common["guidance_scale"] = self.reference_guidance_scale
            if common.get("height") is common.get("width") is None:
                common["width"], common["height"] = common_size(references)
        call = self.begin_call(len(texts), **common)

        # First, since bringing one component to the device sends the one before it away.
        self.edit(call, image, mask_image)
        pictures, codebook = self._pictures(references) or [[] for _ in texts], self.codebook()
        prompts, device = LuminaDiMOOPrompts(self.tokenizer), self._execution_device
        parts: list[tuple[str, str | None, list]] = [
            (system, text, shown) for (system, text), shown in zip(worded, pictures, strict=True)
        ]
        branches = [parts]
        if call.guided:
            branches.append([(system, None, shown) for system, _, shown in parts])
        shows = bool(references) and scale > 1
        if shows:
            branches.append([(system, text, []) for system, text, _ in parts])
        model = LuminaDiMOOModel(
            self.transformer,
            [[prompts.prefix(*part).to(device) for part in branch] for branch in branches],
            Layout((call.size[0] // PATCH, call.size[1] // PATCH)),
            CONFIDENCE,
            codebook=codebook,
            image_guidance_scale=float(scale) if shows else 1.0,
        )
        call.bind(model)
        return call

    def _references(self, image: References, count: int) -> list[list[Image.Image]]:
        """The pictures of each of `count` prompts, cropped."""
        listed = as_references("image", image, count, self.abilities.max_references)
        return each_once(crop_picture, listed)


def _task_of(task: str | None, references: list[list[Image.Image]]) -> str:
    """The task of a call with pictures.

    Raises:
        ValueError: if prompts have different numbers of pictures, or not as many as the task takes.
    """
    counts = sorted({len(listed) for listed in references})
    if len(counts) > 1:
        raise ValueError(f"image holds {counts} pictures per prompt: give equally many for each")
    task = (STYLE if counts == [2] else "edit") if task is None else as_text(task, "task")
    most = 2 if "ref_transfer" in task else 1
    if counts != [most]:
        raise ValueError(f"image holds {counts[0]} pictures per prompt: {task} takes {most}")
    return task
