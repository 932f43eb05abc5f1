"""VAR (https://arxiv.org/abs/2404.02905): images of a class or of a text, from coarse to fine."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from diffusers.image_processor import PipelineImageInput
from diffusers.utils import replace_example_docstring
from transformers import PreTrainedTokenizerBase, T5EncoderModel

from ..decoding import Decoding, NextScaleDecoding, ScaleModel
from ..models.transformer_var import VARScaleModel, VARTransformer
from ..tokenizers.vq_var import VARVQModel
from .class_or_text import ClassOrTextPipeline, check_text_encoder
from .output import ImagePipelineOutput


EXAMPLE_DOC_STRING = """
    Examples:
        ```py
        >>> import torch
        >>> from arimage import AutoPipeline

        >>> pipe = AutoPipeline.from_pretrained("emoji-var")
        >>> image = pipe("a red heart", generator=torch.Generator().manual_seed(0)).images[0]
        ```
"""


class VARPipeline(ClassOrTextPipeline):
    """Images of a class or of a text by VAR, and changes of a given image.

    Args:
        transformer (`VARTransformer`): the next-scale model, conditioned on a class or on text.
        vq (`VARVQModel`): turns its codes into images.
        tokenizer (`PreTrainedTokenizerBase`, *optional*), text_encoder (`T5EncoderModel`, *optional*): for text. Without
            them a text-conditional pipeline takes `prompt_embeds`.
        refiner (`VARTransformer`, *optional*): a smaller one with the same condition and codes, for `CollaborativeDecoding`.

    Raises:
        ValueError: if the parts do not fit together.
    """

    model_cpu_offload_seq = "text_encoder->transformer->refiner->vq"
    _optional_components = ["tokenizer", "text_encoder", "refiner"]
    _draws_no_class = True
    _callback_tensor_inputs = ["tokens", "decided", "latents"]

    def __init__(
        self,
        transformer: VARTransformer,
        vq: VARVQModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        text_encoder: T5EncoderModel | None = None,
        refiner: VARTransformer | None = None,
    ):
        super().__init__()
        for name, network in (("transformer", transformer), ("refiner", refiner)):
            if network is None:
                continue
            config = network.config
            theirs = (config.vocab_size, config.codebook_dim, tuple(config.scales))
            ours = (vq.config.codebook_size, vq.config.codebook_dim, tuple(vq.config.scales))
            if theirs != ours:
                raise ValueError(
                    f"the {name} draws codes, their width and scales {theirs}, the image tokenizer reads {ours}: load the "
                    "two that were trained together"
                )
            check_text_encoder(text_encoder, network)
        names = ("conditioning", "num_classes", "caption_dim", "num_condition_tokens")
        if refiner is not None and any(transformer.config[name] != refiner.config[name] for name in names):
            raise ValueError(
                "the refiner has another condition than the transformer: load one of the same classes or text"
            )
        self.register_modules(
            transformer=transformer, vq=vq, tokenizer=tokenizer, text_encoder=text_encoder, refiner=refiner
        )
        self.decoding = NextScaleDecoding()

    @torch.no_grad()
    def bind(
        self,
        prompt: str | list[str] | None = None,
        class_labels: int | list[int] | torch.LongTensor | None = None,
        guidance_scale: float | None = None,
        num_images_per_prompt: int = 1,
        prompt_embeds: torch.Tensor | None = None,
        prompt_attention_mask: torch.Tensor | None = None,
    ) -> ScaleModel:
        """The next-scale model of the images that a call with these arguments draws, for `arimage.decoding.decode`."""
        condition = self.condition(prompt, class_labels, num_images_per_prompt, prompt_embeds, prompt_attention_mask)
        guided = self.sampling(guidance_scale=guidance_scale).guidance_scale > 1
        refiner = None if self.refiner is None else VARScaleModel(self.refiner, self.vq, condition, guided=guided)
        return VARScaleModel(self.transformer, self.vq, condition, guided=guided, refiner=refiner)

    def token_maps(self, tokens: torch.LongTensor) -> list[torch.LongTensor]:
        """Codes [B, N] of all scales as one map [B, p, p] a scale."""
        scales = self.vq.config.scales
        parts = tokens.split([size * size for size in scales], dim=1)
        return [part.unflatten(1, (size, size)) for part, size in zip(parts, scales, strict=True)]

    def kept_codes(self, pixels: torch.Tensor, repaint: torch.BoolTensor) -> torch.LongTensor:
        """The codes [B, N] of pictures [B, 3, H, W] in [-1, 1], but -1 where they are to be drawn anew because of `repaint`
        [B, 1, H, W], as the original does it: see `mask_image`."""
        # A cell of the finest scale is drawn if any of its pixels is.
        kept = 1 - F.max_pool2d(repaint.float(), self.vq.scale_factor)
        codes = []
        for code in self.vq.encode(pixels.to(self.vq.dtype)):
            side = code.shape[-1]
            keep = F.interpolate(kept, size=(side, side), mode="bilinear")[:, 0] > 0.5
            codes.append(code if side == 1 else torch.where(keep, code, -1))
        return torch.cat([code.flatten(1) for code in codes], dim=1)

    def draw_codes(self, tokens: torch.LongTensor, decided: torch.BoolTensor) -> torch.Tensor:
        """Pictures [B, 3, H, W], nominally in [-1, 1], of the scales of codes [B, N] that are `decided` [B, N], as a callback
        gets them."""
        decided_scales = [bool(part.all()) for part in self.token_maps(decided)].count(True)
        return self.vq.decode(self.token_maps(tokens.to(self._execution_device))[:decided_scales])

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
                The classes to draw, for class-conditional checkpoints; an id equal to the number of classes stands for no
                class in particular.
            image (`PIL.Image.Image`, `np.ndarray`, `torch.Tensor` or a list of them, *optional*):
                A picture to change, with `mask_image`: one for all prompts, or one a prompt. It is resized to the size that
                the checkpoint draws.
            mask_image (as `image`, *optional*):
                White where the picture is drawn anew, black where it is kept pixel by pixel. A code of the finest scale is
                drawn if any of its pixels is white, one of a coarser scale if most of it is, and the coarsest, a single
                code, never: what is new sees what is kept on all sides of it.
            guidance_scale (`float`, *optional*, defaults to the checkpoint's):
                s in u + s (c - u), with logits c under the condition and u without it, reached at the last scale and
                ramped up to from 1 at the first; 1 or less switches it off. The published cfg is s - 1.
            height (`int`, *optional*), width (`int`, *optional*):
                The size in pixels; only the size that the checkpoint was trained for is accepted.
            num_images_per_prompt (`int`, *optional*, defaults to 1):
                Images of each prompt or class.
            generator (`torch.Generator` or `list[torch.Generator]`, *optional*):
                Makes the images reproducible: one for the call, or one an image.
            temperature (`float`, *optional*), top_k (`int`, *optional*), top_p (`float`, *optional*):
                Sampling settings, by default the checkpoint's; see `Sampling`. `top_k=1` is greedy decoding.
            decoding (`Decoding` or `str`, *optional*, defaults to `pipe.decoding`):
                `NextScaleDecoding` or `CollaborativeDecoding`, or their names.
            prompt_embeds (`torch.Tensor`, *optional*), prompt_attention_mask (`torch.Tensor`, *optional*):
                The text encoder's output [B, P, D], padded on the right, and its mask [B, P], in place of `prompt`.
            output_type (`str`, *optional*, defaults to `"pil"`):
                `"pil"`, `"np"`, `"pt"`, or `"latent"` for the codes, a list of [B, p, p], one a scale.
            return_dict (`bool`, *optional*, defaults to `True`):
                Return an `ImagePipelineOutput` instead of a tuple.
            callback_on_step_end (`Callable`, *optional*):
                Called after every scale as `callback(pipe, step, passes, tensors)`; what it returns is ignored. Set
                `pipe._interrupt = True` in it to stop; the picture is then that of the scales drawn.
            callback_on_step_end_tensor_inputs (`list[str]`, *optional*, defaults to `["tokens"]`):
                What `tensors` holds: `"tokens"` [B, N] of all scales, `"decided"` [B, N], and `"latents"` [B, C, P, P],
                what the image tokenizer draws the picture from.

        Examples:

        Returns:
            [`ImagePipelineOutput`] or `tuple`: the output, or the tuple `(images,)`.
        """
        # 1. Check inputs
        trained_size = self.vq.config.scales[-1] * self.vq.scale_factor
        self.check_call(
            height, width, trained_size, output_type, callback_on_step_end_tensor_inputs, num_images_per_prompt
        )
        count = self.check_inputs(prompt, class_labels, prompt_embeds, prompt_attention_mask)
        forced = pixels = repaint = None
        if image is not None or mask_image is not None:
            pixels, repaint = self.prepare_image(image, mask_image, trained_size, count, num_images_per_prompt)
            forced = self.kept_codes(pixels, repaint)
        sampling = self.sampling(
            guidance_scale=guidance_scale, temperature=temperature, top_k=top_k, top_p=top_p, forced=forced
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
        tokens = self.token_maps(state.tokens)

        def draw() -> torch.Tensor:
            drawn = self.vq.decode_latents(state.latents)
            return drawn if pixels is None else torch.where(repaint, drawn, pixels)

        images, stats = self.to_images(tokens, draw, output_type, stats)
        self.maybe_free_model_hooks()
        if not return_dict:
            return (images,)
        return ImagePipelineOutput(images=images, tokens=tokens, stats=stats)
