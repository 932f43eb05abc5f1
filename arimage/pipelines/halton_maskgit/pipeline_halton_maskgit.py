"""Halton-MaskGIT (https://arxiv.org/abs/2503.17076): images of a class or of a text from few passes over the whole
picture."""

from typing import Unpack

import torch
from diffusers.image_processor import PipelineImageInput
from transformers import PreTrainedTokenizerBase, T5EncoderModel

from ...decoding import HaltonDecoding, Layout
from ...decoding.contract.models import ConfidenceSettings
from ...tokenizers.vq_llamagen import LlamaGenVQModel
from ...tokenizers.vq_patches import PatchVQModel
from ..abilities import EDITING, MASKED_TOKEN_SAMPLING, Abilities
from ..arguments import MaskedTokenArguments, pipeline_call
from ..call import GenerationCall
from ..components import check_parts
from ..kinds.class_or_text import check_text_encoder
from ..kinds.upscaling import UpscalingPipeline
from ..output import ImagePipelineOutput
from .family import FAMILY
from .transformer_halton_maskgit import HaltonMaskGITModel, HaltonMaskGITTransformer


CONFIDENCE = ConfidenceSettings(12, "arccos", 4.5, noise_schedule="linear", guidance_schedule="linear")
EXAMPLE = """
pipe = AutoPipeline.from_pretrained("halton-maskgit-base-256")
image = pipe("golden retriever", generator=torch.Generator().manual_seed(0)).images[0]
"""


class HaltonMaskGITPipeline(UpscalingPipeline):
    """Generates images from a class or a text with Halton-MaskGIT, and edits images.

    Args:
        transformer (`HaltonMaskGITTransformer`): the masked model, conditioned on a class or on text.
        vq (`LlamaGenVQModel` or `PatchVQModel`): decodes tokens to images. Both are needed to generate;
            `encode_prompt` works without them.
        tokenizer (`PreTrainedTokenizerBase`, *optional*), text_encoder (`T5EncoderModel`, *optional*): for text.
            Without them a text-conditional pipeline takes `prompt_embeds`.
        id2label (`dict[int, str]`, *optional*): the names of the classes of a class-conditional transformer.
    """

    family = FAMILY
    abilities = Abilities("masked_tokens", MASKED_TOKEN_SAMPLING | EDITING)
    model_cpu_offload_seq = "text_encoder->transformer->vq"
    _optional_components = ["tokenizer", "text_encoder"]
    _accepts_no_class = True

    def __init__(
        self,
        transformer: HaltonMaskGITTransformer,
        vq: LlamaGenVQModel | PatchVQModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        text_encoder: T5EncoderModel | None = None,
        id2label: dict[int, str] | dict[str, str] | None = None,
    ):
        super().__init__()
        if transformer is not None and vq is not None:
            check_parts("tokens", transformer=transformer.config.vocab_size, image_tokenizer=vq.config.codebook_size)
        check_text_encoder(text_encoder, transformer)
        self.register_modules(transformer=transformer, vq=vq, tokenizer=tokenizer, text_encoder=text_encoder)
        self.name_classes(id2label)
        self.decoding = HaltonDecoding()

    @pipeline_call(EXAMPLE, ImagePipelineOutput)
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        class_labels: int | str | list[int | str] | torch.LongTensor | None = None,
        *,
        image: PipelineImageInput | None = None,
        mask_image: PipelineImageInput | None = None,
        prompt_embeds: torch.Tensor | None = None,
        prompt_attention_mask: torch.Tensor | None = None,
        **common: Unpack[MaskedTokenArguments],
    ) -> GenerationCall:
        r"""
        Generate images. A class id equal to the number of classes means "no class". The decoding says how many forward
        passes there are: `decoding="halton:steps=16"`.

        Args:
            {class_or_text}
            {image}
            {mask_on_all_sides}
            {prompt_embeds}
            {sampling}
            {call}
        """
        condition = prompt, class_labels, prompt_embeds, prompt_attention_mask
        count = self.check_condition(*condition)
        call = self.begin_call(count, **common)
        self.edit(call, image, mask_image)
        call.model = HaltonMaskGITModel(
            self.transformer,
            {name: call.per_image(value) for name, value in self.encode_condition(*condition).items()},
            Layout((self.transformer.config.grid_size,) * 2),
            CONFIDENCE,
            guided=call.guided,
            codebook=self.vq.code_vectors().to(self._execution_device),
        )
        return call
