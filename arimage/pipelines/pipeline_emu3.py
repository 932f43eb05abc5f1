"""Emu3 (https://arxiv.org/abs/2409.18869): images from text by a language model whose vocabulary holds the image codes."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from diffusers.image_processor import PipelineImageInput
from diffusers.utils import replace_example_docstring
from transformers import Emu3ForConditionalGeneration, Emu3VQVAE, PreTrainedTokenizerFast

from ..decoding import Decoding, Layout, TokenModel
from ..models.language_model import LanguageTokenModel, code_head
from .base import ARImagePipeline, as_texts, codes_to_keep
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

EXAMPLE_DOC_STRING = """
    Examples:
        ```py
        >>> import torch
        >>> from arimage import AutoPipeline

        >>> pipe = AutoPipeline.from_pretrained("emu3-gen", dtype=torch.bfloat16).to("cuda")  # what `arimage convert` wrote
        >>> image = pipe("a shiba inu in the snow", ratio="16:9", decoding="sjd").images[0]
        ```
"""


def decode_image(vq: Emu3VQVAE, codes: torch.LongTensor) -> torch.Tensor:
    """Pictures [B, 3, H, W], nominally in [-1, 1], of codes [B, h, w]: what `vq.decode` returns, for a fourth of its work.

    The tokenizer is one of videos, whose codes are four frames each. Its convolutions in time see nothing of later frames and
    all else is done frame by frame, so that a picture, the first frame, needs no other one drawn.
    """
    decoder = vq.decoder
    vectors = vq.quantize.embedding(codes).permute(0, 3, 1, 2)[:, :, None]
    frames = torch.cat([vq.post_quant_conv(vectors), vectors])
    for layer in decoder.time_res_stack:
        frames = layer(frames)
    for layer in decoder.time_conv:
        frames = F.silu(layer(frames))
    hidden, vectors = frames[:, :, 0].chunk(2)
    hidden = decoder.middle_block(decoder.conv_in(hidden), vectors)
    hidden = decoder.norm_out(decoder.up_block(hidden, vectors), vectors)
    return decoder.conv_out(F.silu(hidden))


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

    def image_size(
        self, height: int | None = None, width: int | None = None, ratio: str | None = None
    ) -> tuple[int, int]:
        """Height and width in pixels of the images of a call with these arguments."""
        factor = self.vq.spatial_scale_factor
        if height is None and width is None:
            sides = (ratio or "1:1").split(":")
            if len(sides) != 2 or not all(side.isdecimal() and int(side) for side in sides):
                raise ValueError(f'ratio is {ratio!r}: give width and height as in "16:9"')
            across, down = map(int, sides)
            unit = (self.config.image_area / (across * down)) ** 0.5 / factor
            return factor * max(round(down * unit), 1), factor * max(round(across * unit), 1)
        if ratio is not None or height is None or width is None:
            raise ValueError("the size is either height and width, both, or a ratio: give one of the two")
        if height < 1 or width < 1 or height % factor or width % factor:
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

    def check_inputs(
        self, prompt, negative_prompt, input_ids, attention_mask, negative_input_ids, negative_attention_mask
    ) -> int:
        """Refuse what cannot be a prompt; return how many prompts there are."""
        if (prompt is None) == (input_ids is None):
            raise ValueError("give either a prompt or input_ids")
        if negative_prompt is not None and negative_input_ids is not None:
            raise ValueError("give either a negative_prompt or negative_input_ids")
        counts = {}
        for name, texts in (("prompt", prompt), ("negative_prompt", negative_prompt)):
            if texts is None:
                continue
            if self.tokenizer is None:
                raise ValueError(f"this pipeline has no tokenizer: give input_ids and negative_input_ids, not {name}")
            counts[name] = len(as_texts(texts, name))
        header_end = self.model.config.vocabulary_map[BEGIN_OF_CODES]
        for name, ids, mask in (
            ("input_ids", input_ids, attention_mask),
            ("negative_input_ids", negative_input_ids, negative_attention_mask),
        ):
            if ids is None:
                continue
            if ids.ndim != 2 or not len(ids) or (ids[:, -1] != header_end).any():
                raise ValueError(
                    f"{name} must be [B, P], padded on the left, and end with the header of an image, its last token "
                    f"{header_end}"
                )
            if mask is not None and (
                mask.shape != ids.shape or (mask.int().diff() < 0).any() or not mask[:, -1].all()
            ):
                raise ValueError(f"the mask of {name} must be of their shape, zeros and then ones: pad on the left")
            counts[name] = len(ids)
        count = counts.get("prompt") or counts["input_ids"]
        for name in ("negative_prompt", "negative_input_ids"):
            if counts.get(name, 1) not in (1, count):
                raise ValueError(f"{name} holds {counts[name]} for {count} prompts: give one for all, or one for each")
        return count

    @torch.no_grad()
    def bind(
        self,
        prompt: str | list[str] | None = None,
        negative_prompt: str | list[str] | None = None,
        prompt_suffix: str = PROMPT_SUFFIX,
        guidance_scale: float | None = None,
        height: int | None = None,
        width: int | None = None,
        ratio: str | None = None,
        num_images_per_prompt: int = 1,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        negative_input_ids: torch.LongTensor | None = None,
        negative_attention_mask: torch.Tensor | None = None,
    ) -> TokenModel:
        """The next-code model of the images that a call with these arguments draws, for `arimage.decoding.decode`."""
        count = self.check_inputs(
            prompt, negative_prompt, input_ids, attention_mask, negative_input_ids, negative_attention_mask
        )
        size = self.image_size(height, width, ratio)
        if prompt is not None:
            texts = [text + prompt_suffix for text in as_texts(prompt)]
            input_ids, attention_mask = self.encode_prompt(texts, size)
        groups = {"input_ids": (input_ids, attention_mask)}
        if self.sampling(guidance_scale=guidance_scale).guidance_scale > 1:
            if negative_input_ids is None:
                if self.tokenizer is None:
                    raise ValueError("this pipeline has no tokenizer: give negative_input_ids, or guidance_scale=1")
                texts = as_texts(NEGATIVE_PROMPT if negative_prompt is None else negative_prompt)
                negative_input_ids, negative_attention_mask = self.encode_prompt(texts, size)
            groups["negative_input_ids"] = negative_input_ids, negative_attention_mask

        if self.tokenizer is not None:
            header, _ = self.encode_prompt([""], size)
            for name, (ids, _) in groups.items():
                if (ids[:, 1 - header.shape[1] :] != header[:, 1:].to(ids.device)).any():
                    raise ValueError(
                        f"{name} announce another image than one of {size[0]}x{size[1]}: give height and width"
                    )
        # The negative prompts are sequences of their own, at their own positions, with a header of their own.
        length = max(ids.shape[1] for ids, _ in groups.values())
        rows, masks = [], []

        def pad(values: torch.Tensor, value: int) -> torch.Tensor:
            values = F.pad(values.to(self._execution_device), (length - values.shape[1], 0), value=value)
            return values.expand(count, -1).repeat_interleave(num_images_per_prompt, dim=0)

        for ids, mask in groups.values():
            rows.append(pad(ids, self.model.config.text_config.pad_token_id))
            masks.append(pad(torch.ones_like(ids) if mask is None else mask.long(), 0))

        text_model = self.on_device(self.model).model.text_model
        embedding, first = text_model.get_input_embeddings(), self._first_code
        factor = self.vq.spatial_scale_factor
        self._grid = size[0] // factor, size[1] // factor
        codes = torch.arange(self._vocab_size, device=self._execution_device)
        # The authors guide log-probabilities over the whole vocabulary. They are logits less a constant for each of the two
        # sides, so that guided logits of the codes alone give the same law.
        return LanguageTokenModel(
            text_model,
            embed=lambda codes: embedding(codes + first),
            head=code_head(self.model.lm_head, first, self._vocab_size),
            layout=Layout(self._grid),
            input_ids=torch.cat(rows),
            attention_mask=torch.cat(masks),
            row_end=self.model.config.vocabulary_map[END_OF_ROW],
            codebook=self.vq.quantize.embedding(codes).to(self._execution_device),
            groups=len(groups),
        )

    @torch.no_grad()
    def draw_codes(self, tokens: torch.LongTensor, decided: torch.BoolTensor) -> torch.Tensor:
        """Pictures [B, 3, H, W], nominally in [-1, 1], of codes [B, N], drafts included, as a callback of the latest call gets
        them."""
        codes = tokens.to(self._execution_device).clamp(min=0).unflatten(1, self._grid)
        return decode_image(self.on_device(self.model).model.vqmodel, codes).to(self._execution_device)

    def kept_codes(self, pixels: torch.Tensor, repaint: torch.BoolTensor) -> torch.LongTensor:
        """The codes [B, N] of pictures [B, 3, H, W] in [-1, 1], but -1 where any pixel of a code is in `repaint` [B, 1, H, W]."""
        codes = torch.stack(self.vq.encode(pixels, [pixels.shape[2:]] * len(pixels)).image_tokens).to(pixels.device)
        return codes_to_keep(codes, repaint)

    @torch.no_grad()
    @replace_example_docstring(EXAMPLE_DOC_STRING)
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        negative_prompt: str | list[str] | None = None,
        prompt_suffix: str = PROMPT_SUFFIX,
        image: PipelineImageInput | None = None,
        mask_image: PipelineImageInput | None = None,
        guidance_scale: float | None = None,
        height: int | None = None,
        width: int | None = None,
        ratio: str | None = None,
        num_images_per_prompt: int = 1,
        generator: torch.Generator | list[torch.Generator] | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        decoding: Decoding | str | None = None,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        negative_input_ids: torch.LongTensor | None = None,
        negative_attention_mask: torch.Tensor | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: Callable | None = None,
        callback_on_step_end_tensor_inputs: list[str] = ["tokens"],  # noqa: B006
    ) -> ImagePipelineOutput | tuple:
        r"""
        Draw images.

        Args:
            prompt (`str` or `list[str]`, *optional*):
                What to draw.
            negative_prompt (`str` or `list[str]`, *optional*, defaults to the authors'):
                What to guide away from: one for all prompts, or one a prompt.
            prompt_suffix (`str`, *optional*, defaults to the authors' praise of quality):
                Follows every prompt; `""` for none.
            image (`PIL.Image.Image`, `np.ndarray`, `torch.Tensor` or a list of them, *optional*):
                A picture to change, with `mask_image`: one for all prompts, or one a prompt. It is resized to the size of the
                call.
            mask_image (as `image`, *optional*):
                White where the picture is drawn anew, black where it is kept pixel by pixel. A code is drawn if any of its
                pixels is white. Codes are drawn row by row: what is new fits what is kept above it and to its left in the
                row, and knows nothing of what is kept below it and to its right.
            guidance_scale (`float`, *optional*, defaults to the checkpoint's):
                s in u + s (c - u), with logits c of the prompt and u of the negative prompt; 1 or less switches it off.
            height (`int`, *optional*), width (`int`, *optional*):
                The size in pixels, multiples of 8.
            ratio (`str`, *optional*, defaults to `"1:1"`):
                Width to height, as in `"16:9"`, in place of them: the size of this ratio whose area is the trained one.
            num_images_per_prompt (`int`, *optional*, defaults to 1):
                Images of each prompt.
            generator (`torch.Generator` or `list[torch.Generator]`, *optional*):
                Makes the images reproducible: one for the call, or one an image.
            temperature (`float`, *optional*), top_k (`int`, *optional*), top_p (`float`, *optional*):
                Sampling settings, by default the checkpoint's; see `Sampling`. `top_k=1` is greedy decoding.
            decoding (`Decoding` or `str`, *optional*, defaults to `pipe.decoding`):
                The decoding method of this call.
            input_ids (`torch.LongTensor`, *optional*), attention_mask (`torch.Tensor`, *optional*):
                Token ids [B, P] in place of `prompt`, header of the image included, padded on the left, and their mask. The
                size that the header tells must be that of the call.
            negative_input_ids (`torch.LongTensor`, *optional*), negative_attention_mask (`torch.Tensor`, *optional*):
                The same in place of `negative_prompt`, [1 or B, P'].
            output_type (`str`, *optional*, defaults to `"pil"`):
                `"pil"`, `"np"`, `"pt"`, or `"latent"` for the codes [B, h, w].
            return_dict (`bool`, *optional*, defaults to `True`):
                Return an `ImagePipelineOutput` instead of a tuple.
            callback_on_step_end (`Callable`, *optional*):
                Called after every forward pass as `callback(pipe, step, passes, tensors)`; what it returns is ignored. Set
                `pipe._interrupt = True` in it to stop.
            callback_on_step_end_tensor_inputs (`list[str]`, *optional*, defaults to `["tokens"]`):
                What `tensors` holds: `"tokens"` [B, N], drafts included, and `"decided"` [B, N].

        Examples:

        Returns:
            [`ImagePipelineOutput`] or `tuple`: the output, or the tuple `(images,)`.
        """
        # 1. Check inputs
        self.check_call(height, width, None, output_type, callback_on_step_end_tensor_inputs, num_images_per_prompt)
        count = self.check_inputs(
            prompt, negative_prompt, input_ids, attention_mask, negative_input_ids, negative_attention_mask
        )
        size = self.image_size(height, width, ratio)
        seeds = self.draw_seeds(generator, count * num_images_per_prompt)

        # 2. Encode the prompts and the picture
        model = self.bind(
            prompt,
            negative_prompt,
            prompt_suffix,
            guidance_scale,
            *size,
            num_images_per_prompt=num_images_per_prompt,
            input_ids=input_ids,
            attention_mask=attention_mask,
            negative_input_ids=negative_input_ids,
            negative_attention_mask=negative_attention_mask,
        )
        forced = pixels = repaint = None
        if image is not None or mask_image is not None:
            pixels, repaint = self.prepare_image(image, mask_image, size, count, num_images_per_prompt)
            forced = self.kept_codes(pixels, repaint)
        sampling = self.sampling(
            guidance_scale=guidance_scale, temperature=temperature, top_k=top_k, top_p=top_p, forced=forced
        )

        # 3. Decode the codes
        state, stats = self.run_decoding(
            model, decoding, sampling, seeds, callback_on_step_end, callback_on_step_end_tensor_inputs
        )

        # 4. Turn codes into images
        tokens = state.tokens.unflatten(1, model.layout.shape)

        def draw() -> torch.Tensor:
            drawn = self.draw_codes(state.tokens, state.decided)
            return drawn if pixels is None else torch.where(repaint, drawn, pixels)

        images, stats = self.to_images(tokens, draw, output_type, stats)
        self.maybe_free_model_hooks()
        if not return_dict:
            return (images,)
        return ImagePipelineOutput(images=images, tokens=tokens, stats=stats)
