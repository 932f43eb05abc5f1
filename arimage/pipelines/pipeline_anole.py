"""Anole (https://arxiv.org/abs/2407.06135): Chameleon (https://arxiv.org/abs/2405.09818) with an image head, images from text."""

import torch
from diffusers import VQModel
from transformers import ChameleonForConditionalGeneration, PreTrainedTokenizerBase

from .pipeline_lumina_mgpt import BEGIN_OF_IMAGE, LuminaMGPTPipeline


class AnolePipeline(LuminaMGPTPipeline):
    """Images of a text by Anole, or by another Chameleon whose image head was trained: called as `LuminaMGPTPipeline`, but of
    one size and without tasks.

    Args:
        transformer, vq, tokenizer: as in `LuminaMGPTPipeline`.
        image_size (`int`): side of the images in pixels; 512 of every published checkpoint.
    """

    _header_length = 1

    def __init__(
        self,
        transformer: ChameleonForConditionalGeneration,
        vq: VQModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        image_size: int = 512,
    ):
        super().__init__(transformer, vq, tokenizer, image_size)

    @property
    def image_sizes(self) -> list[tuple[int, int]]:
        return [(self.config.image_size,) * 2]

    def check_size(
        self, height: int | None, width: int | None, input_ids: torch.LongTensor | None = None
    ) -> tuple[int, int]:
        side = self.config.image_size
        if {height or side, width or side} != {side}:
            raise ValueError(
                f"height and width are {height} and {width}: this checkpoint draws {side}x{side} pixels only, leave them out"
            )
        return side, side

    def _layout(self, size: tuple[int, int]) -> tuple[list[int], list[int], int | None]:
        begin = self._vocabulary[BEGIN_OF_IMAGE]
        return [begin], [self._vocabulary["<s>"], begin], None

    def _text(self, prompt: str, size: tuple[int, int], task: str | None, given: bool) -> str:
        return prompt
