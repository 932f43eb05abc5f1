"""MAR (https://arxiv.org/abs/2406.11838): images from a class, with continuous tokens in a random order."""

from typing import Unpack

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from diffusers.image_processor import PipelineImageInput

from ...decoding import LatentSampling, Layout, MaskedDecoding
from ...decoding.run.captured_steps import KEPT_BYTES
from ...models.denoising_head import DenoisingHead, diffusion_tables
from ...tokenizers.tiling import Tiling
from ..abilities import EDITING, LATENT_SAMPLING, Abilities
from ..arguments import LatentArguments, pipeline_call
from ..call import GenerationCall
from ..components import check_parts, check_settings
from ..kinds.class_or_text import ClassOrTextPipeline
from ..output import ImagePipelineOutput
from .family import FAMILY
from .transformer_mar import MARLatentModel, MARTransformer


EXAMPLE = """from arimage import MARPipeline

pipe = MARPipeline.from_pretrained("path/to/mar-b")
image = pipe("golden retriever", generator=torch.Generator().manual_seed(0)).images[0]
"""


def _check_head(transformer: MARTransformer | None, head: DenoisingHead | None) -> None:
    if transformer is None or head is None:
        return
    theirs = head.config.token_dim, head.config.condition_dim
    ours = transformer.config.token_dim, transformer.config.decoder_hidden_size
    check_parts("channels per token and per condition", head=theirs, transformer=ours)


class MARPipeline(ClassOrTextPipeline):
    """Generates images from a class with MAR, and edits images.

    Args:
        transformer (`MARTransformer`): the masked model of continuous tokens.
        head (`DenoisingHead`): denoises a token, given its conditioning vector from the transformer.
        vae (`AutoencoderKL`): decodes tokens to images. All three are needed to generate.
        id2label (`dict[int, str]`, *optional*): the names of the classes.
        drafter (`MARTransformer`, *optional*), drafter_head (`DenoisingHead`, *optional*): a smaller model with the
            same tokens and classes, for `ContinuousSpeculativeDecoding`.
    """

    family = FAMILY
    model_cpu_offload_seq = "transformer->head->vae"
    _optional_components = ["drafter", "drafter_head"]
    # These are small, or run between forward passes of the transformer.
    _exclude_from_cpu_offload = ["head", "drafter", "drafter_head"]
    _accepts_no_class = True
    abilities = Abilities("masked_latents", LATENT_SAMPLING | EDITING | {"num_inference_steps"})

    def __init__(
        self,
        transformer: MARTransformer,
        head: DenoisingHead,
        vae: AutoencoderKL,
        id2label: dict[int, str] | dict[str, str] | None = None,
        drafter: MARTransformer | None = None,
        drafter_head: DenoisingHead | None = None,
    ):
        super().__init__()
        _check_head(transformer, head)
        _check_head(drafter, drafter_head)
        if (drafter is None) != (drafter_head is None):
            raise ValueError("a drafter has a transformer and a head: give drafter and drafter_head, or neither")
        check_settings("token_dim", "patch_size", "grid_size", "num_classes", drafter=drafter, transformer=transformer)
        if transformer is not None and vae is not None:
            width = vae.config["latent_channels"] * transformer.config.patch_size**2
            check_parts("channels per token", transformer=transformer.config.token_dim, image_tokenizer=width)
        self.register_modules(transformer=transformer, head=head, vae=vae, drafter=drafter, drafter_head=drafter_head)
        self._tiling = None if vae is None else Tiling(self.vae_scale_factor)
        self.name_classes(id2label)
        self.generation_config = {
            "guidance_scale": 1.0,
            "temperature": 1.0,
            "guidance_schedule": "linear",
            "num_inference_steps": min(64, transformer.config.grid_size**2) if transformer is not None else 64,
            "num_diffusion_steps": 100,
        }
        self.decoding = MaskedDecoding()

    @property
    def num_classes(self) -> int | None:
        return None if self.transformer is None else self.transformer.config.num_classes

    @property
    def image_sizes(self) -> list[tuple[int, int]]:
        config = self.transformer.config
        return [(config.grid_size * config.patch_size * self.vae_scale_factor,) * 2]

    @property
    def vae_scale_factor(self) -> int:
        """Pixels per latent of the image tokenizer along each side."""
        return 2 ** (len(self.vae.config["block_out_channels"]) - 1)

    def compile(self, *, kept_bytes: int = KEPT_BYTES, **options) -> None:
        """Compile the forward passes of the transformer and the head with `torch.compile`, which takes `options`. A
        step calls the head a hundred times, so it is not compiled as a whole. On a CUDA device it is captured as a
        whole, see `ARPipeline.compile`."""
        for part in filter(None, (self.transformer, self.head, self.drafter, self.drafter_head)):
            part.compile(**options)
        self.capture(kept_bytes=kept_bytes)

    def sampling(self, **settings) -> LatentSampling:
        given = {name: value for name, value in settings.items() if value is not None}
        sampling = LatentSampling(**{**self.generation_config, **given})
        if self.head is not None:
            # Refuses more steps than the head was trained for, before anything of that size is allocated.
            diffusion_tables(sampling.num_diffusion_steps, self.head.config.num_train_timesteps)
        return sampling

    def to_latents(self, tokens: torch.Tensor) -> torch.Tensor:
        """Convert tokens [B, N, D] to latents [B, C, h, w] of the image tokenizer, times its scaling factor."""
        patch, grid = self.transformer.config.patch_size, self.transformer.config.grid_size
        return F.fold(tokens.transpose(1, 2), (grid * patch,) * 2, kernel_size=patch, stride=patch)

    def whole_tokens(self, call: GenerationCall, tokens: torch.Tensor) -> torch.Tensor:
        return self.to_latents(tokens)

    def encode_image(self, pixels: torch.Tensor) -> torch.Tensor:
        """The tokens [B, N, D] of images [B, 3, H, W] in [-1, 1]: the means of the image tokenizer's distribution."""

        def encode(images: torch.Tensor) -> torch.Tensor:
            return self.vae.encode(images).latent_dist.mode()

        latents = self.tiling.encoded(encode, pixels.to(self.vae.dtype))
        latents = latents * self.vae.config["scaling_factor"]
        patch = self.transformer.config.patch_size
        return F.unfold(latents.float(), kernel_size=patch, stride=patch).transpose(1, 2)

    def encode_known_tokens(self, pixels: torch.Tensor, repaint: torch.BoolTensor) -> torch.FloatTensor:
        """The tokens [B, N, D] of images [B, 3, H, W] in [-1, 1], but NaN where any pixel of a token is in `repaint`
        [B, 1, H, W]."""
        side = self.vae_scale_factor * self.transformer.config.patch_size
        generated = F.max_pool2d(repaint.float(), side).flatten(1) > 0
        return self.encode_image(pixels).masked_fill(generated[..., None], torch.nan)

    @torch.no_grad()
    def decode_tokens(self, call: GenerationCall, tokens: torch.FloatTensor) -> torch.Tensor:
        """Pixels [B, 3, H, W], nominally in [-1, 1], of the tokens [B, N, D] of a call, zeros where they are not known
        yet."""
        latents = self.to_latents(tokens.to(self._execution_device)) / self.vae.config["scaling_factor"]

        def decode(latents: torch.Tensor) -> torch.Tensor:
            return self.vae.decode(latents).sample

        return self.tiling.in_tiles(decode, latents.to(self.vae.dtype), before=1, after=self.vae_scale_factor)

    @pipeline_call(EXAMPLE, ImagePipelineOutput)
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        class_labels: int | str | list[int | str] | torch.LongTensor | None = None,
        *,
        image: PipelineImageInput | None = None,
        mask_image: PipelineImageInput | None = None,
        num_inference_steps: int | None = None,
        num_diffusion_steps: int | list[int] | None = None,
        **common: Unpack[LatentArguments],
    ) -> GenerationCall:
        r"""
        Generate images. A class id equal to the number of classes means "no class". Steps are forward passes of
        the transformer: an interrupted call returns the image of the tokens so far.

        Args:
            {class_or_text}
            {image}
            {mask_on_all_sides}
            num_inference_steps (`int`, *optional*, defaults to the checkpoint's):
                Forward passes of the transformer per image, up to the number of its tokens.
            {continuous_sampling}
            {call}
        """
        condition = prompt, class_labels, None, None
        count = self.check_condition(*condition)
        steps = {"num_inference_steps": num_inference_steps, "num_diffusion_steps": num_diffusion_steps}
        call = self.begin_call(count, **steps, **common)
        self.edit(call, image, mask_image)
        labels = call.per_image(self.encode_condition(*condition)["class_labels"])
        drafter, shared = None, (labels, Layout((self.transformer.config.grid_size,) * 2))
        if self.drafter is not None:
            drafter = MARLatentModel(self.drafter, self.drafter_head, *shared, guided=call.guided)
        call.model = MARLatentModel(self.transformer, self.head, *shared, guided=call.guided, drafter=drafter)
        return call
