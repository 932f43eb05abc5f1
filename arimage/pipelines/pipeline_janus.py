"""Janus (https://arxiv.org/abs/2410.13848) and Janus-Pro (https://arxiv.org/abs/2501.17811): images from text, and text from
images."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from diffusers.image_processor import PipelineImageInput
from diffusers.utils import replace_example_docstring
from PIL import Image
from transformers import JanusForConditionalGeneration, JanusModel, JanusProcessor

from ..decoding import Decoding, Layout, TokenModel
from ..kernels.codebook import nearest_code
from ..models.language_model import LanguageTokenModel
from .base import ARImagePipeline, as_texts, codes_to_keep
from .output import ImagePipelineOutput


EXAMPLE_DOC_STRING = """
    Examples:
        ```py
        >>> import torch
        >>> from arimage import JanusPipeline

        >>> pipe = JanusPipeline.from_pretrained("janus-pro-1b", dtype=torch.bfloat16).to("cuda")
        >>> image = pipe("a red heart", generator=torch.Generator().manual_seed(0)).images[0]
        ```
"""


class JanusPipeline(ARImagePipeline):
    """Images of a text by Janus or Janus-Pro, changes of a given image, and answers to questions about images.

    Args:
        model (`JanusForConditionalGeneration`): the language model, the image tokenizer and the vision encoder. Its
            `generation_config` names the tokens of a prompt: `bos_token_id`, `pad_token_id` and, in `generation_kwargs`,
            `boi_token_id`.
        processor (`JanusProcessor`, *optional*): reads prompts and pictures. Without it the pipeline takes `input_ids`.

    Raises:
        ValueError: if the model names no begin-of-image token.
    """

    model_cpu_offload_seq = "model"
    _optional_components = ["processor"]

    def __init__(self, model: JanusForConditionalGeneration, processor: JanusProcessor | None = None):
        super().__init__()
        if "boi_token_id" not in (getattr(model.generation_config, "generation_kwargs", None) or {}):
            raise ValueError(
                "generation_config of the model has no boi_token_id in its generation_kwargs: put the id of the "
                "begin-of-image token there"
            )
        self.register_modules(model=model, processor=processor)
        self.generation_config["guidance_scale"] = 5.0

    @property
    def parts(self) -> JanusModel:
        """The networks of the model, on their device."""
        return self.on_device(self.model).model

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of codes in an image."""
        return (self.model.config.vq_config.num_patches,) * 2

    @property
    def scale_factor(self) -> int:
        """Pixels a code along each side."""
        return 2 ** (len(self.model.config.vq_config.channel_multiplier) - 1)

    def check_inputs(self, prompt, input_ids, attention_mask) -> int:
        """Refuse a prompt that cannot be drawn; return how many there are."""
        if (prompt is None) == (input_ids is None):
            raise ValueError("give either a prompt or input_ids with attention_mask")
        if prompt is not None:
            if self.processor is None:
                raise ValueError(
                    "this pipeline has no processor: give input_ids and attention_mask, or convert the checkpoint again "
                    "with its tokenizer in the folder"
                )
            return len(as_texts(prompt))
        boi = self.model.generation_config.generation_kwargs["boi_token_id"]
        if input_ids.ndim != 2 or input_ids.is_floating_point() or (input_ids[:, -1] != boi).any():
            raise ValueError(f"input_ids must be token ids [B, P] that end in {boi}, the begin of an image")
        if attention_mask is not None:
            if attention_mask.shape != input_ids.shape:
                raise ValueError(
                    f"attention_mask is {tuple(attention_mask.shape)}: give one of {tuple(input_ids.shape)}, like input_ids"
                )
            if not attention_mask[:, -1].all() or (attention_mask.int().diff() < 0).any():
                raise ValueError("attention_mask must be zeros and then ones: pad on the left")
        return len(input_ids)

    def encode_prompt(self, prompt: list[str]) -> tuple[torch.LongTensor, torch.LongTensor]:
        """Token ids [B, P] and their mask [B, P], padded on the left, of texts in the model's template."""
        tokenizer = self.processor.tokenizer
        texts = []
        for text in prompt:
            turn = {"role": "user", "content": [{"type": "text", "text": text}]}
            asked = self.processor.apply_chat_template([turn], tokenize=False, add_generation_prompt=True)
            texts.append(tokenizer.bos_token + asked + tokenizer.boi_token)
        encoded = tokenizer(
            texts, add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt"
        ).to(self._execution_device)
        return encoded.input_ids, encoded.attention_mask

    @torch.no_grad()
    def bind(
        self,
        prompt: str | list[str] | None = None,
        guidance_scale: float | None = None,
        num_images_per_prompt: int = 1,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> TokenModel:
        """The next-code model of the images that a call with these arguments draws, for `arimage.decoding.decode`."""
        self.check_inputs(prompt, input_ids, attention_mask)
        if prompt is not None:
            input_ids, attention_mask = self.encode_prompt(as_texts(prompt))
        elif attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        ids, mask = (
            tensor.to(self._execution_device).repeat_interleave(num_images_per_prompt, dim=0)
            for tensor in (input_ids, attention_mask)
        )
        guided = self.sampling(guidance_scale=guidance_scale).guidance_scale > 1
        if guided:
            # Without the condition, all words are padding that is seen.
            config = self.model.generation_config
            kept = (ids == config.bos_token_id) | (ids == config.generation_kwargs["boi_token_id"])
            ids = torch.cat([ids, torch.where(kept, ids, config.pad_token_id)])
            mask = mask.repeat(2, 1)
        parts = self.parts
        return LanguageTokenModel(
            parts.language_model,
            embed=self.model.prepare_embeddings_for_image_generation,
            head=parts.generation_head,
            layout=Layout(self.grid),
            input_ids=ids,
            attention_mask=mask,
            codebook=self.code_vectors(),
            groups=1 + guided,
            network=self.model,
        )

    def code_vectors(self) -> torch.Tensor:
        """The unit vectors of all codes, float32 [V, D]."""
        codebook = self.parts.vqmodel.quantize.embedding
        codes = torch.arange(codebook.num_embeddings, device=self._execution_device)
        return F.normalize(codebook(codes).float(), dim=-1).to(self._execution_device)

    def encode_image(self, pixels: torch.Tensor) -> torch.LongTensor:
        """Pictures [B, 3, H, W] in [-1, 1] to the codes [B, h, w] whose vectors have the greatest cosine with theirs. So does
        the original; transformers compares vectors that are not normalised."""
        vq = self.parts.vqmodel
        latents = vq.quant_conv(vq.encoder(pixels.to(vq.dtype))).permute(0, 2, 3, 1)
        latents = F.normalize(latents.float(), dim=-1).to(self._execution_device)
        return nearest_code(latents.flatten(0, 2), self.code_vectors()).view(latents.shape[:-1])

    def draw_codes(self, tokens: torch.LongTensor, decided: torch.BoolTensor) -> torch.Tensor:
        """Pictures [B, 3, H, W], nominally in [-1, 1], of codes [B, N], drafts included, as a callback gets them."""
        codes = tokens.to(self._execution_device).clamp(min=0)
        return self.parts.vqmodel.decode(codes).to(self._execution_device)

    def kept_codes(self, pixels: torch.Tensor, repaint: torch.BoolTensor) -> torch.LongTensor:
        """The codes [B, N] of pictures [B, 3, H, W] in [-1, 1], but -1 where any pixel of a code is in `repaint` [B, 1, H, W]."""
        return codes_to_keep(self.encode_image(pixels), repaint)

    @torch.no_grad()
    def understand(
        self,
        image: Image.Image | list[Image.Image],
        question: str | list[str],
        **generate_kwargs,
    ) -> list[str]:
        """Answer questions about images.

        Args:
            image, question: one of each, or lists of equal length; a single one is asked about, or of, each of the others.
            generate_kwargs: of transformers' `generate`, by default `max_new_tokens=512, do_sample=False`.

        Raises:
            ValueError: if the pipeline has no processor, or the lists are of different length.
        """
        if self.processor is None:
            raise ValueError(
                "this pipeline has no processor: convert the checkpoint again with its tokenizer in the folder"
            )
        images = image if isinstance(image, list) else [image]
        questions = question if isinstance(question, list) else [question]
        count = max(len(images), len(questions))
        if {len(images), len(questions)} - {1, count}:
            raise ValueError(f"{len(images)} images and {len(questions)} questions: give as many, or one for all")
        texts = []
        for text in questions * (count // len(questions)):
            turn = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}
            texts.append(self.processor.apply_chat_template([turn], tokenize=False, add_generation_prompt=True))
        inputs = self.processor(
            text=texts,
            images=images * (count // len(images)),
            padding=True,
            padding_side="left",
            return_tensors="pt",
        ).to(self._execution_device, self.model.dtype)
        ids = self.model.generate(**inputs, **{"max_new_tokens": 512, "do_sample": False, **generate_kwargs})
        self.maybe_free_model_hooks()
        return self.processor.batch_decode(ids[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)

    @torch.no_grad()
    @replace_example_docstring(EXAMPLE_DOC_STRING)
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        image: PipelineImageInput | None = None,
        mask_image: PipelineImageInput | None = None,
        guidance_scale: float | None = None,
        height: int | None = None,
        width: int | None = None,
        num_images_per_prompt: int = 1,
        generator: torch.Generator | list[torch.Generator] | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        guided_tokens: int | None = None,
        decoding: Decoding | str | None = None,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: Callable | None = None,
        callback_on_step_end_tensor_inputs: list[str] = ["tokens"],  # noqa: B006
    ) -> ImagePipelineOutput | tuple:
        r"""
        Draw images.

        Args:
            prompt (`str` or `list[str]`, *optional*):
                What to draw. Prompts of a call may differ in length.
            image (`PIL.Image.Image`, `np.ndarray`, `torch.Tensor` or a list of them, *optional*):
                A picture to change, with `mask_image`: one for all prompts, or one a prompt. It is resized to the size that
                the checkpoint draws.
            mask_image (as `image`, *optional*):
                White where the picture is drawn anew, black where it is kept pixel by pixel. A code is drawn if any of its
                pixels is white. Codes are drawn row by row: what is new fits what is kept above it and to its left in the
                row, and knows nothing of what is kept below it and to its right.
            guidance_scale (`float`, *optional*, defaults to the checkpoint's):
                s in u + s (c - u), with logits c under the prompt and u without it; 1 or less switches it off.
            height (`int`, *optional*), width (`int`, *optional*):
                The size in pixels; only the size that the checkpoint was trained for is accepted.
            num_images_per_prompt (`int`, *optional*, defaults to 1):
                Images of each prompt.
            generator (`torch.Generator` or `list[torch.Generator]`, *optional*):
                Makes the images reproducible: one for the call, or one an image.
            temperature (`float`, *optional*), top_k (`int`, *optional*), top_p (`float`, *optional*):
                Sampling settings, by default the checkpoint's; see `Sampling`. `top_k=1` is greedy decoding.
            guided_tokens (`int`, *optional*):
                Guide the first so many codes of an image only.
            decoding (`Decoding` or `str`, *optional*, defaults to `pipe.decoding`):
                The decoding method of this call.
            input_ids (`torch.LongTensor`, *optional*), attention_mask (`torch.Tensor`, *optional*):
                Token ids [B, P] that begin with the BOS and end with the begin-of-image token, padded on the left, and their
                mask [B, P], in place of `prompt`. Without a mask nothing is padding.
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
        size = self.grid[0] * self.scale_factor
        self.check_call(height, width, size, output_type, callback_on_step_end_tensor_inputs, num_images_per_prompt)
        count = self.check_inputs(prompt, input_ids, attention_mask)
        forced = pixels = repaint = None
        if image is not None or mask_image is not None:
            pixels, repaint = self.prepare_image(image, mask_image, size, count, num_images_per_prompt)
            forced = self.kept_codes(pixels, repaint)
        sampling = self.sampling(
            guidance_scale=guidance_scale,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            guided_tokens=guided_tokens,
            forced=forced,
        )
        seeds = self.draw_seeds(generator, count * num_images_per_prompt)

        # 2. Encode the prompt
        model = self.bind(prompt, guidance_scale, num_images_per_prompt, input_ids, attention_mask)

        # 3. Decode the codes
        state, stats = self.run_decoding(
            model, decoding, sampling, seeds, callback_on_step_end, callback_on_step_end_tensor_inputs
        )

        # 4. Turn codes into images
        tokens = state.tokens.unflatten(1, model.layout.shape)

        def draw() -> torch.Tensor:
            drawn = self.draw_codes(state.tokens, state.decided).float()
            if output_type == "pil":
                # Levels are cut off, as in the original, before they would be rounded.
                drawn = ((drawn.clamp(-1, 1) + 1) / 2 * 255).floor() / 127.5 - 1
            return drawn if pixels is None else torch.where(repaint, drawn, pixels)

        images, stats = self.to_images(tokens, draw, output_type, stats)
        self.maybe_free_model_hooks()
        if not return_dict:
            return (images,)
        return ImagePipelineOutput(images=images, tokens=tokens, stats=stats)
