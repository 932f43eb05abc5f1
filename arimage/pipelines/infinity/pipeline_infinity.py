"""Infinity (https://arxiv.org/abs/2412.04431): images from a text by next-scale prediction of bits."""

import numbers
from typing import Unpack

import torch
from diffusers.image_processor import PipelineImageInput
from diffusers.utils import logging
from transformers import PreTrainedTokenizerBase, T5EncoderModel

from ...decoding import NextScaleDecoding
from ..abilities import EDITING, TOKEN_SAMPLING, Abilities
from ..arguments import ScaleArguments, pipeline_call
from ..base import ARImagePipeline
from ..call import GenerationCall
from ..components import check_parts
from ..kinds.class_or_text import check_text_encoder
from ..kinds.maps import ImageMaps
from ..output import ImagePipelineOutput
from ..text.checks import MAX_PROMPT_CHARACTERS, as_texts, prompt_names
from ..text.t5_texts import T5Texts, Text
from .bsq_infinity import InfinityVQModel
from .family import FAMILY
from .scale_model import InfinityScaleModel
from .schedules import SCHEDULES, Schedule
from .transformer_infinity import InfinityTransformer


logger = logging.get_logger(__name__)

EXAMPLE = """
pipe = AutoPipeline.from_pretrained("infinity-2b", dtype=torch.bfloat16).to("cuda")
image = pipe("a fox in the snow, oil painting", height=1344, width=768).images[0]
"""


def _cut(texts: str | list[str] | None) -> list[str] | None:
    """As in the original code, a text ends at the first "--" unless it begins with it."""
    return None if texts is None else [text.partition("--")[0] or text for text in as_texts(texts)]


class InfinityPipeline(ImageMaps, T5Texts, ARImagePipeline):
    """Generates images from a text with Infinity, and edits images.

    Args:
        transformer (`InfinityTransformer`): the next-scale model of bits.
        vq (`InfinityVQModel`): decodes maps of bits to images.
        tokenizer (`PreTrainedTokenizerBase`, *optional*), text_encoder (`T5EncoderModel`, *optional*): flan-t5-xl for
            the published models. Without them the pipeline takes `prompt_embeds`.
    """

    family = FAMILY
    model_cpu_offload_seq = "text_encoder->transformer->vq"
    _optional_components = ["tokenizer", "text_encoder"]
    abilities = Abilities("scales", TOKEN_SAMPLING | EDITING | {"negative_prompt"}, in_maps=True)
    text_multiple = 32
    _truncates_levels = True

    def __init__(
        self,
        transformer: InfinityTransformer,
        vq: InfinityVQModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        text_encoder: T5EncoderModel | None = None,
    ):
        super().__init__()
        check_text_encoder(text_encoder, transformer)
        if transformer is not None and vq is not None:
            check_parts("bits per cell", transformer=transformer.config.bits, image_tokenizer=vq.bits)
        self.register_modules(transformer=transformer, vq=vq, tokenizer=tokenizer, text_encoder=text_encoder)
        self.decoding = NextScaleDecoding()

    @property
    def image_sizes(self) -> list[tuple[int, int]]:
        return [
            self._size(finest)
            for finest, schedule in SCHEDULES.items()
            if schedule.pixels == self.transformer.config.pixels
        ]

    def _size(self, finest: tuple[int, int]) -> tuple[int, int]:
        return finest[0] * self.vq.scale_factor, finest[1] * self.vq.scale_factor

    def check_size(self, height: int | None, width: int | None) -> tuple[int, int]:
        """Height and width of the images of a call. Warns about sizes of another pixel class than that of the training
        images, and refuses all others."""
        sizes = self.image_sizes
        size = sizes[0][0] if height is None else height, sizes[0][1] if width is None else width
        if size in sizes:
            return size
        if size not in map(self._size, SCHEDULES):
            listed = ", ".join(f"{height}x{width}" for height, width in sizes)
            raise ValueError(f"height and width are {size[0]} and {size[1]}: choose among {listed}")
        logger.warning(
            f"this checkpoint was trained at {self.transformer.config.pixels} pixels, and images of "
            f"{size[0]}x{size[1]} pixels may be poor: choose among pipe.image_sizes"
        )
        return size

    def schedule_of(self, size: tuple[int, int]) -> Schedule:
        """The maps of images of a size in pixels."""
        return SCHEDULES[size[0] // self.vq.scale_factor, size[1] // self.vq.scale_factor]

    @torch.no_grad()
    def encode_prompt(self, prompt: str | list[str], max_sequence_length: int | None = None) -> Text:
        """Encode prompts to `prompt_embeds`, right-padded text embeddings [B, P, D], and `prompt_attention_mask`
        [B, P]. Needs only the tokenizer and the text encoder. As in the original code, case and punctuation are kept,
        and a prompt ends at the first "--" unless it begins with it.

        Args:
            prompt: one text or several.
            max_sequence_length: the most tokens that are read, by default as many as the transformer reads, or 512.

        Raises:
            ValueError: if `prompt` is not text, `max_sequence_length` is not a number of tokens, or the pipeline has
                no text encoder.
        """
        return self.encode_texts(_cut(as_texts(prompt, limit=MAX_PROMPT_CHARACTERS)) or [], max_sequence_length)

    def whole_tokens(self, call: GenerationCall, tokens: torch.LongTensor) -> list[torch.LongTensor]:
        """The tokens [B, N] of a call as one map of bits [B, h, w, b] per scale."""
        scales, bits = self.schedule_of(call.size).scales, self.transformer.config.bits
        maps = tokens.split([rows * columns * bits for rows, columns in scales], dim=1)
        return [part.unflatten(1, (*grid, bits)) for part, grid in zip(maps, scales, strict=True)]

    def encode_image(self, pixels: torch.Tensor) -> list[torch.LongTensor]:
        """The bits of images [B, 3, H, W] in [-1, 1], one map [B, h, w, b] per scale."""
        height, width = pixels.shape[-2:]
        return self.vq.encode(pixels.to(self.vq.dtype), self.schedule_of((height, width)).scales)

    @torch.no_grad()
    def decode_tokens(self, call: GenerationCall, tokens: torch.LongTensor) -> torch.Tensor:
        """Pixels [B, 3, H, W], nominally in [-1, 1], of the tokens [B, N] of a call; -1 is not known yet. The scales
        are decoded up to the first with such a token."""
        return self.vq.decode(self.decided_maps(call, tokens), self.schedule_of(call.size).scales[-1])

    def decode_result(self, call: GenerationCall, result: torch.Tensor) -> torch.Tensor:
        return self.vq.decode_latents(result)

    @pipeline_call(EXAMPLE, ImagePipelineOutput)
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        *,
        image: PipelineImageInput | None = None,
        mask_image: PipelineImageInput | None = None,
        negative_prompt: str | list[str] | None = None,
        prompt_embeds: torch.Tensor | None = None,
        prompt_attention_mask: torch.Tensor | None = None,
        negative_prompt_embeds: torch.Tensor | None = None,
        negative_prompt_attention_mask: torch.Tensor | None = None,
        cfg_insertion_layer: int = 0,
        **common: Unpack[ScaleArguments],
    ) -> GenerationCall:
        r"""
        Generate images. A token is a bit; the tokens of the output are one map of bits [B, h, w, b] per scale. Steps
        are scales: an interrupted call returns the image of the scales so far.

        Args:
            prompt (`str` or `list[str]`, *optional*):
                What to generate. It ends at the first "--".
            {image}
            mask_image (as `image`, *optional*):
                White where the image is generated again, black where its pixels stay. A cell of the finest scale is
                generated if any of its pixels is white, a cell of a coarser scale if most of them are, and the single
                cell of the coarsest scale never. New cells depend on what stays on all sides of them.
            negative_prompt (`str` or `list[str]`, *optional*):
                What the image is guided away from, in place of no text: one for all prompts, or one for each.
            {prompt_embeds}
            {negative_prompt_embeds}
            cfg_insertion_layer (`int`, *optional*, defaults to 0):
                Where guidance is applied: 0 to the logits, -m to the hidden states after the m-th last layer.
            guidance_scale (`float` or `list[float]`, *optional*, defaults to the checkpoint's):
                s in u + s (c - u), with logits c under the condition and u without it: one for all scales, or one for
                each. 1 or less disables guidance.
            temperature (`float` or `list[float]`, *optional*), top_k (`int`, *optional*), top_p (`float`, *optional*):
                Sampling settings, by default the checkpoint's; see `Sampling`. A temperature per scale may be given.
                A bit has two values: `top_k=1` is greedy, and `top_p=0.97` drops a value of 3% or less.
            min_p (`float`, *optional*):
                Sample only values that are at least `min_p` times as probable as the other one.
            guided_tokens (`int`, *optional*):
                Apply guidance only to the first `guided_tokens` bits of each image, by default to all.
            {call}
                `"latents"` [B, C, h, w] are what the image tokenizer decodes to pixels.
        """
        text = prompt, prompt_embeds, prompt_attention_mask
        negative = negative_prompt, negative_prompt_embeds, negative_prompt_attention_mask
        count, negatives = self.check_texts(text, negative)
        layers, layer = self.transformer.config.num_layers, cfg_insertion_layer
        if not isinstance(layer, numbers.Integral) or isinstance(layer, bool) or not -layers <= layer <= 0:
            raise ValueError(f"cfg_insertion_layer is {layer!r}: give 0 for the logits, or -1 to -{layers}")
        call = self.begin_call(count, **common)
        schedule = self.schedule_of(call.size)
        if layer and call.sampling.guided_tokens is not None:
            raise ValueError(
                f"guided_tokens is {call.sampling.guided_tokens}, which is for guided logits: leave out "
                "cfg_insertion_layer, or guided_tokens (pipe.generation_config holds the checkpoint's)"
            )
        call.sampling.check_scales(len(schedule.scales))
        self.edit(call, image, mask_image)
        positive, other = (self.encoded(_cut(texts), embeds, mask) for texts, embeds, mask in (text, negative))
        scales = range(len(schedule.scales))
        model = InfinityScaleModel(
            self.transformer,
            self.vq,
            self.encode_condition(positive, other, call.guided),
            schedule,
            guided=call.guided,
            mixed_layer=layers + layer if layer and call.guided else None,
            guidance=tuple(float(call.sampling.at_scale(scale).guidance_scale) for scale in scales),
        )
        others = prompt_names(negative_prompt, negatives or 1, count)
        call.bind(model, prompt_names(prompt, count, count), others)
        return call
