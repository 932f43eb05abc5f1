"""LlamaGen (https://arxiv.org/abs/2406.06525): images from a class or from text."""

from typing import Unpack

import torch
from diffusers.image_processor import PipelineImageInput
from transformers import PreTrainedTokenizerBase, T5EncoderModel

from ...decoding import Layout
from ...models.neighbours import NeighbourModel
from ...models.window_drafter import WindowDrafter
from ...tokenizers.upscaler import ImageUpscaler
from ...tokenizers.vq_llamagen import LlamaGenVQModel
from ...tokenizers.vq_patches import PatchVQModel
from ..abilities import EDITING, TOKEN_SAMPLING, Abilities
from ..arguments import TokenArguments, pipeline_call
from ..call import GenerationCall
from ..components import check_parts, check_settings
from ..kinds.class_or_text import check_text_encoder
from ..kinds.upscaling import UpscalingPipeline
from ..output import ImagePipelineOutput
from ..text.checks import prompt_names
from .denoiser_llamagen import LlamaGenDenoiser
from .drafter_llamagen import LlamaGenDrafter
from .family import FAMILY
from .transformer_llamagen import LlamaGenTokenModel, LlamaGenTransformer


EXAMPLE = """
pipe = AutoPipeline.from_pretrained("emoji-llamagen")
image = pipe("a red heart", generator=torch.Generator().manual_seed(0)).images[0]
"""


class LlamaGenPipeline(UpscalingPipeline):
    """Generates images from a class or a text with LlamaGen.

    Args:
        transformer (`LlamaGenTransformer`): the next-token model, conditioned on a class or on text.
        vq (`LlamaGenVQModel` or `PatchVQModel`): decodes tokens to images. Both are needed to generate;
            `encode_prompt` works without them.
        tokenizer (`PreTrainedTokenizerBase`, *optional*), text_encoder (`T5EncoderModel`, *optional*): for text.
            Without them a text-conditional pipeline takes `prompt_embeds`.
        drafter (`LlamaGenDrafter`, *optional*): trained with this transformer, for `DraftTreeDecoding`.
        denoiser (`LlamaGenDenoiser`, *optional*): trained with this transformer, for the `levels` of
            `SpeculativeJacobiDecoding`.
        neighbours (`NeighbourModel` or `WindowDrafter`, *optional*): fitted to tokens like those of this transformer,
            or trained with it, for the `corrections` of `SpeculativeJacobiDecoding`.
        upscaler (`ImageUpscaler`, *optional*): enlarges the decoded images. Calls that ask for the size that the image
            tokenizer decodes do without it.
        id2label (`dict[int, str]`, *optional*): the names of the classes of a class-conditional transformer.
    """

    family = FAMILY
    abilities = Abilities("tokens", TOKEN_SAMPLING | EDITING)
    model_cpu_offload_seq = "text_encoder->transformer->vq->upscaler"
    _optional_components = ["tokenizer", "text_encoder", "drafter", "denoiser", "neighbours", "upscaler"]
    # They run between and within forward passes of the transformer, and use parts of it.
    _exclude_from_cpu_offload = ["drafter", "denoiser", "neighbours"]

    def __init__(
        self,
        transformer: LlamaGenTransformer,
        vq: LlamaGenVQModel | PatchVQModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        text_encoder: T5EncoderModel | None = None,
        drafter: LlamaGenDrafter | None = None,
        denoiser: LlamaGenDenoiser | None = None,
        upscaler: ImageUpscaler | None = None,
        id2label: dict[int, str] | dict[str, str] | None = None,
        neighbours: NeighbourModel | WindowDrafter | None = None,
    ):
        super().__init__()
        # Either may be left out: `encode_prompt` needs the text encoder only.
        if transformer is not None and vq is not None:
            check_parts("tokens", transformer=transformer.config.vocab_size, image_tokenizer=vq.config.codebook_size)
        check_text_encoder(text_encoder, transformer)
        check_settings("vocab_size", neighbours=neighbours, transformer=transformer)
        check_settings("hidden_size", drafter=drafter, transformer=transformer)
        check_settings("hidden_size", denoiser=denoiser, transformer=transformer)
        self.register_modules(
            transformer=transformer,
            vq=vq,
            tokenizer=tokenizer,
            text_encoder=text_encoder,
            drafter=drafter,
            denoiser=denoiser,
            neighbours=neighbours,
            upscaler=upscaler,
        )
        self.name_classes(id2label)

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
        **common: Unpack[TokenArguments],
    ) -> GenerationCall:
        r"""
        Generate images.

        Args:
            {class_or_text}
            {image}
            {raster_mask}
            {prompt_embeds}
            {common}
        """
        condition = prompt, class_labels, prompt_embeds, prompt_attention_mask
        count = self.check_condition(*condition)
        call = self.begin_call(count, **common)
        self.edit(call, image, mask_image)
        condition = self.encode_prefix(*condition)
        model = LlamaGenTokenModel(
            self.transformer,
            condition,
            Layout((self.transformer.config.grid_size,) * 2),
            guided=call.guided,
            codebook=self.vq.code_vectors().to(self._execution_device),
            drafter=self.drafter,
            denoiser=self.denoiser,
            neighbours=self.neighbours,
        )
        call.bind(model, prompt_names(prompt, count, count))
        return call
