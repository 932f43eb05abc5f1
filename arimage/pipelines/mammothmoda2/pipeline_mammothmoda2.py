"""MammothModa2 (https://github.com/bytedance/mammothmoda): images from text, by a language model with experts for
image tokens and a diffusion decoder that reads its hidden states."""

import math
from dataclasses import dataclass
from typing import Unpack

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler
from transformers import PreTrainedTokenizerFast

from ...decoding import Layout
from ..abilities import TOKEN_SAMPLING, Abilities
from ..arguments import TokenArguments, pipeline_call
from ..call import GenerationCall
from ..kinds.hybrid import HybridPipeline
from ..output import ImagePipelineOutput
from ..text.checks import check_one_of, check_sides
from .decoder_mammothmoda2 import MammothModa2Transformer2DModel
from .family import FAMILY
from .prompts import END_OF_IMAGE, END_OF_ROW, HEADER, Grid, MammothModa2Prompt, MammothModa2Prompts, unpadded
from .transformer_mammothmoda2 import MammothModa2LanguageModel, bind_prompts, read_sequence, with_headers


EXAMPLE = """
# downloaded and converted once; `arimage models` says how large it is
pipe = AutoPipeline.from_pretrained("mammothmoda2-preview", dtype=torch.bfloat16).to("cuda")
pipe.compile()
image = pipe("a city skyline at sunset", decoding="sjd-coupled").images[0]
"""
DEFAULTS = {"guidance_scale": 7.0, "top_k": 2048, "num_inference_steps": 50, "decoder_guidance_scale": 9.0}
# Of latents, along each side, for which the noise schedule is not shifted.
UNSHIFTED_SIDE = 40


@dataclass(frozen=True)
class Conditions:
    """What the decoder reads about an image: hidden states of the language model.

    Attributes:
        text: [T, D], of the text of the prompt.
        image: [I, D], of the image tokens, of the tokens that end a row, and of those around them.
        negative: [N, D], of the negative prompt; None without one.
    """

    text: torch.Tensor
    image: torch.Tensor
    negative: torch.Tensor | None


class MammothModa2Pipeline(HybridPipeline):
    """Generates images from text with MammothModa2-Preview or MammothModa2-Dev.

    The language model generates a grid of tokens, whose size does not depend on that of the image. One more forward
    pass over the prompt and these tokens gives the hidden states that the decoder reads.

    Args:
        language_model (`MammothModa2LanguageModel`): generates the tokens.
        transformer (`MammothModa2Transformer2DModel`): the decoder.
        vae (`AutoencoderKL`): decodes the latents of the decoder to pixels.
        scheduler (`FlowMatchEulerDiscreteScheduler`): the noise schedule of the decoder.
        tokenizer (`PreTrainedTokenizerFast`, *optional*): the text tokenizer. Without it the pipeline takes
            `input_ids`.
        token_grid (`list[int]`): rows and columns of the grid that the language model was trained for.
        image_size (`int`): side in pixels of the images that the decoder was trained for.
        num_codes (`int`, *optional*): how many tokens can be sampled, by default all that the head has from image
            token 0 on, as in the authors' code.
        reads_answer_text (`bool`): whether the decoder also reads the text in the header of the image
            (`gen_text_condition_with_answer`).
        reads_last_tokens (`bool`): whether the decoder reads only the last nine tokens of the image, and the text
            before them, as the authors' code of Preview does by mistake.

    Raises:
        ValueError: if the tokenizer is not that of the language model, or `num_codes` is out of its range.
    """

    family = FAMILY
    abilities = Abilities(
        "tokens",
        TOKEN_SAMPLING | {"negative_prompt"},
        decoder=frozenset({"num_inference_steps", "decoder_guidance_scale"}),
    )
    model_cpu_offload_seq = "language_model->transformer->vae"
    _lora_loadable_modules = ["language_model", "transformer"]
    _optional_components = ["tokenizer"]

    def __init__(
        self,
        language_model: MammothModa2LanguageModel,
        transformer: MammothModa2Transformer2DModel,
        vae: AutoencoderKL,
        scheduler: FlowMatchEulerDiscreteScheduler,
        tokenizer: PreTrainedTokenizerFast | None = None,
        token_grid: tuple[int, int] | list[int] = (32, 32),
        image_size: int = 1024,
        num_codes: int | None = None,
        reads_answer_text: bool = False,
        reads_last_tokens: bool = False,
    ):
        super().__init__()
        self.register_modules(
            language_model=language_model, transformer=transformer, vae=vae, scheduler=scheduler, tokenizer=tokenizer
        )
        self.register_to_config(
            token_grid=list(token_grid),
            image_size=image_size,
            num_codes=num_codes,
            reads_answer_text=reads_answer_text,
            reads_last_tokens=reads_last_tokens,
        )
        self.generation_config |= DEFAULTS
        config = language_model.config
        if num_codes is not None and not 1 <= num_codes <= config.num_codes:
            raise ValueError(f"num_codes is {num_codes}: give a number from 1 to {config.num_codes}")
        if tokenizer is not None:
            for name, number in ((END_OF_ROW, config.row_end_id), (END_OF_IMAGE, config.image_end_id)):
                if tokenizer.convert_tokens_to_ids(name) != number:
                    raise ValueError(f"the tokenizer has another id for {name} than {number}: give the model's own")

    @property
    def image_sizes(self) -> list[tuple[int, int]]:
        return [(self.config.image_size, self.config.image_size)]

    def num_tokens(self, size: tuple[int, int]) -> int:
        return math.prod(self.config.token_grid)

    def check_size(self, height: int | None, width: int | None) -> tuple[int, int]:
        """Height and width of the images of a call."""
        default, unit = self.image_sizes[0], self._latent_scale * self.transformer.config.patch_size
        return check_sides((default[0] if height is None else height, default[1] if width is None else width), unit)

    @property
    def prompts(self) -> MammothModa2Prompts:
        rows, columns = self.config.token_grid
        return MammothModa2Prompts(self.tokenizer, (rows, columns))

    def _check_ids(self, rows: list[torch.LongTensor]) -> None:
        config = self.language_model.config
        first, end = config.gen_vocab_start_index, config.gen_vocab_start_index + config.gen_vocab_size
        for ids in rows:
            unknown = (ids < 0) | (ids >= end) | ((ids >= config.vocab_size) & (ids < first))
            if unknown.any():
                raise ValueError(f"a prompt has the token id {int(ids[unknown][0])}, which the model does not have")

    def hand_off(
        self,
        input_ids: torch.LongTensor,
        attention_mask: torch.Tensor | None,
        tokens: torch.LongTensor,
        negative_input_ids: torch.LongTensor | None = None,
    ) -> list[Conditions]:
        """What the decoder reads about each image.

        Args:
            input_ids, attention_mask: the prompts [B, P], header included, padded on the left, and their mask; None
                without padding.
            tokens: int64 [B, rows, columns], from 0 on.
            negative_input_ids: the negative prompts [1 or B, N], without padding; None for the authors', where there
                is a tokenizer.
        """
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        header = self.prompts.header_length((tokens.shape[1], tokens.shape[2]))
        negative = self.prompts.negative_ids(None, negative_input_ids, None, len(input_ids))
        parts = zip(unpadded(input_ids, mask), negative, strict=True)
        return self._read([MammothModa2Prompt(ids, header, without) for ids, without in parts], tokens)

    def decoder_inputs(self, call: GenerationCall, tokens: torch.LongTensor) -> list[Conditions]:
        return self._read(call.conditions, self.whole_tokens(call, tokens))

    @torch.no_grad()
    def _read(self, prompts: list[MammothModa2Prompt], tokens: torch.LongTensor) -> list[Conditions]:
        """Run the language model over each prompt with its tokens, one after the other, without padding."""
        config, model, device = self.language_model.config, self.language_model, self._execution_device
        negatives: dict[tuple[int, ...], torch.Tensor] = {}
        found = []
        for prompt, grid in zip(prompts, tokens.to(device), strict=True):
            row_ends = torch.full_like(grid[:, :1], config.row_end_id)
            rows = torch.cat([grid + config.visual_token_start_id, row_ends], dim=1)
            ids = torch.cat([prompt.ids.to(device), rows.flatten(), rows.new_tensor([config.image_end_id])])
            start = len(ids) - HEADER if self.config.reads_last_tokens else len(prompt.ids) - prompt.header
            hidden = read_sequence(model, ids)
            generated = ids >= config.gen_vocab_start_index
            answer = torch.arange(len(ids), device=device) >= start
            text = ~generated & ~torch.isin(ids, ids.new_tensor(config.placeholder_ids))
            text &= ~answer | self.config.reads_answer_text
            negative = None
            if prompt.negative is not None:
                key = tuple(prompt.negative.tolist())
                if key not in negatives:
                    negatives[key] = read_sequence(model, prompt.negative.to(device))
                negative = negatives[key]
            found.append(Conditions(hidden[text], hidden[answer & generated], negative))
        return found

    @property
    def _latent_scale(self) -> int:
        """Pixels per latent along each side."""
        return 2 ** (len(self.vae.config.block_out_channels) - 1)

    def latent_shape(self, size: tuple[int, int]) -> tuple[int, int, int]:
        return self.transformer.config.in_channels, size[0] // self._latent_scale, size[1] // self._latent_scale

    def denoise(self, call: GenerationCall, read: list[Conditions], latents: torch.FloatTensor) -> torch.Tensor:
        text, image, negative = ([getattr(one, name) for one in read] for name in ("text", "image", "negative"))
        steps, scale = call.decoder.num_inference_steps, call.decoder.guidance_scale
        self._check_negative(call)
        shift = math.sqrt(latents.shape[2] * latents.shape[3]) / UNSHIFTED_SIDE
        scheduler = self.flow_schedule(steps, shift, latents.device)
        for timestep in self.progress_bar(scheduler.timesteps):
            # From noise at 0 to the image at 1, the other way round than diffusers' time.
            time = (1 - timestep / scheduler.config.num_train_timesteps).expand(len(latents))
            velocity = self.transformer(latents, time, text, image).float()
            if scale > 1:
                without = self.transformer(latents, time, negative).float()
                velocity = without + scale * (velocity - without)
            latents = scheduler.step(-velocity, timestep, latents, return_dict=False)[0]
        return latents

    def _check_negative(self, call: GenerationCall) -> None:
        if call.decoder.guidance_scale > 1 and any(prompt.negative is None for prompt in call.conditions):
            raise ValueError(
                "this pipeline has no tokenizer: give negative_input_ids, or decoder_guidance_scale=1 for no guidance "
                "of the decoder"
            )

    @pipeline_call(EXAMPLE, ImagePipelineOutput)
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        negative_prompt: str | list[str] | None = None,
        *,
        token_grid: Grid | None = None,
        image: None = None,
        mask_image: None = None,
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
            negative_prompt (`str` or `list[str]`, *optional*, defaults to the authors'):
                What the decoder avoids: one for all prompts, or one per prompt. The tokens do not depend on it.
            token_grid (`tuple[int, int]`, *optional*, defaults to the trained one, 32 x 32):
                Rows and columns of tokens, for an image of any size. In a prompt they have as many digits as the
                trained ones.
            image (`None`), mask_image (`None`):
                Refused: editing needs a tokenizer of images, which is not converted.
            input_ids (`torch.LongTensor`, *optional*), attention_mask (`torch.Tensor`, *optional*):
                Token ids [B, P] in place of `prompt`, header of the image included, padded on the left, and their
                mask. The grid in the header must match `token_grid`.
            negative_input_ids (`torch.LongTensor`, *optional*), negative_attention_mask (`torch.Tensor`, *optional*):
                The same in place of `negative_prompt`, [1 or B, N], without a header.
            {decoder}
            decoder_guidance_scale (`float`, *optional*, defaults to the checkpoint's, 9.0):
                s in n + s (c - n), with predictions c of the decoder under the prompt and n under the negative prompt.
                1 or less disables guidance.
            {common}
        """
        if image is not None or mask_image is not None:
            raise ValueError(
                "MammothModa2 cannot edit an image here, which needs its tokenizer of images: leave out image and "
                "mask_image"
            )
        check_one_of(prompt=prompt, input_ids=input_ids)
        prompts, device = self.prompts, self._execution_device
        grid = prompts.check_grid(token_grid)
        ids, mask = prompts.ids(prompt, input_ids, attention_mask, grid)
        call = self.begin_call(len(ids), **common)
        call.decoder = self.decoder_settings(
            call, latents, num_inference_steps, decoder_guidance_scale=decoder_guidance_scale
        )
        negative = prompts.negative_ids(negative_prompt, negative_input_ids, negative_attention_mask, len(ids))
        rows, header = unpadded(ids, mask), prompts.header_length(grid)
        self._check_ids([*rows, *(row for row in negative if row is not None)])
        ids, mask = ids.to(device), mask.to(device)
        if call.guided:
            ids, mask = with_headers(ids, mask, header)
        num_codes = self.config.num_codes or self.language_model.config.num_codes
        language_model = self.on_device(self.language_model)
        call.bind(bind_prompts(language_model, ids, mask, Layout(grid), num_codes, branches=1 + call.guided))
        own = [MammothModa2Prompt(*parts) for parts in zip(rows, [header] * len(rows), negative, strict=True)]
        call.conditions = [one for one in own for _ in range(call.num_images_per_prompt)]
        return call
