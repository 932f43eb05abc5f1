"""VAR (https://arxiv.org/abs/2404.02905): images from a class or a text, from coarse to fine."""

from typing import Unpack

import torch
from diffusers.image_processor import PipelineImageInput
from transformers import PreTrainedTokenizerBase, T5EncoderModel

from ...decoding import NextScaleDecoding, Sampling
from ...tokenizers.upscaler import ImageUpscaler
from ...tokenizers.vq_var import VARVQModel
from ..abilities import EDITING, TOKEN_SAMPLING, Abilities
from ..arguments import ScaleArguments, pipeline_call
from ..call import GenerationCall
from ..components import check_parts, check_settings
from ..kinds.class_or_text import check_text_encoder
from ..kinds.maps import ImageMaps
from ..kinds.upscaling import UpscalingPipeline
from ..output import ImagePipelineOutput
from ..text.checks import prompt_names
from .family import FAMILY
from .transformer_var import VARScaleModel, VARTransformer


EXAMPLE = """
pipe = AutoPipeline.from_pretrained("emoji-var")
image = pipe("a red heart", generator=torch.Generator().manual_seed(0)).images[0]
"""


class VARPipeline(ImageMaps, UpscalingPipeline):
    """Generates images from a class or a text with VAR, and edits images.

    Args:
        transformer (`VARTransformer`): the next-scale model, conditioned on a class or on text.
        vq (`VARVQModel`): decodes tokens to images. Both are needed to generate; `encode_prompt` works without them.
        tokenizer (`PreTrainedTokenizerBase`, *optional*), text_encoder (`T5EncoderModel`, *optional*): for text.
            Without them a text-conditional pipeline takes `prompt_embeds`.
        refiner (`VARTransformer`, *optional*): a smaller transformer with the same condition and tokens, for
            `CollaborativeDecoding`.
        upscaler (`ImageUpscaler`, *optional*): enlarges the decoded images. Calls that ask for the size that the image
            tokenizer decodes do without it.
        id2label (`dict[int, str]`, *optional*): the names of the classes of a class-conditional transformer.
    """

    family = FAMILY
    model_cpu_offload_seq = "text_encoder->transformer->refiner->vq->upscaler"
    _optional_components = ["tokenizer", "text_encoder", "refiner", "upscaler"]
    _accepts_no_class = True
    abilities = Abilities("scales", TOKEN_SAMPLING | EDITING, in_maps=True)

    def __init__(
        self,
        transformer: VARTransformer,
        vq: VARVQModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        text_encoder: T5EncoderModel | None = None,
        refiner: VARTransformer | None = None,
        upscaler: ImageUpscaler | None = None,
        id2label: dict[int, str] | dict[str, str] | None = None,
    ):
        super().__init__()
        for name, network in (("transformer", transformer), ("refiner", refiner)):
            if network is None:
                continue
            check_text_encoder(text_encoder, network)
            # `encode_prompt` needs the text encoder only.
            if vq is None:
                continue
            config = network.config
            theirs = (config.vocab_size, config.codebook_dim, tuple(config.scales))
            ours = (vq.config.codebook_size, vq.config.codebook_dim, tuple(vq.config.scales))
            check_parts("tokens, channels per code and scales", **{name: theirs, "image_tokenizer": ours})
        condition = ("conditioning", "num_classes", "caption_dim", "num_condition_tokens")
        check_settings(*condition, refiner=refiner, transformer=transformer)
        self.register_modules(
            transformer=transformer,
            vq=vq,
            tokenizer=tokenizer,
            text_encoder=text_encoder,
            refiner=refiner,
            upscaler=upscaler,
        )
        self.name_classes(id2label)
        self.decoding = NextScaleDecoding()

    @property
    def decoded_size(self) -> tuple[int, int]:
        return (self.vq.config.scales[-1] * self.vq.scale_factor,) * 2

    def num_tokens(self, size: tuple[int, int]) -> int:
        return sum(side**2 for side in self.vq.config.scales)

    def sampling(self, **settings) -> Sampling:
        sampling = super().sampling(**settings)
        if self.vq is not None:
            sampling.check_scales(len(self.vq.config.scales))
        return sampling

    def token_maps(self, tokens: torch.LongTensor) -> list[torch.LongTensor]:
        """Split tokens [B, N] of all scales into one map [B, p, p] per scale."""
        return self.vq.to_maps(tokens)

    def whole_tokens(self, call: GenerationCall, tokens: torch.LongTensor) -> list[torch.LongTensor]:
        return self.token_maps(tokens)

    def encode_image(self, pixels: torch.Tensor) -> list[torch.LongTensor]:
        """The tokens of images [B, 3, H, W] in [-1, 1], one map [B, p, p] per scale."""
        return self.vq.encode(self.to_decoded_size(pixels).to(self.vq.dtype))

    @torch.no_grad()
    def decode_tokens(self, call: GenerationCall, tokens: torch.LongTensor) -> torch.Tensor:
        """Pixels [B, 3, H, W], nominally in [-1, 1], of the tokens [B, N] of a call; -1 is not known yet. The scales
        are decoded up to the first with such a token."""
        return self.upscaled(call, self.vq.decode(self.decided_maps(call, tokens)))

    def decode_result(self, call: GenerationCall, result: torch.Tensor) -> torch.Tensor:
        return self.upscaled(call, self.vq.decode_latents(result))

    @pipeline_call(EXAMPLE, ImagePipelineOutput)
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        class_labels: int | str | list[int | str] | torch.LongTensor | None = None,
        *,
        image: PipelineImageInput | None = None,
        mask_image: PipelineImageInput | None = None,
        prompt_embeds: torch.Tensor | None = None,
        prompt_attention_mask: torch.Tensor | None = None,
        **common: Unpack[ScaleArguments],
    ) -> GenerationCall:
        r"""
        Generate images. Guidance grows from 1 at the first scale to `guidance_scale` at the last; the published
        cfg is `guidance_scale` - 1. `guidance_scale` and `temperature` may also be lists with one number per scale. A
        class id equal to the number of classes means "no class". Steps are scales: an
        interrupted call returns the image of the scales so far.

        Args:
            {class_or_text}
            {image}
            mask_image (as `image`, *optional*):
                White where the image is generated again, black where its pixels stay. A token of the finest scale is
                generated if any of its pixels is white, a token of a coarser scale if most of them are, and the single
                token of the coarsest scale never. New tokens depend on what stays on all sides of them.
            {prompt_embeds}
            {common}
                `"latents"` [B, C, P, P] are what the image tokenizer decodes to pixels.
        """
        condition = prompt, class_labels, prompt_embeds, prompt_attention_mask
        count = self.check_condition(*condition)
        call = self.begin_call(count, **common)
        self.edit(call, image, mask_image)
        condition = self.encode_condition(*condition)
        refiner = None
        if self.refiner is not None:
            refiner = VARScaleModel(self.refiner, self.vq, condition, guided=call.guided)
        model = VARScaleModel(self.transformer, self.vq, condition, guided=call.guided, refiner=refiner)
        call.bind(model, prompt_names(prompt, count, count))
        return call
