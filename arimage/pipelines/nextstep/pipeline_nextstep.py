"""NextStep (https://arxiv.org/abs/2508.10711): images from a text, or from a text and a
reference image, with a language model of continuous tokens."""

import math
import numbers
from dataclasses import replace
from typing import Any, Unpack, get_args

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from diffusers.image_processor import VaeImageProcessor
from PIL import Image
from transformers import PreTrainedTokenizerBase, Qwen2Model

from ...decoding import AutoregressiveDecoding, LatentSampling, Layout
from ...decoding.contract.supports import Traits
from ...models.denoising_head import DenoisingHead
from ...tokenizers.tiling import Tiling, check_encoded
from ..abilities import LATENT_SAMPLING, Abilities
from ..arguments import LatentArguments, pipeline_call
from ..base import ARImagePipeline
from ..call import GenerationCall
from ..components import check_parts
from ..output import ImagePipelineOutput
from ..pictures.references import References, as_references, common_size, each_once
from ..text.checks import MAX_PROMPT_CHARACTERS, as_text, as_texts, check_sides
from ..text.token_prompts import Ids, check_negatives, stack
from .family import FAMILY
from .flow import STEPS, Sampler
from .latent_model import NORM_EPS, NextStepModel, normalised
from .projector import NextStepProjector
from .prompts import NextStepPrompts, shrink


EXAMPLE = """
# downloaded and converted once; `arimage models` says how large it is
pipe = AutoPipeline.from_pretrained("nextstep-1.1", dtype=torch.bfloat16).to("cuda")
image = pipe("a shiba inu in the snow", decoding="sjd-coupled").images[0]
"""


class NextStepPipeline(ARImagePipeline):
    """Generates images from a text, or from a text and a reference image, with NextStep-1.1 or NextStep-1.

    Args:
        model (`Qwen2Model`): the language model.
        projector (`NextStepProjector`): between tokens and the language model.
        denoising_head (`DenoisingHead`): denoises a token, given its condition from the language model.
        vae (`AutoencoderKL`): decodes tokens to images.
        tokenizer (`PreTrainedTokenizerBase`): the text tokenizer.
        drafter (`Qwen2Model`, *optional*), drafter_projector (`NextStepProjector`, *optional*), drafter_head
            (`DenoisingHead`, *optional*): a smaller language model of the same texts and tokens, with its projector
            and head, for `PathSpeculativeDecoding`. All three or none.
        patch_size (`int`): latent pixels along each side of a token.
        image_size (`int`): side in pixels of the square images that the weights were trained for.
        normalises_tokens (`bool`): whether tokens are normalised before they are fed and decoded, as in NextStep-1.
        repeats_bos (`bool`): see `NextStepPrompts`.
        reference_norm_size (`int`, *optional*): side of the patches of latents over which those of reference images
            are normalised; `None` if they are not.

    Attributes:
        sampler: the default sampler of calls, see `flow_steps`.
        timesteps_shift: the default shift of the times of the denoising steps.
        image_guidance_scale: the default guidance by reference images.
    """

    family = FAMILY
    abilities = Abilities(
        "causal_latents", LATENT_SAMPLING | {"image", "negative_prompt", "prompt_suffix"}, max_references=1
    )
    model_cpu_offload_seq = "model->vae"
    # They run between forward passes of the model.
    _exclude_from_cpu_offload = ["projector", "denoising_head", "drafter", "drafter_projector", "drafter_head"]
    _optional_components = ["drafter", "drafter_projector", "drafter_head"]
    _lora_loadable_modules = ["model"]
    _saved_defaults = ("sampler", "timesteps_shift", "image_guidance_scale")

    def __init__(
        self,
        model: Qwen2Model,
        projector: NextStepProjector,
        denoising_head: DenoisingHead,
        vae: AutoencoderKL,
        tokenizer: PreTrainedTokenizerBase,
        drafter: Qwen2Model | None = None,
        drafter_projector: NextStepProjector | None = None,
        drafter_head: DenoisingHead | None = None,
        patch_size: int = 2,
        image_size: int = 512,
        normalises_tokens: bool = False,
        repeats_bos: bool = True,
        reference_norm_size: int | None = 1,
    ):
        super().__init__()
        dim = _check_model(model, projector, denoising_head)
        drafting = drafter, drafter_projector, drafter_head
        if any(part is not None for part in drafting):
            if drafter is None or drafter_projector is None or drafter_head is None:
                raise ValueError(
                    "drafter, drafter_projector and drafter_head belong together: give all three, or none"
                )
            check_parts("channels per token", projector=dim, drafter=_check_model(*drafting))
            check_parts("tokens of the vocabulary", model=model.config.vocab_size, drafter=drafter.config.vocab_size)
        if vae is not None:
            check_parts("channels per token", projector=dim, vae=vae.config["latent_channels"] * patch_size**2)
        self.register_modules(
            model=model,
            projector=projector,
            denoising_head=denoising_head,
            vae=vae,
            tokenizer=tokenizer,
            drafter=drafter,
            drafter_projector=drafter_projector,
            drafter_head=drafter_head,
        )
        self.register_to_config(
            patch_size=patch_size,
            image_size=image_size,
            normalises_tokens=normalises_tokens,
            repeats_bos=repeats_bos,
            reference_norm_size=reference_norm_size,
        )
        self._tiling = None if vae is None else Tiling(self.vae_scale_factor)
        self.sampler: Sampler = "em"
        self.timesteps_shift = 1.0
        self.image_guidance_scale = 1.0
        self.generation_config = {
            "guidance_scale": 7.5,
            "temperature": 1.0,
            "guidance_schedule": "constant",
            "num_diffusion_steps": STEPS["em"],
        }
        self.decoding = AutoregressiveDecoding()

    @property
    def vae_scale_factor(self) -> int:
        """Pixels per latent along each side."""
        return 2 ** (len(self.vae.config["block_out_channels"]) - 1)

    @property
    def token_size(self) -> int:
        """Pixels per token along each side."""
        return self.vae_scale_factor * self.config.patch_size

    @property
    def image_sizes(self) -> list[tuple[int, int]]:
        return [(self.config.image_size,) * 2]

    @property
    def traits(self) -> Traits:
        return replace(super().traits, noisy=self.sampler != "em-1.0")

    def check_size(self, height: int | None, width: int | None) -> tuple[int, int]:
        """Height and width of the images of a call: any multiples of `token_size`."""
        own = self.config.image_size
        return check_sides((own if height is None else height, own if width is None else width), self.token_size)

    def sampling(self, **settings) -> LatentSampling:
        given = {name: value for name, value in settings.items() if value is not None}
        sampling = LatentSampling(**{**self.generation_config, **given})
        if not isinstance(sampling.num_diffusion_steps, int):
            raise ValueError(f"num_diffusion_steps is {sampling.num_diffusion_steps}: give one number")
        return sampling

    # Between tokens and images

    @torch.no_grad()
    def encode_image(self, pixels: torch.Tensor) -> torch.FloatTensor:
        """The tokens [B, N, D] of images [B, 3, H, W] in [-1, 1], as the language model reads them."""
        vae, patch, side = self.on_device(self.vae), self.config.patch_size, self.config.reference_norm_size
        latents = check_encoded(vae.encode(pixels.to(vae.device, vae.dtype)).latent_dist.mode())
        if side is not None:
            patches = F.unfold(latents, side, stride=side).transpose(1, 2)
            patches = F.layer_norm(patches, patches.shape[-1:], eps=NORM_EPS).transpose(1, 2)
            latents = F.fold(patches, latents.shape[2:], kernel_size=side, stride=side)
        latents = (latents - (self.vae.config["shift_factor"] or 0)) * self.vae.config["scaling_factor"]
        return F.unfold(latents, patch, stride=patch).transpose(1, 2)

    def to_latents(self, call: GenerationCall, tokens: torch.Tensor) -> torch.Tensor:
        """Convert tokens [B, N, D] of a call to the latents [B, C, h, w] that the autoencoder decodes."""
        patch = self.config.patch_size
        tokens = normalised(tokens) if self.config.normalises_tokens else tokens
        sides = tuple(side // self.vae_scale_factor for side in call.size)
        latents = F.fold(tokens.transpose(1, 2), sides, kernel_size=patch, stride=patch)
        return latents / self.vae.config["scaling_factor"] + (self.vae.config["shift_factor"] or 0)

    def whole_tokens(self, call: GenerationCall, tokens: torch.Tensor) -> torch.Tensor:
        return self.to_latents(call, tokens)

    @torch.no_grad()
    def decode_tokens(self, call: GenerationCall, tokens: torch.FloatTensor) -> torch.Tensor:
        """Pixels [B, 3, H, W], nominally in [-1, 1], of the tokens [B, N, D] of a call, zeros where they are not known
        yet."""
        vae = self.on_device(self.vae)
        latents = self.to_latents(call, tokens.to(self._execution_device)).to(vae.dtype)
        pixels = self.tiling.in_tiles(lambda part: vae.decode(part).sample, latents, 1, self.vae_scale_factor)
        if self.current_call is not None:
            # The next forward pass needs it.
            self.on_device(self.model)
        return pixels

    def _references(self, image: References, count: int) -> list[Image.Image]:
        """The reference image of each of `count` prompts, in a size that the model reads."""
        listed = [one for (one,) in as_references("image", image, count, self.abilities.max_references)]
        [resized] = each_once(lambda one: shrink("image", one, self.config.image_size, self.token_size), [listed])
        return resized

    def _tokens_of(self, references: list[Image.Image]) -> list[torch.FloatTensor]:
        """The tokens [N, D] of each reference image."""

        def encode(image: Image.Image) -> torch.FloatTensor:
            pixels = VaeImageProcessor(do_resize=False).preprocess(image)
            return self.encode_image(pixels.to(self._execution_device))[0]

        [tokens] = each_once(encode, [references])
        return tokens

    def _model(
        self, branches: list[Ids], read: list[torch.FloatTensor], placeholder: int, **settings
    ) -> NextStepModel:
        """The model of the prompts `branches`, with the tokens `read` of reference images, row by row, where the id is
        `placeholder`."""
        rows, masks = stack(branches, self.tokenizer.pad_token_id or 0, self._execution_device)
        settings |= {
            "normalises": self.config.normalises_tokens,
            "attention_mask": masks,
            "branches": len(branches),
        }

        def bound(model: Any, projector: Any, head: Any, **drafter) -> NextStepModel:
            prompts = {"input_ids": rows}
            if read:
                embedded = model.get_input_embeddings()(rows)
                embedded[rows == placeholder] = projector(torch.cat(read)).to(embedded)
                prompts = {"inputs_embeds": embedded}
            return NextStepModel(model, projector=projector, denoising_head=head, **prompts, **drafter, **settings)

        drafter = None
        if self.drafter is not None:
            drafter = bound(self.drafter, self.drafter_projector, self.drafter_head)
        return bound(self.on_device(self.model), self.projector, self.denoising_head, drafter=drafter)

    def _grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of tokens of an image of `size` (height, width)."""
        return size[0] // self.token_size, size[1] // self.token_size

    @pipeline_call(EXAMPLE, ImagePipelineOutput)
    def __call__(
        self,
        prompt: str | list[str],
        negative_prompt: str | list[str] | None = None,
        *,
        image: References | None = None,
        prompt_suffix: str | None = None,
        sampler: Sampler | None = None,
        timesteps_shift: float | None = None,
        num_diffusion_steps: int | None = None,
        image_guidance_scale: float | None = None,
        **common: Unpack[LatentArguments],
    ) -> GenerationCall:
        r"""
        Generate images, or edit given ones.

        Args:
            prompt (`str` or `list[str]`):
                What to generate, or how to change a reference image. `<image>` is where the model reads the image, by
                default before the prompt.
            negative_prompt (`str` or `list[str]`, *optional*):
                What to avoid in the images: one for all prompts, or one per prompt.
            image (`PIL.Image.Image`, `np.ndarray`, `torch.Tensor`, a list of them or a list of lists, *optional*):
                A reference image that the model reads together with the prompt: one for all prompts, or one per
                prompt. If it is larger than the images that the weights were trained for, or its sides are not
                multiples of `pipe.token_size`, it is resized. Without `height` and `width`, images have its size.
            prompt_suffix (`str`, *optional*):
                Appended to each prompt after a space, but not to negative prompts. The authors recommend
                "masterpiece, film grained, best quality." for NextStep-1.
            sampler (`str`, *optional*, defaults to the checkpoint's):
                The denoising steps of a token: `"em"`, as the authors' files on the Hub, `"sde"`, as their repository,
                which adds less noise, or for NextStep-1 `"em-1.0"`, whose last step adds none.
            timesteps_shift (`float`, *optional*, defaults to the checkpoint's):
                Moves the times of the denoising steps towards the noise; 1 does not.
            num_diffusion_steps (`int`, *optional*, defaults to the checkpoint's):
                Denoising steps per token; with another sampler than the checkpoint's those of its authors.
            guidance_scale (`float`, *optional*, defaults to the checkpoint's):
                s in u + s (c - u), with the head's predictions c with the prompt and u with the negative prompt. 1 or
                less disables guidance.
            image_guidance_scale (`float`, *optional*, defaults to the checkpoint's):
                s' in u + s' (r - u) + s (c - r), with the predictions r with the reference image and the negative
                prompt, and u with the negative prompt alone: a third row per image. 1 or less leaves it out, and so
                does a `guidance_scale` of 1 or less.
            guidance_schedule (`str`, *optional*, defaults to `"constant"`):
                `"linear"` is the authors': guidance falls to 1 along the image or, with `"sde"`, grows, from half of
                it on. It takes no image guidance.
            temperature (`float`, *optional*, defaults to the checkpoint's):
                Factor on the noise of the denoising steps.
            {call}
        """
        texts = as_texts(prompt, "prompt", MAX_PROMPT_CHARACTERS)
        negatives = "" if negative_prompt is None else negative_prompt
        negatives = as_texts(negatives, "negative_prompt", MAX_PROMPT_CHARACTERS)
        check_negatives("negative_prompt", len(negatives), len(texts))
        negatives *= len(texts) // len(negatives)
        if prompt_suffix is not None and as_text(prompt_suffix, "prompt_suffix"):
            texts = [f"{text} {prompt_suffix}" for text in texts]
        chosen = self.sampler if sampler is None else sampler
        shift = self.timesteps_shift if timesteps_shift is None else timesteps_shift
        image_scale = self.image_guidance_scale if image_guidance_scale is None else image_guidance_scale
        _check_steps(chosen, shift)
        if not _is_finite(image_scale):
            raise ValueError(f"image_guidance_scale is {image_scale!r}: give a number")
        if image is None and image_guidance_scale is not None:
            raise ValueError("image_guidance_scale is for calls with an image: leave it out, or give an image")
        if num_diffusion_steps is None and chosen != self.sampler:
            num_diffusion_steps = STEPS[chosen]
        prompts = NextStepPrompts(self.tokenizer, self.config.repeats_bos)
        references = [] if image is None else self._references(image, len(texts))
        if references and common.get("height") is common.get("width") is None:
            common["width"], common["height"] = common_size([[one] for one in references])
        call = self.begin_call(len(texts), num_diffusion_steps=num_diffusion_steps, **common)
        assert isinstance(call.sampling, LatentSampling)
        call.sampling = sampling = _scheduled(call.sampling, chosen)
        rows = [texts]
        if references and call.guided and image_scale > 1:
            if sampling.guidance_schedule != "constant":
                raise ValueError(
                    f"image_guidance_scale is {image_scale}, which needs constant guidance: give 1, or "
                    'guidance_schedule="constant"'
                )
            rows.append(negatives)
        if references:
            grids = [self._grid((one.height, one.width)) for one in references]
            rows = [list(map(prompts.with_reference, row, grids)) for row in rows]
        names: list[Any] = [list(zip(row, map(id, references), strict=False)) for row in rows]
        # First, since bringing one component to the device sends the one before it away.
        read = self._tokens_of(references) * len(rows)
        if call.guided:
            rows.append(negatives)
            names.append(negatives)
        model = self._model(
            [prompts.encode(row, self._grid(call.size)) for row in rows],
            read,
            prompts.placeholder,
            layout=Layout(self._grid(call.size)),
            sampler=chosen,
            shift=float(shift),
            image_guidance_scale=float(image_scale),
        )
        call.bind(model, *names)
        return call


def _check_model(model: Qwen2Model, projector: NextStepProjector, head: DenoisingHead) -> int:
    """Refuse parts that do not fit together; returns the width of their tokens."""
    check_parts("hidden states", model=model.config.hidden_size, projector=projector.config.hidden_size)
    check_parts("conditions", projector=projector.config.hidden_size, denoising_head=head.config.condition_dim)
    check_parts("channels per token", projector=projector.config.token_dim, denoising_head=head.config.token_dim)
    return projector.config.token_dim


def _scheduled(sampling: LatentSampling, sampler: Sampler) -> LatentSampling:
    """`sampling` with what the authors of `sampler` call a linear schedule."""
    if sampling.guidance_schedule != "linear":
        return sampling
    if sampler != "sde":
        return sampling.replaced(guidance_schedule="falling")
    if sampling.guided and sampling.guidance_scale <= 2:
        raise ValueError(
            f'guidance_schedule "linear" of "sde" begins at half of guidance_scale, {sampling.guidance_scale}, which '
            "would be no guidance: give a guidance_scale above 2"
        )
    return sampling.replaced(guidance_schedule="half-linear")


def _is_finite(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


def _check_steps(sampler: Any, shift: Any) -> None:
    if sampler not in get_args(Sampler):
        raise ValueError(f"sampler is {sampler!r}: choose among {', '.join(get_args(Sampler))}")
    if not _is_finite(shift) or shift <= 0:
        raise ValueError(f"timesteps_shift is {shift!r}: give a number above 0")
