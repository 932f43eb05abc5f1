"""Emu3 (https://arxiv.org/abs/2409.18869): images from text by a language model whose vocabulary holds the image codes."""

import numbers
from collections.abc import Callable

import torch
from diffusers.image_processor import PipelineImageInput
from transformers import Emu3ForConditionalGeneration, Emu3VQVAE, PreTrainedTokenizerFast

from ..decoding import Decoding, Layout
from ..models.language_model import LanguageTokenModel, code_head
from .base import ARImagePipeline
from .call import GenerationCall
from .compiled import decoder_in
from .conditioning import MAX_PROMPT_CHARACTERS, as_texts, check_one_of, check_token_ids, left_pad_ids
from .docstrings import fill_docstring
from .emu3_image import decode_image
from .output import ImagePipelineOutput


# How the vocabulary of every checkpoint names the tokens around the codes.
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

EXAMPLE_DOC_STRING = """
    Examples:
        ```py
        >>> import torch
        >>> from arimage import AutoPipeline

        >>> pipe = AutoPipeline.from_pretrained("emu3-gen", dtype=torch.bfloat16).to("cuda")  # what `arimage convert` wrote
        >>> image = pipe("a shiba inu in the snow", ratio="16:9", decoding="sjd").images[0]
        ```
"""


class Emu3Pipeline(ARImagePipeline):
    """Images of a text by Emu3-Gen or Emu3-Stage1, of any size and aspect ratio near the trained area.

    Args:
        model (`Emu3ForConditionalGeneration`): language model and image tokenizer.
        tokenizer (`PreTrainedTokenizerFast`, *optional*): of the text. Without it the pipeline takes `input_ids`.
        image_area (`int`): pixels of the images that the model was trained for: 720 * 720 of Emu3-Gen, 512 * 512 of
            Emu3-Stage1.

    Raises:
        ValueError: if the model's `vocabulary_map` does not name the tokens of an image.
    """

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
        codes = [vocabulary.get(CODE.format(code)) for code in range(model.config.vq_config.codebook_size)]
        special = [vocabulary.get(name) for name in (BEGIN_OF_TEXT, BEGIN_OF_IMAGE, BEGIN_OF_CODES, END_OF_ROW)]
        if None in special or None in codes or codes != [codes[0] + code for code in range(len(codes))]:
            raise ValueError(
                f"the model's vocabulary_map does not name {END_OF_ROW} and the like, and {len(codes)} visual tokens in a row: "
                "convert the checkpoint again"
            )
        self._first_code, self._vocab_size = codes[0], len(codes)
        self.register_modules(model=model, tokenizer=tokenizer)
        self.register_to_config(image_area=image_area)

    @property
    def vq(self) -> Emu3VQVAE:
        """The image tokenizer."""
        return self.model.model.vqmodel

    @property
    def accepts_negative_prompt(self) -> bool:
        return True

    @property
    def accepts_prompt_suffix(self) -> bool:
        return True

    @property
    def accepts_ratio(self) -> bool:
        return True

    @property
    def image_sizes(self) -> list[tuple[int, int]]:
        return list(dict.fromkeys(self.image_size(ratio=ratio) for ratio in RATIOS))

    def image_size(
        self, height: int | None = None, width: int | None = None, ratio: str | None = None
    ) -> tuple[int, int]:
        """Height and width in pixels of the images of a call with these arguments."""
        factor = self.vq.spatial_scale_factor
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
        """Token ids [B, P] of texts with the header of an image of `size` (height, width) behind each, padded on the left,
        and their mask."""
        rows, columns = (side // self.vq.spatial_scale_factor for side in size)
        texts = [f"{BEGIN_OF_TEXT}{text}{BEGIN_OF_IMAGE}{rows}*{columns}{BEGIN_OF_CODES}" for text in prompt]
        encoded = self.tokenizer(
            texts, add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt"
        )
        return encoded.input_ids, encoded.attention_mask

    def _ids(
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
                    f"{ids_name} announce another image than one of {size[0]}x{size[1]}: give height and width"
                )
        return ids, torch.ones_like(ids) if mask is None else mask.long()

    @torch.no_grad()
    def prepare(
        self,
        prompt: str | list[str] | None = None,
        negative_prompt: str | list[str] | None = None,
        *,
        prompt_suffix: str = PROMPT_SUFFIX,
        ratio: str | None = None,
        image: PipelineImageInput | None = None,
        mask_image: PipelineImageInput | None = None,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        negative_input_ids: torch.LongTensor | None = None,
        negative_attention_mask: torch.Tensor | None = None,
        height: int | None = None,
        width: int | None = None,
        **settings,
    ) -> GenerationCall:
        """Check the arguments of a call, encode its condition, and return it with its model. `settings` are the arguments of
        `__call__` from guidance_scale to guided_tokens, num_images_per_prompt and generator."""
        check_one_of(prompt=prompt, input_ids=input_ids)
        if negative_prompt is not None and negative_input_ids is not None:
            raise ValueError("give either a negative_prompt or negative_input_ids")
        if not isinstance(prompt_suffix, str):
            raise ValueError(f"prompt_suffix is {prompt_suffix!r}: give a string")
        size = self.image_size(height, width, ratio)
        groups = [self._ids("prompt", prompt, prompt_suffix, input_ids, attention_mask, size)]
        count = len(groups[0][0])
        call = self.begin_call(count, size, **settings)
        if call.guided or negative_prompt is not None or negative_input_ids is not None:
            if negative_prompt is None and negative_input_ids is None:
                if self.tokenizer is None:
                    raise ValueError("this pipeline has no tokenizer: give negative_input_ids, or guidance_scale=1")
                negative_prompt = NEGATIVE_PROMPT
            negative = self._ids(
                "negative_prompt", negative_prompt, "", negative_input_ids, negative_attention_mask, size
            )
            if len(negative[0]) not in (1, count):
                name = "negative_input_ids" if negative_prompt is None else "negative_prompt"
                raise ValueError(
                    f"{name} holds {len(negative[0])} for {count} prompts: give one for all, or one for each"
                )
            groups += [negative] if call.guided else []
        self.edit(call, image, mask_image)

        # The negative prompts are sequences of their own, at their own positions, with a header of their own.
        length = max(ids.shape[1] for ids, _ in groups)
        padding, device = self.model.config.text_config.pad_token_id, self._execution_device
        rows, masks = (
            torch.cat([left_pad_ids(group[i].to(device), length, value).expand(count, -1) for group in groups])
            for i, value in enumerate((padding, 0))
        )
        text_model = self.on_device(self.model).model.text_model
        embedding, first = text_model.get_input_embeddings(), self._first_code
        factor = self.vq.spatial_scale_factor
        codes = torch.arange(self._vocab_size, device=self._execution_device)
        # The authors guide log-probabilities over the whole vocabulary. They are logits less a constant for each of the two
        # sides, so that guided logits of the image tokens alone give the same distribution.
        call.model = LanguageTokenModel(
            decoder_in(self.model, text_model),
            embed=lambda tokens: embedding(tokens + first),
            head=code_head(self.model.lm_head, first, self._vocab_size),
            layout=Layout((size[0] // factor, size[1] // factor)),
            input_ids=rows,
            attention_mask=masks,
            row_end=self.model.config.vocabulary_map[END_OF_ROW],
            codebook=self.vq.quantize.embedding(codes).to(self._execution_device),
            groups=len(groups),
            network=self.model,
            num_images_per_prompt=call.num_images_per_prompt,
        )
        return call

    def encode_image(self, pixels: torch.Tensor) -> torch.LongTensor:
        """The tokens [B, h, w] of images [B, 3, H, W] in [-1, 1]."""
        vq = self.on_device(self.model).model.vqmodel
        return torch.stack(vq.encode(pixels, [pixels.shape[2:]] * len(pixels)).image_tokens).to(pixels.device)

    @torch.no_grad()
    def decode_tokens(self, call: GenerationCall, tokens: torch.LongTensor) -> torch.Tensor:
        """Pixels [B, 3, H, W], nominally in [-1, 1], of the tokens [B, N] of a call, drafts included; -1 is not known yet."""
        tokens = self.whole_tokens(call, tokens.to(self._execution_device).clamp(min=0))
        return decode_image(self.on_device(self.model).model.vqmodel, tokens).to(self._execution_device)

    @fill_docstring(EXAMPLE_DOC_STRING)
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        negative_prompt: str | list[str] | None = None,
        *,
        prompt_suffix: str = PROMPT_SUFFIX,
        ratio: str | None = None,
        image: PipelineImageInput | None = None,
        mask_image: PipelineImageInput | None = None,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        negative_input_ids: torch.LongTensor | None = None,
        negative_attention_mask: torch.Tensor | None = None,
        guidance_scale: float | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        guided_tokens: int | None = None,
        height: int | None = None,
        width: int | None = None,
        num_images_per_prompt: int = 1,
        generator: torch.Generator | list[torch.Generator] | None = None,
        decoding: Decoding | str | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: Callable | None = None,
        callback_on_step_end_tensor_inputs: list[str] = ["tokens"],  # noqa: B006
    ) -> ImagePipelineOutput | tuple:
        r"""
        Generate images.

        Args:
            prompt (`str` or `list[str]`, *optional*):
                What to generate.
            negative_prompt (`str` or `list[str]`, *optional*, defaults to the authors'):
                What to guide away from: one for all prompts, or one per prompt.
            prompt_suffix (`str`, *optional*, defaults to the authors' words for quality):
                Follows every prompt; `""` for none.
            ratio (`str`, *optional*, defaults to `"1:1"`):
                Width to height, as in `"16:9"`, in place of `height` and `width`: the size of this ratio with the trained area.
            {image}
            {raster_mask}
            input_ids (`torch.LongTensor`, *optional*), attention_mask (`torch.Tensor`, *optional*):
                Token ids [B, P] in place of `prompt`, header of the image included, padded on the left, and their mask. The
                size in the header must be that of the call.
            negative_input_ids (`torch.LongTensor`, *optional*), negative_attention_mask (`torch.Tensor`, *optional*):
                The same in place of `negative_prompt`, [1 or B, P'].
            {common}

        {example}

        Returns:
            [`ImagePipelineOutput`] or `tuple`: the output, or the tuple `(images,)`.
        """
        return type(self).generate(**locals())
