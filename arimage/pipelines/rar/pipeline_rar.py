"""RAR (https://arxiv.org/abs/2411.00776): images of a class, with guidance that grows along the image."""

from typing import Any, Unpack

import torch
from diffusers.image_processor import PipelineImageInput

from ...decoding import Layout, Sampling
from ..abilities import EDITING, TOKEN_SAMPLING, Abilities
from ..arguments import TokenArguments, pipeline_call
from ..call import GenerationCall
from ..components import check_parts
from ..kinds.upscaling import UpscalingPipeline
from ..output import ImagePipelineOutput
from .family import FAMILY
from .transformer_rar import RARTokenModel, RARTransformer
from .vq_maskgit import MaskGITVQModel


EXAMPLE = """
pipe = AutoPipeline.from_pretrained("rar-b-256")
image = pipe("golden retriever", generator=torch.Generator().manual_seed(0)).images[0]
"""


class RARPipeline(UpscalingPipeline):
    """Generates images from a class with RAR, and edits images.

    Args:
        transformer (`RARTransformer`): the next-token model.
        vq (`MaskGITVQModel`): turns images into tokens and back.
        id2label (`dict[int, str]`, *optional*): the names of the classes.
    """

    family = FAMILY
    abilities = Abilities("tokens", TOKEN_SAMPLING | EDITING)
    model_cpu_offload_seq = "transformer->vq"
    _accepts_no_class = True
    _truncates_levels = True

    def __init__(
        self,
        transformer: RARTransformer,
        vq: MaskGITVQModel,
        id2label: dict[int, str] | dict[str, str] | None = None,
    ):
        super().__init__()
        if transformer is not None and vq is not None:
            check_parts("tokens", transformer=transformer.config.vocab_size, image_tokenizer=vq.config.codebook_size)
        self.register_modules(transformer=transformer, vq=vq)
        self.name_classes(id2label)

    def sampling(self, **settings: Any) -> Sampling:
        """See `ARPipeline.sampling`. Guidance grows along the tokens of an image."""
        length = None if self.transformer is None else self.transformer.config.grid_size**2
        return super().sampling(guidance_length=length, **settings)

    @pipeline_call(EXAMPLE, ImagePipelineOutput)
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        class_labels: int | str | list[int | str] | torch.LongTensor | None = None,
        *,
        image: PipelineImageInput | None = None,
        mask_image: PipelineImageInput | None = None,
        guidance_scale_pow: float | None = None,
        **common: Unpack[TokenArguments],
    ) -> GenerationCall:
        r"""
        Generate images. A class id equal to the number of classes means "no class".

        Args:
            prompt (`str` or `list[str]`, *optional*):
                The names of classes ("golden retriever").
            class_labels (`int`, `str`, a list of them or `torch.LongTensor`, *optional*):
                The classes to generate: ids from 0 to `pipe.num_classes`, or names.
            {image}
            {raster_mask}
            guidance_scale_pow (`float`, *optional*, defaults to the checkpoint's):
                How late guidance grows along the image: from none at the first token to nearly `guidance_scale` at the
                last one, along a cosine of (rank / tokens) ** `guidance_scale_pow`. 0 is `guidance_scale` everywhere.
            {common}
        """
        condition = prompt, class_labels, None, None
        count = self.check_condition(*condition)
        call = self.begin_call(count, guidance_scale_pow=guidance_scale_pow, **common)
        self.edit(call, image, mask_image)
        call.model = RARTokenModel(
            self.transformer,
            {name: call.per_image(value) for name, value in self.encode_condition(*condition).items()},
            Layout((self.transformer.config.grid_size,) * 2),
            guided=call.guided,
            codebook=self.vq.code_vectors().to(self._execution_device),
        )
        return call
