"""NextStep (https://arxiv.org/abs/2508.10711): images from a text with a language model of continuous tokens."""

import math
import numbers
from dataclasses import replace
from typing import Any, Unpack, get_args

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from transformers import PreTrainedTokenizerBase, Qwen2Model

from ...decoding import AutoregressiveDecoding, LatentSampling, Layout
from ...decoding.contract.supports import Traits
from ...models.denoising_head import DenoisingHead
from ...tokenizers.tiling import Tiling
from ..abilities import LATENT_SAMPLING, Abilities
from ..arguments import LatentArguments, pipeline_call
from ..base import ARImagePipeline
from ..call import GenerationCall
from ..components import check_parts
from ..output import ImagePipelineOutput
from ..text.checks import MAX_PROMPT_CHARACTERS, as_texts, check_sides
from ..text.token_prompts import Ids, check_negatives, stack
from .family import FAMILY
from .flow import STEPS, Sampler
from .latent_model import NextStepModel, normalised
from .projector import NextStepProjector
from .prompts import NextStepPrompts


EXAMPLE_DOC_STRING = """
    Examples:
        ```py
        >>> import torch
        >>> from arimage import AutoPipeline

        >>> # downloaded and converted once; `arimage models` says how large it is
        >>> pipe = AutoPipeline.from_pretrained("nextstep-1.1", dtype=torch.bfloat16).to("cuda")
        >>> image = pipe("a shiba inu in the snow", decoding="sjd-coupled").images[0]
        ```
"""


class NextStepPipeline(ARImagePipeline):
    """Generates images from a text with NextStep-1.1 or NextStep-1.

    Args:
        model (`Qwen2Model`): the language model.
        projector (`NextStepProjector`): between tokens and the language model.
        denoising_head (`DenoisingHead`): denoises a token, given its condition from the language model.
        vae (`AutoencoderKL`): decodes tokens to images.
        tokenizer (`PreTrainedTokenizerBase`): the text tokenizer.
        patch_size (`int`): latent pixels along each side of a token.
        image_size (`int`): side in pixels of the square images that the weights were trained for.
        normalises_tokens (`bool`): whether tokens are normalised before they are fed and decoded, as in NextStep-1.
        repeats_bos (`bool`): see `NextStepPrompts`.

    Attributes:
        sampler: the default sampler of calls, see `flow_steps`.
        timesteps_shift: the default shift of the times of the denoising steps.

    Raises:
        ValueError: if the components do not fit together.
    """

    family = FAMILY
    abilities = Abilities("causal_latents", LATENT_SAMPLING | {"negative_prompt", "prompt_suffix"})
    model_cpu_offload_seq = "model->vae"
    # They run between forward passes of the model.
    _exclude_from_cpu_offload = ["projector", "denoising_head"]
    _lora_loadable_modules = ["model"]
    _saved_defaults = ("sampler", "timesteps_shift")

    def __init__(
        self,
        model: Qwen2Model,
        projector: NextStepProjector,
        denoising_head: DenoisingHead,
        vae: AutoencoderKL,
        tokenizer: PreTrainedTokenizerBase,
        patch_size: int = 2,
        image_size: int = 512,
        normalises_tokens: bool = False,
        repeats_bos: bool = True,
    ):
        super().__init__()
        width, dim = model.config.hidden_size, projector.config.token_dim
        check_parts("hidden states", model=width, projector=projector.config.hidden_size)
        check_parts("conditions", projector=width, denoising_head=denoising_head.config.condition_dim)
        check_parts("channels per token", projector=dim, denoising_head=denoising_head.config.token_dim)
        if vae is not None:
            check_parts("channels per token", projector=dim, vae=vae.config["latent_channels"] * patch_size**2)
        self.register_modules(
            model=model, projector=projector, denoising_head=denoising_head, vae=vae, tokenizer=tokenizer
        )
        self.register_to_config(
            patch_size=patch_size,
            image_size=image_size,
            normalises_tokens=normalises_tokens,
            repeats_bos=repeats_bos,
        )
        self._tiling = None if vae is None else Tiling(self.vae_scale_factor)
        self.sampler: Sampler = "em"
        self.timesteps_shift = 1.0
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
        if sampling.guidance_schedule != "constant":
            raise ValueError(
                f"guidance_schedule is {sampling.guidance_schedule!r}, which NextStep's authors define in several "
                'ways and publish no call with: give "constant"'
            )
        if not isinstance(sampling.num_diffusion_steps, int):
            raise ValueError(f"num_diffusion_steps is {sampling.num_diffusion_steps}: give one number")
        return sampling

    # From tokens to images

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

    def _model(self, branches: list[Ids], size: tuple[int, int], sampler: Sampler, shift: float) -> NextStepModel:
        rows, masks = stack(branches, self.tokenizer.pad_token_id or 0, self._execution_device)
        return NextStepModel(
            self.on_device(self.model),
            projector=self.projector,
            denoising_head=self.denoising_head,
            sampler=sampler,
            shift=shift,
            normalises=self.config.normalises_tokens,
            layout=Layout((size[0] // self.token_size, size[1] // self.token_size)),
            input_ids=rows,
            attention_mask=masks,
            branches=len(branches),
        )

    @pipeline_call(EXAMPLE_DOC_STRING, ImagePipelineOutput)
    def __call__(
        self,
        prompt: str | list[str],
        negative_prompt: str | list[str] | None = None,
        *,
        prompt_suffix: str | None = None,
        sampler: Sampler | None = None,
        timesteps_shift: float | None = None,
        num_diffusion_steps: int | None = None,
        **common: Unpack[LatentArguments],
    ) -> GenerationCall:
        r"""
        Generate images.

        Args:
            prompt (`str` or `list[str]`):
                What to generate.
            negative_prompt (`str` or `list[str]`, *optional*):
                What to avoid in the images: one for all prompts, or one per prompt.
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
            guidance_schedule (`str`, *optional*, defaults to `"constant"`):
                Only `"constant"`.
            temperature (`float`, *optional*, defaults to the checkpoint's):
                Factor on the noise of the denoising steps.
            {call}

        {example}

        Returns:
            [`ImagePipelineOutput`] or `tuple`: the output, or the tuple `(images,)`.
        """
        texts = as_texts(prompt, "prompt", MAX_PROMPT_CHARACTERS)
        negatives = as_texts(negative_prompt or "", "negative_prompt", MAX_PROMPT_CHARACTERS)
        check_negatives("negative_prompt", len(negatives), len(texts))
        if prompt_suffix:
            as_texts(prompt_suffix, "prompt_suffix")
            texts = [f"{text} {prompt_suffix}" for text in texts]
        chosen = self.sampler if sampler is None else sampler
        shift = self.timesteps_shift if timesteps_shift is None else timesteps_shift
        _check_steps(chosen, shift)
        if num_diffusion_steps is None and chosen != self.sampler:
            num_diffusion_steps = STEPS[chosen]
        call = self.begin_call(len(texts), num_diffusion_steps=num_diffusion_steps, **common)
        grid = call.size[0] // self.token_size, call.size[1] // self.token_size
        prompts = NextStepPrompts(self.tokenizer, self.config.repeats_bos)
        branches = [prompts.encode(texts, grid)]
        if call.guided:
            branches.append(prompts.encode(negatives, grid))
        call.bind(self._model(branches, call.size, chosen, float(shift)))
        return call


def _check_steps(sampler: Any, shift: Any) -> None:
    if sampler not in get_args(Sampler):
        raise ValueError(f"sampler is {sampler!r}: choose among {', '.join(get_args(Sampler))}")
    number = float(shift) if isinstance(shift, numbers.Real) and shift is not True else math.nan
    if not 0 < number < math.inf:
        raise ValueError(f"timesteps_shift is {shift!r}: give a number above 0")
