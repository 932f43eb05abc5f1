"""Anole (https://arxiv.org/abs/2407.06135): Chameleon (https://arxiv.org/abs/2405.09818) with an image head, images
from text."""

from typing import Unpack

import torch
from diffusers import VQModel
from diffusers.image_processor import PipelineImageInput
from transformers import ChameleonForConditionalGeneration, PreTrainedTokenizerBase

from ...models.neighbours import NeighbourModel
from ..arguments import TokenArguments, pipeline_call
from ..call import GenerationCall
from ..output import ImagePipelineOutput
from ..text.checks import as_texts
from .base import BEGIN_OF_IMAGE, ChameleonPipeline


EXAMPLE = """
# downloaded and converted once; `arimage models` says how large it is
pipe = AutoPipeline.from_pretrained("anole-7b", dtype=torch.bfloat16).to("cuda")
image = pipe("a red heart", generator=torch.Generator().manual_seed(0)).images[0]
"""


class AnolePipeline(ChameleonPipeline):
    """Generates images from text with Anole, or with another Chameleon model that has a trained image head.

    Args:
        transformer (`ChameleonForConditionalGeneration`): the language model, with its `vocabulary_map`.
        vq (`VQModel`): turns image tokens into images.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): the text tokenizer. Without it the pipeline takes
            `input_ids`.
        image_size (`int`): side of the images in pixels; 512 for every published checkpoint.
        neighbours (`NeighbourModel`, *optional*): fitted to tokens like those of this model, for the `corrections` of
            `SpeculativeJacobiDecoding`.
    """

    def __init__(
        self,
        transformer: ChameleonForConditionalGeneration,
        vq: VQModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        image_size: int = 512,
        neighbours: NeighbourModel | None = None,
    ):
        super().__init__(transformer, vq, tokenizer, image_size, neighbours)

    def encode_prompt(self, prompt: str | list[str]) -> tuple[torch.LongTensor, torch.LongTensor]:
        """Token ids [B, P] of texts up to the turn end, padded on the left, and their mask."""
        return self.encode_texts(as_texts(prompt))

    @pipeline_call(EXAMPLE, ImagePipelineOutput)
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        *,
        image: PipelineImageInput | None = None,
        mask_image: PipelineImageInput | None = None,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        **common: Unpack[TokenArguments],
    ) -> GenerationCall:
        r"""
        Generate images.

        Args:
            prompt (`str` or `list[str]`, *optional*):
                What to generate.
            {image}
            {raster_mask}
            input_ids (`torch.LongTensor`, *optional*), attention_mask (`torch.Tensor`, *optional*):
                Token ids [B, P] in place of `prompt`, up to the end of the turn or up to the begin-of-image token,
                padded on either side, and their mask.
            {common}
        """
        count, input_ids, attention_mask = self.check_prompt(prompt, input_ids, attention_mask)
        call = self.begin_call(count, **common)
        self.edit(call, image, mask_image)
        if prompt is not None:
            input_ids, attention_mask = self.encode_prompt(prompt)
        begin = self._vocabulary[BEGIN_OF_IMAGE]
        self.add_model(call, input_ids, attention_mask, [begin], [self._vocabulary["<s>"], begin], None)
        return call
