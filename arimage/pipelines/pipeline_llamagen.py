"""LlamaGen (https://arxiv.org/abs/2406.06525): images from a class or from text."""

from collections.abc import Callable

import torch
from diffusers.image_processor import PipelineImageInput
from diffusers.utils import replace_example_docstring
from transformers import PreTrainedTokenizerBase, T5EncoderModel

from ..decoding import Decoding, Layout, TokenModel
from ..models.drafter_llamagen import LlamaGenDrafter
from ..models.transformer_llamagen import LlamaGenTokenModel, LlamaGenTransformer
from ..tokenizers.vq_llamagen import LlamaGenVQModel
from .base import codes_to_keep
from .class_or_text import ClassOrTextPipeline, check_text_encoder
from .output import ImagePipelineOutput


EXAMPLE_DOC_STRING = """
    Examples:
        ```py
        >>> import torch
        >>> from arimage import AutoPipeline

        >>> pipe = AutoPipeline.from_pretrained("emoji-llamagen")
        >>> image = pipe("a red heart", generator=torch.Generator().manual_seed(0)).images[0]
        ```
"""


def left_pad(
    prompt_embeds: torch.Tensor, prompt_attention_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.BoolTensor]:
    """Rotate right-padded embeddings [B, P, D] so that the tokens of mask [B, P] come last; the padding becomes zero."""
    length = prompt_embeds.shape[1]
    count = prompt_attention_mask.sum(1, keepdim=True)
    index = (torch.arange(length, device=prompt_embeds.device) + count) % length
    mask = prompt_attention_mask.flip(-1).bool()
    return prompt_embeds.gather(1, index[..., None].expand_as(prompt_embeds)) * mask[..., None], mask


class LlamaGenPipeline(ClassOrTextPipeline):
    """Images of a class or of a text by LlamaGen.

    Args:
        transformer (`LlamaGenTransformer`): the next-code model, conditioned on a class or on text.
        vq (`LlamaGenVQModel`): turns its codes into images.
        tokenizer (`PreTrainedTokenizerBase`, *optional*), text_encoder (`T5EncoderModel`, *optional*): for text. Without
            them a text-conditional pipeline takes `prompt_embeds`.
        drafter (`LlamaGenDrafter`, *optional*): trained with this transformer, for `DraftTreeDecoding`.

    Raises:
        ValueError: if the parts do not fit together.
    """

    model_cpu_offload_seq = "text_encoder->transformer->vq"
    _optional_components = ["tokenizer", "text_encoder", "drafter"]
    # It runs between passes of the transformer, whose embedding and head it uses.
    _exclude_from_cpu_offload = ["drafter"]

    def __init__(
        self,
        transformer: LlamaGenTransformer,
        vq: LlamaGenVQModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        text_encoder: T5EncoderModel | None = None,
        drafter: LlamaGenDrafter | None = None,
    ):
        super().__init__()
        if transformer.config.vocab_size != vq.config.codebook_size:
            raise ValueError(
                f"the transformer has {transformer.config.vocab_size} codes, the image tokenizer {vq.config.codebook_size}: "
                "load the two that were trained together"
            )
        check_text_encoder(text_encoder, transformer)
        if drafter is not None and drafter.config.hidden_size != transformer.config.hidden_size:
            raise ValueError(
                f"the drafter is {drafter.config.hidden_size} wide, the transformer {transformer.config.hidden_size}: "
                "load the drafter that was trained with it"
            )
        self.register_modules(
            transformer=transformer, vq=vq, tokenizer=tokenizer, text_encoder=text_encoder, drafter=drafter
        )

    @torch.no_grad()
    def bind(
        self,
        prompt: str | list[str] | None = None,
        class_labels: int | list[int] | torch.LongTensor | None = None,
        guidance_scale: float | None = None,
        num_images_per_prompt: int = 1,
        prompt_embeds: torch.Tensor | None = None,
        prompt_attention_mask: torch.Tensor | None = None,
    ) -> TokenModel:
        """The next-code model of the images that a call with these arguments draws, for `arimage.decoding.decode`."""
        condition = self.condition(prompt, class_labels, num_images_per_prompt, prompt_embeds, prompt_attention_mask)
        if "prompt_embeds" in condition:
            embeds, mask = left_pad(condition["prompt_embeds"], condition["prompt_attention_mask"])
            condition = {"prompt_embeds": embeds, "prompt_attention_mask": mask}
        guided = self.sampling(guidance_scale=guidance_scale).guidance_scale > 1
        size = self.transformer.config.grid_size
        return LlamaGenTokenModel(
            self.transformer,
            condition,
            Layout((size, size)),
            guided=guided,
            codebook=self.vq.code_vectors(),
            drafter=self.drafter,
        )

    def draw_codes(self, tokens: torch.LongTensor, decided: torch.BoolTensor) -> torch.Tensor:
        """Pictures [B, 3, H, W], nominally in [-1, 1], of codes [B, N], drafts included, as a callback gets them."""
        size = self.transformer.config.grid_size
        tokens = tokens.to(self._execution_device).clamp(min=0)
        return self.vq.decode(tokens.unflatten(1, (size, size)))

    def kept_codes(self, pixels: torch.Tensor, repaint: torch.BoolTensor) -> torch.LongTensor:
        """The codes [B, N] of pictures [B, 3, H, W] in [-1, 1], but -1 where any pixel of a code is in `repaint` [B, 1, H, W]."""
        return codes_to_keep(self.vq.encode(pixels.to(self.vq.dtype)), repaint)

    @torch.no_grad()
    @replace_example_docstring(EXAMPLE_DOC_STRING)
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        class_labels: int | list[int] | torch.LongTensor | None = None,
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
        prompt_embeds: torch.Tensor | None = None,
        prompt_attention_mask: torch.Tensor | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: Callable | None = None,
        callback_on_step_end_tensor_inputs: list[str] = ["tokens"],  # noqa: B006
    ) -> ImagePipelineOutput | tuple:
        r"""
        Draw images.

        Args:
            prompt (`str` or `list[str]`, *optional*):
                What to draw, for text-conditional checkpoints.
            class_labels (`int`, `list[int]` or `torch.LongTensor`, *optional*):
                The classes to draw, for class-conditional checkpoints.
            image (`PIL.Image.Image`, `np.ndarray`, `torch.Tensor` or a list of them, *optional*):
                A picture to change, with `mask_image`: one for all prompts, or one a prompt. It is resized to the size that
                the checkpoint draws.
            mask_image (as `image`, *optional*):
                White where the picture is drawn anew, black where it is kept pixel by pixel. A code is drawn if any of its
                pixels is white. Codes are drawn row by row: what is new fits what is kept above it and to its left in the
                row, and knows nothing of what is kept below it and to its right.
            guidance_scale (`float`, *optional*, defaults to the checkpoint's):
                s in u + s (c - u), with logits c under the condition and u without it; 1 or less switches it off.
            height (`int`, *optional*), width (`int`, *optional*):
                The size in pixels; only the size that the checkpoint was trained for is accepted.
            num_images_per_prompt (`int`, *optional*, defaults to 1):
                Images of each prompt or class.
            generator (`torch.Generator` or `list[torch.Generator]`, *optional*):
                Makes the images reproducible: one for the call, or one an image.
            temperature (`float`, *optional*), top_k (`int`, *optional*), top_p (`float`, *optional*):
                Sampling settings, by default the checkpoint's; see `Sampling`. `top_k=1` is greedy decoding.
            guided_tokens (`int`, *optional*):
                Guide the first so many codes of an image only.
            decoding (`Decoding` or `str`, *optional*, defaults to `pipe.decoding`):
                The decoding method of this call.
            prompt_embeds (`torch.Tensor`, *optional*), prompt_attention_mask (`torch.Tensor`, *optional*):
                The text encoder's output [B, P, D], padded on the right, and its mask [B, P], in place of `prompt`.
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
        trained_size = self.transformer.config.grid_size * self.vq.scale_factor
        self.check_call(
            height, width, trained_size, output_type, callback_on_step_end_tensor_inputs, num_images_per_prompt
        )
        count = self.check_inputs(prompt, class_labels, prompt_embeds, prompt_attention_mask)
        forced = pixels = repaint = None
        if image is not None or mask_image is not None:
            pixels, repaint = self.prepare_image(image, mask_image, trained_size, count, num_images_per_prompt)
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

        # 2. Encode the condition
        model = self.bind(
            prompt, class_labels, guidance_scale, num_images_per_prompt, prompt_embeds, prompt_attention_mask
        )

        # 3. Decode the codes
        state, stats = self.run_decoding(
            model, decoding, sampling, seeds, callback_on_step_end, callback_on_step_end_tensor_inputs
        )

        # 4. Turn codes into images
        tokens = state.tokens.unflatten(1, model.layout.shape)

        def draw() -> torch.Tensor:
            drawn = self.vq.decode(tokens)
            return drawn if pixels is None else torch.where(repaint, drawn, pixels)

        images, stats = self.to_images(tokens, draw, output_type, stats)
        self.maybe_free_model_hooks()
        if not return_dict:
            return (images,)
        return ImagePipelineOutput(images=images, tokens=tokens, stats=stats)
