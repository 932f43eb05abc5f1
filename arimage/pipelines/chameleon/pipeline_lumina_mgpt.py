"""Lumina-mGPT (https://arxiv.org/abs/2408.02657) and Lumina-mGPT 2.0 (https://arxiv.org/abs/2507.17801): images from
text, in many sizes."""

from dataclasses import replace
from typing import Unpack

import torch
from diffusers import VQModel
from diffusers.image_processor import PipelineImageInput
from transformers import ChameleonForConditionalGeneration, PreTrainedTokenizerBase

from ...models.neighbours import NeighbourModel
from ..arguments import TokenArguments, pipeline_call
from ..call import GenerationCall
from ..output import ImagePipelineOutput
from ..pictures.images import prepare_image
from ..text.checks import as_text, as_texts
from .base import ChameleonPipeline
from .prompts import ROW_END, TASKS, LuminaPrompts, trained_sizes


EXAMPLE = """
# downloaded and converted once; `arimage models` says how large it is
pipe = AutoPipeline.from_pretrained("lumina-mgpt-2", dtype=torch.bfloat16).to("cuda")
pipe.decoding = "sjd-coupled"
image = pipe("a red heart", height=576, width=1024, generator=torch.Generator().manual_seed(0)).images[0]
"""


class LuminaMGPTPipeline(ChameleonPipeline):
    """Generates images from text with Lumina-mGPT, in every size that its vocabulary has tokens for.

    Args:
        transformer (`ChameleonForConditionalGeneration`): the language model, with its `vocabulary_map`.
        vq (`VQModel`): decodes image tokens to images: Chameleon's VQGAN, or the MoVQGAN of Lumina-mGPT 2.0.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): the text tokenizer. Without it the pipeline takes
            `input_ids`.
        image_size (`int`): the weights were trained for images with the area of a square of this many pixels per side:
            512, 768 or 1024.
        neighbours (`NeighbourModel`, *optional*): fitted to tokens like those of this model, for the `corrections` of
            `SpeculativeJacobiDecoding`.
    """

    _header_length = LuminaPrompts.header_length

    def __init__(
        self,
        transformer: ChameleonForConditionalGeneration,
        vq: VQModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        image_size: int = 768,
        neighbours: NeighbourModel | None = None,
    ):
        super().__init__(transformer, vq, tokenizer, image_size, neighbours)
        self.prompts = LuminaPrompts(self._vocabulary)
        # Lumina-mGPT 2.0
        if vq is not None and vq.config.norm_type == "spatial":
            self.abilities = replace(self.abilities, arguments=self.abilities.arguments | {"task"})

    @property
    def image_sizes(self) -> list[tuple[int, int]]:
        """The sizes (height, width) in pixels that the weights were trained for, the square first."""
        return trained_sizes(self.config.image_size)

    def check_size(
        self, height: int | None, width: int | None, input_ids: torch.LongTensor | None = None
    ) -> tuple[int, int]:
        """Height and width of the images of a call: the given ones, those at the end of the token ids, or the square.

        Raises:
            ValueError: if the vocabulary has no tokens for this size, or the prompts end with another one.
        """
        headers = None
        if input_ids is not None and self.has_header(input_ids):
            headers = input_ids[:, -self._header_length :]
        return self.prompts.check_size(height, width, self.config.image_size, headers)

    def encode_prompt(
        self, prompt: str | list[str], size: tuple[int, int], task: str | None = None, given: bool = False
    ) -> tuple[torch.LongTensor, torch.LongTensor]:
        """Token ids [B, P] of texts up to the end of the turn, padded on the left, and their mask. With a `task` they
        describe two panels; with `given` the upper one is the user's image."""
        return self.encode_texts([self.prompts.text(text, size, task, given) for text in as_texts(prompt)])

    @pipeline_call(EXAMPLE, ImagePipelineOutput)
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        *,
        task: str | None = None,
        image: PipelineImageInput | None = None,
        mask_image: PipelineImageInput | None = None,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        **common: Unpack[TokenArguments],
    ) -> GenerationCall:
        r"""
        Generate images. Sizes are multiples of 32 pixels.

        Args:
            prompt (`str` or `list[str]`, *optional*):
                What to generate.
            task (`str`, *optional*):
                For Lumina-mGPT 2.0: `"depth"`, `"canny"`, `"hed"` or `"pose"` generates two panels in an image of this
                height and width, the image of the prompt above and its map below. If `image` is given, it is the upper
                panel, a map (or, for `"subject"`, an image of an object), and the image of the prompt is generated
                below it.
            {image}
            {raster_mask}
            input_ids (`torch.LongTensor`, *optional*), attention_mask (`torch.Tensor`, *optional*):
                Token ids [B, P] in place of `prompt`, up to the end of the turn or up to the two tokens of the size,
                padded on either side, and their mask.
            {common}
        """
        count, input_ids, attention_mask = self.check_prompt(prompt, input_ids, attention_mask)
        if task is not None and (as_text(task, "task") not in TASKS or not self.abilities.accepts("task")):
            raise ValueError(f"task is {task!r}: Lumina-mGPT 2.0 has {', '.join(TASKS)}, other checkpoints have none")
        if task is not None and mask_image is not None:
            raise ValueError("task generates whole panels: leave out mask_image")
        size = self.check_size(common.pop("height", None), common.pop("width", None), input_ids)
        call = self.begin_call(count, size, **common)
        if task is None:
            self.edit(call, image, mask_image)
        elif image is not None:
            half = (size[0] // 2, size[1])
            panel, _ = prepare_image(image, torch.ones(1, 1, *half, dtype=torch.float32), half, count)
            call.given_tokens = self.encode_image(call.per_image(panel))
        if prompt is not None:
            input_ids, attention_mask = self.encode_prompt(prompt, size, task, call.given_tokens is not None)
        header = self.prompts.header(size)
        self.add_model(call, input_ids, attention_mask, header, header, self._vocabulary[ROW_END])
        return call
