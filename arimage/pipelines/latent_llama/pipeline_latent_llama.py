"""Images from a class or a text, generated from continuous tokens one after another."""

from typing import Unpack

import torch
import torch.nn.functional as F
from transformers import PreTrainedTokenizerBase, T5EncoderModel

from ...decoding import AutoregressiveDecoding, LatentSampling, Layout
from ...decoding.run.captured_steps import KEPT_BYTES
from ...models.denoising_head import diffusion_tables
from ...tokenizers.upscaler import ImageUpscaler
from ...tokenizers.vq_llamagen import LlamaGenVQModel
from ..abilities import LATENT_SAMPLING, Abilities
from ..arguments import LatentArguments, pipeline_call
from ..call import GenerationCall
from ..components import check_parts, check_settings
from ..kinds.class_or_text import check_text_encoder
from ..kinds.upscaling import UpscalingPipeline
from ..output import ImagePipelineOutput
from ..text.checks import prompt_names
from .family import FAMILY
from .transformer_latent_llama import LatentLlamaModel, LatentLlamaTransformer


EXAMPLE = """from arimage import LatentLlamaPipeline

pipe = LatentLlamaPipeline.from_pretrained("path/to/model")
image = pipe("a red heart", generator=torch.Generator().manual_seed(0)).images[0]
"""


# The settings in which a drafter must equal the transformer.
SHARED = "token_dim grid_size patch_size num_train_timesteps conditioning num_classes num_condition_tokens caption_dim"


class LatentLlamaPipeline(UpscalingPipeline):
    """Generates images from a class or a text with a next-token transformer of continuous tokens: the vectors of a
    LlamaGen image tokenizer before quantisation.

    Args:
        transformer (`LatentLlamaTransformer`): the next-token model with its denoising head.
        vq (`LlamaGenVQModel`): decodes vectors to images. Both are needed to generate.
        tokenizer (`PreTrainedTokenizerBase`, *optional*), text_encoder (`T5EncoderModel`, *optional*): for text.
            Without them a text-conditional pipeline takes `prompt_embeds`.
        drafter (`LatentLlamaTransformer`, *optional*): a smaller transformer that reads the same conditions, for
            `PathSpeculativeDecoding`.
        upscaler (`ImageUpscaler`, *optional*): enlarges the decoded images. Calls that ask for the size that the image
            tokenizer decodes do without it.
        id2label (`dict[int, str]`, *optional*): the names of the classes of a class-conditional transformer.
    """

    family = FAMILY
    model_cpu_offload_seq = "text_encoder->transformer->vq->upscaler"
    _optional_components = ["tokenizer", "text_encoder", "drafter", "upscaler"]
    # It runs between forward passes of the transformer.
    _exclude_from_cpu_offload = ["drafter"]
    abilities = Abilities("causal_latents", LATENT_SAMPLING)

    def __init__(
        self,
        transformer: LatentLlamaTransformer,
        vq: LlamaGenVQModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        text_encoder: T5EncoderModel | None = None,
        drafter: LatentLlamaTransformer | None = None,
        upscaler: ImageUpscaler | None = None,
        id2label: dict[int, str] | dict[str, str] | None = None,
    ):
        super().__init__()
        if transformer is not None and vq is not None:
            width = vq.config.codebook_dim * transformer.config.patch_size**2
            check_parts("channels per token", transformer=transformer.config.token_dim, image_tokenizer=width)
        check_text_encoder(text_encoder, transformer)
        check_settings(*SHARED.split(), drafter=drafter, transformer=transformer)
        self.register_modules(
            transformer=transformer,
            vq=vq,
            tokenizer=tokenizer,
            text_encoder=text_encoder,
            drafter=drafter,
            upscaler=upscaler,
        )
        self.name_classes(id2label)
        self.generation_config = {
            "guidance_scale": 1.0,
            "temperature": 1.0,
            "guidance_schedule": "linear",
            "num_diffusion_steps": 25,
        }
        self.decoding = AutoregressiveDecoding()

    @property
    def decoded_size(self) -> tuple[int, int]:
        config = self.transformer.config
        return (config.grid_size * config.patch_size * self.vq.scale_factor,) * 2

    def compile(self, *, kept_bytes: int = KEPT_BYTES, **options) -> None:
        """Compile the forward passes of the transformers and their heads with `torch.compile`, which takes `options`.
        A step calls a head many times, so it is not compiled as a whole. On a CUDA device it is captured as a whole,
        see `ARPipeline.compile`."""
        for part in filter(None, (self.transformer, self.drafter)):
            part.compile(**options)
            part.denoising_head.compile(**options)
        self.capture(kept_bytes=kept_bytes)

    def sampling(self, **settings) -> LatentSampling:
        given = {name: value for name, value in settings.items() if value is not None}
        sampling = LatentSampling(**{**self.generation_config, **given})
        if self.transformer is not None:
            # Refuses more steps than the transformer was trained for, before anything of that size is allocated.
            diffusion_tables(sampling.num_diffusion_steps, self.transformer.config.num_train_timesteps)
        return sampling

    def to_tokens(self, latents: torch.Tensor) -> torch.FloatTensor:
        """Convert unit vectors [B, C, h, w] of the image tokenizer to tokens [B, N, D], whose elements have a variance
        of about 1."""
        patch = self.transformer.config.patch_size
        return F.unfold(latents.float(), kernel_size=patch, stride=patch).transpose(1, 2) * latents.shape[1] ** 0.5

    def to_latents(self, tokens: torch.Tensor) -> torch.FloatTensor:
        """Convert tokens [B, N, D] to unit vectors [B, C, h, w] of the image tokenizer; zero tokens become zeros."""
        patch, grid = self.transformer.config.patch_size, self.transformer.config.grid_size
        folded = F.fold(tokens.transpose(1, 2), (grid * patch,) * 2, kernel_size=patch, stride=patch)
        return F.normalize(folded, dim=1)

    def whole_tokens(self, call: GenerationCall, tokens: torch.Tensor) -> torch.Tensor:
        return self.to_latents(tokens)

    @torch.no_grad()
    def decode_tokens(self, call: GenerationCall, tokens: torch.FloatTensor) -> torch.Tensor:
        """Pixels [B, 3, H, W], nominally in [-1, 1], of the tokens [B, N, D] of a call, drafts included."""
        latents = self.to_latents(tokens.to(self._execution_device)).to(self.vq.dtype)
        return self.upscaled(call, self.vq.decode_latents(latents))

    @pipeline_call(EXAMPLE, ImagePipelineOutput)
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        class_labels: int | str | list[int | str] | torch.LongTensor | None = None,
        *,
        prompt_embeds: torch.Tensor | None = None,
        prompt_attention_mask: torch.Tensor | None = None,
        num_diffusion_steps: int | list[int] | None = None,
        **common: Unpack[LatentArguments],
    ) -> GenerationCall:
        r"""
        Generate images.

        Args:
            {class_or_text}
            {prompt_embeds}
            {continuous_sampling}
            {call}
        """
        condition = prompt, class_labels, prompt_embeds, prompt_attention_mask
        count = self.check_condition(*condition)
        call = self.begin_call(count, num_diffusion_steps=num_diffusion_steps, **common)
        condition = self.encode_prefix(*condition)
        shared = condition, Layout((self.transformer.config.grid_size,) * 2)
        drafter = None if self.drafter is None else LatentLlamaModel(self.drafter, *shared, guided=call.guided)
        model = LatentLlamaModel(self.transformer, *shared, guided=call.guided, drafter=drafter)
        call.bind(model, prompt_names(prompt, count, count))
        return call
