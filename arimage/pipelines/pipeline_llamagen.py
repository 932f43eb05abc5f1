"""LlamaGen (https://arxiv.org/abs/2406.06525): images from a class or from text."""

from collections.abc import Callable

import torch
from diffusers.pipelines.pixart_alpha.pipeline_pixart_alpha import PixArtAlphaPipeline
from diffusers.utils import logging, replace_example_docstring
from transformers import PreTrainedTokenizerBase, T5EncoderModel

from ..decoding import Decoding, TokenModel
from ..models.drafter_llamagen import LlamaGenDrafter
from ..models.transformer_llamagen import LlamaGenTransformer
from ..tokenizers.vq_llamagen import LlamaGenVQModel
from .base import ARImagePipeline
from .output import ImagePipelineOutput


logger = logging.get_logger(__name__)

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


class LlamaGenPipeline(ARImagePipeline):
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

    bad_punct_regex = PixArtAlphaPipeline.bad_punct_regex
    _clean_caption = PixArtAlphaPipeline._clean_caption
    _text_preprocessing = PixArtAlphaPipeline._text_preprocessing

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
        if text_encoder is not None and text_encoder.config.d_model != transformer.config.caption_dim:
            raise ValueError(
                f"the text encoder is {text_encoder.config.d_model} wide, the transformer expects "
                f"{transformer.config.caption_dim}: load the encoder that it was trained with"
            )
        if drafter is not None and drafter.config.hidden_size != transformer.config.hidden_size:
            raise ValueError(
                f"the drafter is {drafter.config.hidden_size} wide, the transformer {transformer.config.hidden_size}: "
                "load the drafter that was trained with it"
            )
        self.register_modules(
            transformer=transformer, vq=vq, tokenizer=tokenizer, text_encoder=text_encoder, drafter=drafter
        )

    def encode_prompt(self, prompt: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Right-padded text embeddings [B, P, D] and their mask [B, P], from captions cleaned as in the original."""
        length = self.transformer.config.num_condition_tokens
        cleaned = self._text_preprocessing(prompt, clean_caption=True)
        text = self.tokenizer(
            cleaned, max_length=length, padding="max_length", truncation=True, return_tensors="pt"
        ).to(self._execution_device)
        longest = max(len(ids) for ids in self.tokenizer(cleaned).input_ids)
        if longest > length:
            logger.warning(f"the prompt has {longest} tokens and was cut to the {length} that this model reads")
        embeds = self.text_encoder(text.input_ids, attention_mask=text.attention_mask).last_hidden_state
        return embeds, text.attention_mask

    def check_inputs(self, prompt, class_labels, prompt_embeds, prompt_attention_mask) -> int:
        """Refuse a condition that the checkpoint cannot draw; return how many prompts or classes there are."""
        config = self.transformer.config
        if config.conditioning == "class":
            if class_labels is None or prompt is not None or prompt_embeds is not None:
                raise ValueError(
                    f"this checkpoint draws classes: give class_labels, ids from 0 to {config.num_classes - 1}, and no prompt"
                )
            labels = torch.as_tensor(class_labels).flatten()
            if (
                len(labels) == 0
                or labels.is_floating_point()
                or labels.min() < 0
                or labels.max() >= config.num_classes
            ):
                raise ValueError(
                    f"class_labels are {class_labels}: give one or more ids from 0 to {config.num_classes - 1}"
                )
            return len(labels)
        if class_labels is not None:
            raise ValueError("this checkpoint draws from text: give a prompt instead of class_labels")
        if (prompt is None) == (prompt_embeds is None):
            raise ValueError("give either a prompt or prompt_embeds with prompt_attention_mask")
        if prompt is not None:
            if self.text_encoder is None or self.tokenizer is None:
                raise ValueError(
                    "this pipeline has no text encoder: give prompt_embeds and prompt_attention_mask, or convert the "
                    "checkpoint again with --text-encoder"
                )
            texts = [prompt] if isinstance(prompt, str) else prompt
            if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
                raise ValueError(f"prompt is {prompt!r}: give a string or a list of strings")
            return len(texts)
        expected = (config.num_condition_tokens, config.caption_dim)
        if prompt_embeds.ndim != 3 or prompt_embeds.shape[1:] != expected:
            raise ValueError(
                f"prompt_embeds are {tuple(prompt_embeds.shape)}: this model expects [B, {expected[0]}, {expected[1]}]"
            )
        if prompt_attention_mask is None or prompt_attention_mask.shape != prompt_embeds.shape[:2]:
            raise ValueError(f"prompt_attention_mask must be [B, {expected[0]}], like prompt_embeds")
        if not prompt_attention_mask[:, 0].all() or (prompt_attention_mask.int().diff() > 0).any():
            raise ValueError(
                "prompt_attention_mask must be ones, at least one a row, and then zeros: pad on the right"
            )
        return len(prompt_embeds)

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
        self.check_inputs(prompt, class_labels, prompt_embeds, prompt_attention_mask)
        config, device = self.transformer.config, self._execution_device
        if config.conditioning == "class":
            condition = {"class_labels": torch.as_tensor(class_labels, device=device).flatten()}
        else:
            if prompt_embeds is None:
                prompt_embeds, prompt_attention_mask = self.encode_prompt(
                    [prompt] if isinstance(prompt, str) else prompt
                )
            embeds, mask = left_pad(prompt_embeds.to(device), prompt_attention_mask.to(device))
            condition = {"prompt_embeds": embeds, "prompt_attention_mask": mask}
        condition = {name: value.repeat_interleave(num_images_per_prompt, dim=0) for name, value in condition.items()}
        guided = self.sampling(guidance_scale=guidance_scale).guidance_scale > 1
        grid = (config.grid_size, config.grid_size)
        return self.transformer.bind(
            grid, guided=guided, codebook=self.vq.code_vectors(), drafter=self.drafter, **condition
        )

    @torch.no_grad()
    @replace_example_docstring(EXAMPLE_DOC_STRING)
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        class_labels: int | list[int] | torch.LongTensor | None = None,
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
        sampling = self.sampling(
            guidance_scale=guidance_scale,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            guided_tokens=guided_tokens,
        )
        seeds = self.draw_seeds(generator, count * num_images_per_prompt)

        # 2. Encode the condition
        model = self.bind(
            prompt, class_labels, guidance_scale, num_images_per_prompt, prompt_embeds, prompt_attention_mask
        )

        # 3. Decode the codes
        tokens, stats = self.run_decoding(
            model, decoding, sampling, seeds, callback_on_step_end, callback_on_step_end_tensor_inputs
        )

        # 4. Turn codes into images
        images, stats = self.to_images(tokens, self.vq.decode, output_type, stats)
        self.maybe_free_model_hooks()
        if not return_dict:
            return (images,)
        return ImagePipelineOutput(images=images, tokens=tokens, stats=stats)
