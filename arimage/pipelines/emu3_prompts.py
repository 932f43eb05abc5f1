"""The prompts of Emu3 (https://arxiv.org/abs/2409.18869): its vocabulary, the sizes of its images and its token
ids."""

import numbers
from typing import Any

import torch
from transformers import Emu3ForConditionalGeneration, Emu3VQVAE, PreTrainedTokenizerFast

from ..tokenizers.tiling import Tiling
from .abilities import EDITING, TOKEN_SAMPLING, Abilities
from .base import ARImagePipeline
from .checks import MAX_PROMPT_CHARACTERS, as_texts, check_token_ids


# How the vocabulary of every checkpoint names the tokens around the image tokens.
BEGIN_OF_TEXT = "<|extra_203|>"
BEGIN_OF_IMAGE = "<|image start|>"
BEGIN_OF_CODES = "<|image token|>"
END_OF_ROW = "<|extra_200|>"
CODE = "<|visual token {:06d}|>"
# What the authors add to every prompt, and what they guide away from.
PROMPT_SUFFIX = " masterpiece, film grained, best quality."
NEGATIVE_PROMPT = (
    "lowres, bad anatomy, bad hands, text, error, missing fingers, extra digit, fewer digits, cropped, worst quality, "
    "low quality, normal quality, jpeg artifacts, signature, watermark, username, blurry."
)

# Of `image_sizes`, the default first.
RATIOS = ("1:1", "4:3", "3:4", "3:2", "2:3", "16:9", "9:16")


class Emu3Prompts(ARImagePipeline):
    """The part of `Emu3Pipeline` that reads prompts and sizes."""

    abilities = Abilities("tokens", TOKEN_SAMPLING | EDITING | {"negative_prompt", "prompt_suffix", "ratio"})
    model_cpu_offload_seq = "model"
    _optional_components = ["tokenizer"]

    def __init__(
        self,
        model: Emu3ForConditionalGeneration,
        tokenizer: PreTrainedTokenizerFast | None = None,
        image_area: int = 720 * 720,
    ):
        super().__init__()
        vocabulary = model.config.vocabulary_map or {}
        codes: list[Any] = [vocabulary.get(CODE.format(code)) for code in range(model.config.vq_config.codebook_size)]
        special = [vocabulary.get(name) for name in (BEGIN_OF_TEXT, BEGIN_OF_IMAGE, BEGIN_OF_CODES, END_OF_ROW)]
        if None in special or None in codes or codes != [codes[0] + code for code in range(len(codes))]:
            raise ValueError(
                f"the model's vocabulary_map does not name {END_OF_ROW} and the like, and {len(codes)} visual tokens "
                "in a row: "
                "convert the checkpoint again"
            )
        self._first_code, self._vocab_size = codes[0], len(codes)
        self.register_modules(model=model, tokenizer=tokenizer)
        self.register_to_config(image_area=image_area)
        self._tiling = Tiling(self.scale_factor)

    @property
    def vq(self) -> Emu3VQVAE:
        """The image tokenizer."""
        return self.model.model.vqmodel

    @property
    def scale_factor(self) -> int:
        """Pixels per token along each side."""
        return self.vq.spatial_scale_factor

    @property
    def image_sizes(self) -> list[tuple[int, int]]:
        return list(dict.fromkeys(self.image_size(ratio=ratio) for ratio in RATIOS))

    def image_size(
        self, height: int | None = None, width: int | None = None, ratio: str | None = None
    ) -> tuple[int, int]:
        """Height and width in pixels of the images of a call with these arguments."""
        factor = self.scale_factor
        if height is None and width is None:
            sides = str(ratio or "1:1").split(":")
            if len(sides) != 2 or not all(side.isdecimal() and int(side) for side in sides):
                raise ValueError(f'ratio is {ratio!r}: give width and height as in "16:9"')
            across, down = map(int, sides)
            unit = (self.config.image_area / (across * down)) ** 0.5 / factor
            return factor * max(round(down * unit), 1), factor * max(round(across * unit), 1)
        if ratio is not None or height is None or width is None:
            raise ValueError("the size is either height and width, both, or a ratio: give one of the two")
        if not all(isinstance(side, numbers.Integral) and side > 0 and side % factor == 0 for side in (height, width)):
            raise ValueError(f"height and width are {height} and {width}: give multiples of {factor}")
        return height, width

    def encode_prompt(self, prompt: list[str], size: tuple[int, int]) -> tuple[torch.LongTensor, torch.LongTensor]:
        """Token ids [B, P] of texts with the header of an image of `size` (height, width) behind each, padded on the
        left, and their mask."""
        rows, columns = (side // self.scale_factor for side in size)
        texts = [f"{BEGIN_OF_TEXT}{text}{BEGIN_OF_IMAGE}{rows}*{columns}{BEGIN_OF_CODES}" for text in prompt]
        encoded = self.tokenizer(
            texts, add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt"
        )
        return encoded.input_ids, encoded.attention_mask

    def prompt_ids(
        self, name: str, texts, suffix: str, ids, mask, size: tuple[int, int]
    ) -> tuple[torch.LongTensor, torch.LongTensor]:
        """Checked token ids [B, P] of one of the two prompts, and their mask."""
        ids_name = name.replace("prompt", "input_ids")
        if texts is not None:
            if self.tokenizer is None:
                raise ValueError(f"this pipeline has no tokenizer: give {ids_name}, not {name}")
            texts = [text + suffix for text in as_texts(texts, name, MAX_PROMPT_CHARACTERS)]
            return self.encode_prompt(texts, size)
        check_token_ids(ids_name, ids, mask, last=self.model.config.vocabulary_map[BEGIN_OF_CODES])
        if self.tokenizer is not None:
            header, _ = self.encode_prompt([""], size)
            if (ids[:, 1 - header.shape[1] :] != header[:, 1:].to(ids.device)).any():
                raise ValueError(
                    f"{ids_name} announce an image of another size than {size[0]}x{size[1]}: give height and width"
                )
        return ids, torch.ones_like(ids) if mask is None else mask.long()
