"""X-Omni (https://arxiv.org/abs/2507.22058): images from text, by a language model of semantic tokens and a FLUX that
reads them."""

from collections.abc import Sequence
from typing import Unpack

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from transformers import CLIPTextModel, CLIPTokenizer, PreTrainedTokenizerBase, T5EncoderModel, T5TokenizerFast

from ...decoding import Layout
from ...models.bound_prompts import bind_prompts
from ..abilities import TOKEN_SAMPLING, Abilities
from ..arguments import TokenArguments, pipeline_call
from ..call import GenerationCall
from ..kinds.hybrid import HybridPipeline
from ..output import ImagePipelineOutput
from ..text.checks import as_texts, check_one_of, check_sides
from ..text.token_prompts import check_negatives, stack
from .family import FAMILY
from .projector_x_omni import XOmniProjector
from .prompts import XOmniPrompts
from .transformer_x_omni import XOmniLanguageModel


EXAMPLE = """
from diffusers import FluxPipeline
from arimage import XOmniPipeline

# the folder that `arimage convert x-omni` wrote
pipe = XOmniPipeline.from_pretrained("x-omni-en", dtype=torch.bfloat16).to("cuda")
tokens = pipe("a red fox in the snow", decoding="sjd-coupled", output_type="latent").images

# with a FLUX of your own
flux = FluxPipeline.from_pretrained("black-forest-labs/FLUX.1-dev", transformer=None, dtype=torch.bfloat16)
parts = dict(language_model=pipe.language_model, projector=pipe.projector, transformer=pipe.transformer)
own = XOmniPipeline.from_pipe(flux.to("cuda"), text_tokenizer=pipe.text_tokenizer, **parts)
image = own("a red fox in the snow").images[0]
"""
# With the top_k that transformers gave the authors' code where it sets none.
DEFAULTS = {"top_k": 50, "min_p": 0.03, "num_inference_steps": 28, "decoder_guidance_scale": 1.0}
PIXELS_PER_TOKEN = 16
DECODER = ("transformer", "vae", "scheduler", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")


class XOmniPipeline(HybridPipeline):
    """Generates the semantic tokens of images from text with X-Omni and, with the components of a FLUX, images.

    Args:
        language_model (`XOmniLanguageModel`): generates the tokens.
        projector (`XOmniProjector`): turns them into what the decoder reads.
        text_tokenizer (`PreTrainedTokenizerBase`, *optional*): of the language model. Without it the pipeline takes
            `input_ids`.
        transformer (`FluxTransformer2DModel`, *optional*), vae (`AutoencoderKL`, *optional*), scheduler
            (`FlowMatchEulerDiscreteScheduler`, *optional*), text_encoder (`CLIPTextModel`, *optional*), tokenizer
            (`CLIPTokenizer`, *optional*), text_encoder_2 (`T5EncoderModel`, *optional*), tokenizer_2
            (`T5TokenizerFast`, *optional*): the decoder, as in `diffusers.FluxPipeline`, whose other parts `from_pipe`
            takes. Without them calls return tokens, with `output_type="latent"`.
        image_size (`int`): side in pixels of the images that the model was trained for.
    """

    family = FAMILY
    abilities = Abilities(
        "tokens",
        TOKEN_SAMPLING | {"negative_prompt"},
        decoder=frozenset({"num_inference_steps", "decoder_guidance_scale"}),
    )
    model_cpu_offload_seq = "language_model->text_encoder->text_encoder_2->projector->transformer->vae"
    _lora_loadable_modules = ["language_model", "transformer"]
    _optional_components = ["text_tokenizer", *DECODER]

    def __init__(
        self,
        language_model: XOmniLanguageModel,
        projector: XOmniProjector,
        text_tokenizer: PreTrainedTokenizerBase | None = None,
        transformer: FluxTransformer2DModel | None = None,
        vae: AutoencoderKL | None = None,
        scheduler: FlowMatchEulerDiscreteScheduler | None = None,
        text_encoder: CLIPTextModel | None = None,
        tokenizer: CLIPTokenizer | None = None,
        text_encoder_2: T5EncoderModel | None = None,
        tokenizer_2: T5TokenizerFast | None = None,
        image_size: int = 1152,
    ):
        super().__init__()
        self.register_modules(
            language_model=language_model,
            projector=projector,
            text_tokenizer=text_tokenizer,
            transformer=transformer,
            vae=vae,
            scheduler=scheduler,
            text_encoder=text_encoder,
            tokenizer=tokenizer,
            text_encoder_2=text_encoder_2,
            tokenizer_2=tokenizer_2,
        )
        self.register_to_config(image_size=image_size)
        self.generation_config |= DEFAULTS
        codes, vectors = language_model.config.num_codes, projector.config.codebook_size
        if codes != vectors:
            raise ValueError(
                f"tokens: the language model has {codes}, the projector {vectors}: load the two of one model"
            )
        width = None if transformer is None else transformer.inner_dim
        if width is not None and projector.config.decoder_dim != width:
            raise ValueError(
                f"the projector is for a decoder of width {projector.config.decoder_dim}, and this one has {width}: "
                "give the transformer that X-Omni publishes, converted with it"
            )

    @property
    def image_sizes(self) -> list[tuple[int, int]]:
        return [(self.config.image_size, self.config.image_size)]

    def num_tokens(self, size: tuple[int, int]) -> int:
        return size[0] * size[1] // PIXELS_PER_TOKEN**2

    def check_size(self, height: int | None, width: int | None) -> tuple[int, int]:
        """Height and width of the images of a call."""
        [(high, wide)] = self.image_sizes
        return check_sides((high if height is None else height, wide if width is None else width), PIXELS_PER_TOKEN)

    @property
    def prompts(self) -> XOmniPrompts:
        return XOmniPrompts(self.text_tokenizer, self.language_model.config)

    def _check_decoder(self, has_text: bool) -> None:
        """Refuse a call for images where a part of the decoder, or the text that it reads, is missing."""
        missing = [name for name in DECODER if getattr(self, name) is None]
        if missing:
            raise ValueError(
                f"this pipeline has no {missing[0]} for its decoder: hand your FluxPipeline to "
                'XOmniPipeline.from_pipe, or ask for tokens with output_type="latent"'
            )
        if not has_text:
            raise ValueError('the decoder reads prompts as text: give prompt, or output_type="latent"')

    def latent_shape(self, size: tuple[int, int]) -> tuple[int, int, int]:
        # Two latents a token along each side.
        height, width = (2 * side // PIXELS_PER_TOKEN for side in size)
        return 16 if self.vae is None else self.vae.config.latent_channels, height, width

    def decoder_inputs(self, call: GenerationCall, tokens: torch.LongTensor) -> list[tuple[str, torch.Tensor]]:
        """The prompt of each image, and the semantic features [h * w, channels] of its tokens."""
        features = self.projector.features(self.whole_tokens(call, tokens)).flatten(2).transpose(1, 2)
        return list(zip(call.conditions, features, strict=True))

    def predict_velocity(
        self, latents: torch.Tensor, time: torch.Tensor, features: torch.Tensor, text: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """The velocity [B, C, h, w] that the decoder predicts in float32.

        Args:
            latents: [B, C, h, w].
            time: [B], 1 for noise and 0 for an image.
            features: semantic features [B, h * w / 4, channels].
            text: embeddings of the prompts [B, T, D] and pooled ones [B, D'].
        """
        assert self.transformer is not None
        rows, columns = (side // 2 for side in latents.shape[2:])
        packed = F.pixel_unshuffle(latents, 2).flatten(2).transpose(1, 2).to(self.transformer.dtype)
        added = self.projector(features.to(self.projector.dtype)).to(packed)
        # Added once, after the last of the blocks that see text and image apart.
        samples = [torch.zeros_like(added)] * (self.transformer.config.num_layers - 1) + [added]
        places = torch.cartesian_prod(torch.arange(1), torch.arange(rows), torch.arange(columns))
        places = places.to(packed.device, torch.float32)
        embeds, pooled = text
        velocity = self.transformer(
            packed,
            encoder_hidden_states=embeds.to(packed),
            pooled_projections=pooled.to(packed),
            timestep=time.to(packed),
            img_ids=places,
            txt_ids=places.new_zeros(embeds.shape[1], 3),
            guidance=packed.new_ones(len(packed)) if self.transformer.config.guidance_embeds else None,
            controlnet_block_samples=samples,
            return_dict=False,
        )[0]
        return F.pixel_shuffle(velocity.transpose(1, 2).unflatten(2, (rows, columns)), 2).float()

    def _embed(self, texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        parts = {name: getattr(self, name) for name in DECODER}
        embeds, pooled, _ = FluxPipeline(**parts).encode_prompt(texts, None, device=self._execution_device)
        return embeds, pooled

    def denoise(
        self, call: GenerationCall, read: list[tuple[str, torch.Tensor]], latents: torch.FloatTensor
    ) -> torch.Tensor:
        assert self.scheduler is not None
        steps, scale = call.decoder.num_inference_steps, call.decoder.guidance_scale
        texts, features = [text for text, _ in read], torch.stack([vectors for _, vectors in read])
        text = self._embed(texts)
        empty = self._embed([""] * len(texts)) if scale > 1 else None
        names = "base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift"
        shift = calculate_shift(features.shape[1], *(self.scheduler.config[name] for name in names))
        scheduler = self.flow_schedule(steps, shift, latents.device)
        for timestep in self.progress_bar(scheduler.timesteps):
            time = (timestep / scheduler.config.num_train_timesteps).expand(len(latents))
            velocity = self.predict_velocity(latents, time, features, text)
            if empty is not None:
                without = self.predict_velocity(latents, time, torch.zeros_like(features), empty)
                velocity = without + scale * (velocity - without)
            latents = scheduler.step(velocity, timestep, latents, return_dict=False)[0]
        return latents

    @pipeline_call(EXAMPLE, ImagePipelineOutput, reads=("output_type",))
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        negative_prompt: str | list[str] | None = None,
        *,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        negative_input_ids: torch.LongTensor | None = None,
        negative_attention_mask: torch.Tensor | None = None,
        num_inference_steps: int | None = None,
        decoder_guidance_scale: float | None = None,
        latents: torch.Tensor | None = None,
        **common: Unpack[TokenArguments],
    ) -> GenerationCall:
        r"""
        Generate images.

        Args:
            prompt (`str` or `list[str]`, *optional*):
                What to generate.
            negative_prompt (`str` or `list[str]`, *optional*, defaults to no text):
                What the tokens avoid under guidance: one for all prompts, or one per prompt.
            input_ids (`torch.LongTensor`, *optional*), attention_mask (`torch.Tensor`, *optional*):
                Token ids [B, P] in place of `prompt`, header of the image included, padded on the left, and their
                mask. The grid in the header must be that of the size. The decoder needs the text.
            negative_input_ids (`torch.LongTensor`, *optional*), negative_attention_mask (`torch.Tensor`, *optional*):
                The same in place of `negative_prompt`, [1 or B, P'].
            {decoder}
            decoder_guidance_scale (`float`, *optional*, defaults to the checkpoint's):
                s in n + s (c - n), with predictions c of the decoder under prompt and tokens and n without them. 1 or
                less disables guidance.
            {common}
        """
        check_one_of(prompt=prompt, input_ids=input_ids)
        if common.pop("output_type", "latent") != "latent":
            self._check_decoder(has_text=prompt is not None)
        if negative_prompt is not None and negative_input_ids is not None:
            raise ValueError("give either a negative_prompt or negative_input_ids")
        prompts, device = self.prompts, self._execution_device
        size = self.check_size(common.pop("height", None), common.pop("width", None))
        grid = size[0] // PIXELS_PER_TOKEN, size[1] // PIXELS_PER_TOKEN
        if prompt is not None:
            texts = [*as_texts(prompt)]
            branches = [prompts.encode("prompt", prompt, grid)]
        else:
            assert input_ids is not None
            branches = [prompts.checked("input_ids", input_ids, attention_mask)]
            texts = [None] * len(input_ids)
        count = len(branches[0][0])
        call = self.begin_call(count, size, **common)
        call.decoder = self.decoder_settings(
            call, latents, num_inference_steps, decoder_guidance_scale=decoder_guidance_scale
        )
        if negative_prompt is not None:
            negative = prompts.encode("negative_prompt", negative_prompt, grid)
        elif negative_input_ids is not None:
            negative = prompts.checked("negative_input_ids", negative_input_ids, negative_attention_mask)
        else:
            negative = prompts.headers(*branches[0])
        check_negatives("negative_prompt", len(negative[0]), count)
        ids, mask = stack([*branches, *([negative] if call.guided else [])], 0, device)
        codebook, language_model = self.projector.code_vectors(), self.on_device(self.language_model)
        settings = {"codebook": codebook, "branches": 1 + call.guided}
        num_codes = self.language_model.config.num_codes
        call.bind(bind_prompts(language_model, ids, mask, Layout(grid), num_codes, **settings))
        call.conditions = [text for text in texts for _ in range(call.num_images_per_prompt)]
        return call
