"""The base of pipelines whose models generate tokens in any order."""

from collections.abc import Callable
from dataclasses import replace
from typing import Unpack, get_args

import torch
from diffusers import ModelMixin
from diffusers.image_processor import PipelineImageInput

from ...decoding import Decoding, GroupDecoding, Layout, Order, order_of
from ...tokenizers.vq_llamagen import LlamaGenVQModel
from ...tokenizers.vq_patches import PatchVQModel
from ..abilities import EDITING, TOKEN_SAMPLING, Abilities
from ..arguments import TokenArguments, pipeline_call
from ..call import GenerationCall
from ..components import check_parts
from ..output import ImagePipelineOutput
from ..text.checks import prompt_names
from .class_or_text import check_text_encoder
from .upscaling import UpscalingPipeline


# Pixels per token along each side; the same for all published image tokenizers.
PIXELS_PER_TOKEN = 16
# The groups that the locality order uses if the decoding has none, as published for 20 forward passes.
LOCALITY = GroupDecoding(20, "cosine")

EXAMPLE = """
pipe = AutoPipeline.from_pretrained("emoji-arpg")
image = pipe("a red heart", generator=torch.Generator().manual_seed(0)).images[0]

# Published weights, several tokens per forward pass
pipe = AutoPipeline.from_pretrained("lpd-l-256")
image = pipe(class_labels="golden retriever", decoding="groups:groups=20", order="locality").images[0]
"""


class AnyOrderPipeline(UpscalingPipeline):
    """Base of pipelines whose tokens come in any order. A family names the class of its `TokenModel`.

    Args:
        transformer: the any-order model.
        vq (`LlamaGenVQModel` or `PatchVQModel`, *optional*): turns its tokens into images. Without it calls return
            tokens.
        id2label (`dict[int, str]`, *optional*): the names of the classes of a class-conditional transformer.
        parts: the optional components of a family: `tokenizer` and `text_encoder`, `upscaler`.

    Attributes:
        order: the default order of the tokens.
    """

    model_cpu_offload_seq = "transformer->vq"
    _optional_components = ["vq"]
    _saved_defaults = ("order",)
    abilities = Abilities("tokens", TOKEN_SAMPLING | EDITING | {"order"}, predicts_groups=True)
    # Set by each family.
    _token_model: Callable

    def __init__(
        self,
        transformer: ModelMixin,
        vq: LlamaGenVQModel | PatchVQModel | None,
        id2label: dict[int, str] | dict[str, str] | None = None,
        **parts,
    ):
        super().__init__()
        if vq is not None and transformer is not None:
            check_parts("tokens", transformer=transformer.config.vocab_size, image_tokenizer=vq.config.codebook_size)
        check_text_encoder(parts.get("text_encoder"), transformer)
        self.register_modules(transformer=transformer, vq=vq, **parts)
        self.name_classes(id2label)
        self.order = "farthest"

    @property
    def order(self) -> str:
        return self._order

    @order.setter
    def order(self, order: str):
        if order not in get_args(Order):
            raise ValueError(f"order is {order!r}: choose among {', '.join(get_args(Order))}")
        self._order = order

    @property
    def decoded_size(self) -> tuple[int, int]:
        factor = PIXELS_PER_TOKEN if self.vq is None else self.vq.scale_factor
        return (self.transformer.config.grid_size * factor,) * 2

    def _layout(self, call: GenerationCall, order: str | torch.LongTensor, decoding: Decoding | None) -> Layout:
        """The layout of the images of a call. Known tokens come first, so that all others attend to them; `forced` is
        rearranged by rank."""
        shape, batch = (self.transformer.config.grid_size,) * 2, len(call.seeds)
        count, given = shape[0] * shape[1], call.sampling.forced
        generated = None if given is None else given < 0
        if isinstance(order, str):
            if order not in get_args(Order):
                raise ValueError(
                    f"order is {order!r}: choose among {', '.join(get_args(Order))}, or give a LongTensor"
                )
            places = _places(order, shape, call.seeds, decoding, None if generated is None else ~generated)
        else:
            whole = isinstance(order, torch.Tensor) and order.dtype in (torch.int64, torch.int32)
            if not whole or order.shape not in ((count,), (batch, count)):
                raise ValueError(
                    f"order is {order!r}: give a LongTensor [{count}] or [{batch}, {count}], the place of each rank"
                )
            places = order.to(call.seeds.device, torch.long).expand(batch, -1).clone()
        if given is None or generated is None:
            return Layout(shape, places)
        if places is None:
            places = torch.arange(count, device=given.device).expand(batch, -1)
        last = generated.gather(1, places)
        layout = Layout(shape, places.gather(1, last.long().argsort(dim=1, stable=True)))
        call.sampling = replace(call.sampling, forced=layout.to_ranks(given))
        return layout

    # The "locality" order is computed for the groups of the decoding.
    @pipeline_call(EXAMPLE, ImagePipelineOutput, reads=("decoding", "output_type"))
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        class_labels: int | str | list[int | str] | torch.LongTensor | None = None,
        *,
        image: PipelineImageInput | None = None,
        mask_image: PipelineImageInput | None = None,
        prompt_embeds: torch.Tensor | None = None,
        prompt_attention_mask: torch.Tensor | None = None,
        order: str | torch.LongTensor | None = None,
        **common: Unpack[TokenArguments],
    ) -> GenerationCall:
        r"""
        Generate images.

        Args:
            {class_or_text}
            {image}
            mask_image (as `image`, *optional*):
                White where the image is generated again, black where its pixels stay. A token is generated if any of
                its pixels is white. Tokens that stay come first in the order, so that the new tokens attend to all of
                them, on all sides.
            {prompt_embeds}
            order (`str` or `torch.LongTensor`, *optional*, defaults to `pipe.order`):
                The order in which the tokens of an image are generated: `"raster"`, or an order that is derived from
                the image's seed: `"random"`; `"farthest"`, in which each token is as far as possible from all earlier
                ones; or `"locality"`, an order for the groups of a `GroupDecoding`. Or the place of each rank,
                [N] or [B, N].
            {common}
        """
        output_type, decoding = common.pop("output_type", "latent"), common.pop("decoding", None)
        if self.vq is None and (output_type != "latent" or image is not None):
            raise ValueError(
                'this pipeline has no image tokenizer: give output_type="latent" and no image, or convert the '
                "checkpoint again with --tokenizer"
            )
        condition = prompt, class_labels, prompt_embeds, prompt_attention_mask
        count = self.check_condition(*condition)
        call = self.begin_call(count, **common)
        self.edit(call, image, mask_image)
        decoding = None if decoding is None else self.as_decoding(decoding)
        layout = self._layout(call, self.order if order is None else order, decoding)
        condition = self.encode_prefix(*condition)
        # Each image has its own order, also those of one prompt.
        model = self._token_model(
            self.transformer,
            {name: call.per_image(value) for name, value in condition.items()},
            layout,
            guided=call.guided,
            codebook=None if self.vq is None else self.vq.code_vectors().to(self._execution_device),
        )
        names = prompt_names(prompt, count, count)
        model.merge_prompts([name for name in names for _ in range(call.num_images_per_prompt)])
        call.model = model
        return call


def _places(
    order: str,
    shape: tuple[int, int],
    seeds: torch.LongTensor,
    decoding: Decoding | None,
    kept: torch.BoolTensor | None,
) -> torch.LongTensor | None:
    """`order_of`, for the groups that a decoding has in each image. The tokens `kept` [B, N] are one of them."""
    count = shape[0] * shape[1]
    # Groups that do not fit are refused later, by the decoding.
    if order != "locality" or not isinstance(decoding, GroupDecoding) or sum(decoding.sizes(count)) != count:
        return order_of(order, shape, seeds, LOCALITY.sizes(count), kept)
    if kept is None:
        return order_of(order, shape, seeds, decoding.sizes(count))
    numbers, places = kept.sum(1), seeds.new_empty(len(seeds), count)
    for number in numbers.unique().tolist():
        images = numbers == number
        places[images] = order_of(order, shape, seeds[images], decoding.sizes(count, number), kept[images])
    return places
