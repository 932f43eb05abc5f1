"""Emu3 (https://arxiv.org/abs/2409.18869): images from text with a language model that has image tokens."""

from functools import partial
from typing import Unpack

import torch
from diffusers.image_processor import PipelineImageInput
from transformers import Emu3ForConditionalGeneration, Emu3VQVAE, PreTrainedTokenizerFast

from ...decoding import Layout
from ...kernels.codebook import nearest_code
from ...models.compiled import compiled_like
from ...models.language_heads import CodeHead
from ...models.language_model import LanguageTokenModel
from ...models.neighbours import NeighbourModel
from ...tokenizers.tiling import Tiling
from ..abilities import EDITING, TOKEN_SAMPLING, Abilities
from ..arguments import TokenArguments, pipeline_call
from ..base import ARImagePipeline
from ..call import GenerationCall
from ..output import ImagePipelineOutput
from ..text.checks import as_text, as_texts, check_one_of
from ..text.token_prompts import RATIOS, stack
from .family import FAMILY
from .prompts import END_OF_ROW, PROMPT_SUFFIX, Emu3Prompts, first_code_of, image_size
from .vq_emu3 import decode_image, encode_latents


EXAMPLE = """
# downloaded and converted once; `arimage models` says how large it is
pipe = AutoPipeline.from_pretrained("emu3-gen", dtype=torch.bfloat16).to("cuda")
image = pipe("a shiba inu in the snow", ratio="16:9", decoding="sjd").images[0]
"""


class Emu3Pipeline(ARImagePipeline):
    """Generates images from text with Emu3-Gen or Emu3-Stage1, in any size and aspect ratio near the trained area.

    Args:
        model (`Emu3ForConditionalGeneration`): language model and image tokenizer.
        tokenizer (`PreTrainedTokenizerFast`, *optional*): the text tokenizer. Without it the pipeline takes
            `input_ids`.
        image_area (`int`): the area in pixels that the model was trained for: 720 * 720 for Emu3-Gen, 512 * 512 for
            Emu3-Stage1.
        neighbours (`NeighbourModel`, *optional*): fitted to tokens like those of this model, for the `corrections` of
            `SpeculativeJacobiDecoding`.

    Raises:
        ValueError: if the model's `vocabulary_map` does not name the tokens of an image.
    """

    family = FAMILY
    abilities = Abilities("tokens", TOKEN_SAMPLING | EDITING | {"negative_prompt", "prompt_suffix", "ratio"})
    model_cpu_offload_seq = "model"
    _lora_loadable_modules = ["model"]
    _optional_components = ["tokenizer", "neighbours"]
    # It runs between forward passes.
    _exclude_from_cpu_offload = ["neighbours"]

    def __init__(
        self,
        model: Emu3ForConditionalGeneration,
        tokenizer: PreTrainedTokenizerFast | None = None,
        image_area: int = 720 * 720,
        neighbours: NeighbourModel | None = None,
    ):
        super().__init__()
        self._vocab_size = model.config.vq_config.codebook_size
        self._first_code = first_code_of(model.config.vocabulary_map or {}, self._vocab_size)
        self.register_modules(model=model, tokenizer=tokenizer, neighbours=neighbours)
        self.register_to_config(image_area=image_area)
        self._tiling = Tiling(self.scale_factor)

    @property
    def vq(self) -> Emu3VQVAE:
        """The image tokenizer."""
        return self.model.model.vqmodel

    @property
    def scale_factor(self) -> int:
        """Pixels per token along each side."""
        return self.vq.spatial_scale_factor

    @property
    def image_sizes(self) -> list[tuple[int, int]]:
        return list(dict.fromkeys(self.image_size(ratio=ratio) for ratio in RATIOS))

    def image_size(
        self, height: int | None = None, width: int | None = None, ratio: str | None = None
    ) -> tuple[int, int]:
        """Height and width in pixels of the images of a call with these arguments."""
        return image_size(self.config.image_area, self.scale_factor, height, width, ratio)

    @property
    def prompts(self) -> Emu3Prompts:
        config = self.model.config
        return Emu3Prompts(self.tokenizer, config.vocabulary_map, config.text_config.vocab_size, self.scale_factor)

    def encode_prompt(
        self, prompt: str | list[str], size: tuple[int, int]
    ) -> tuple[torch.LongTensor, torch.LongTensor]:
        """Token ids [B, P] of texts with the header of an image of `size`, padded on the left, and their mask."""
        return self.prompts.encode(as_texts(prompt), size)

    def encode_image(self, pixels: torch.Tensor) -> torch.LongTensor:
        """The tokens [B, h, w] of images [B, 3, H, W] in [-1, 1]."""
        vq = self.on_device(self.model).model.vqmodel
        latents = self.tiling.encoded(partial(encode_latents, vq), pixels)
        latents = latents.permute(0, 2, 3, 1).to(self._execution_device)
        return nearest_code(latents.flatten(0, 2), self.code_vectors()).view(latents.shape[:-1])

    def code_vectors(self) -> torch.Tensor:
        """The vectors of all image tokens [V, D]. Where weights are offloaded, only a call brings them."""
        codes = torch.arange(self._vocab_size, device=self._execution_device)
        return self.vq.quantize.embedding(codes).to(self._execution_device)

    def decode_image(self, tokens: torch.LongTensor) -> torch.Tensor:
        """Pixels [B, 3, H, W], nominally in [-1, 1], of tokens [B, h, w]."""
        return decode_image(self.on_device(self.model).model.vqmodel, tokens)

    @torch.no_grad()
    def decode_tokens(self, call: GenerationCall, tokens: torch.LongTensor) -> torch.Tensor:
        """Pixels [B, 3, H, W], nominally in [-1, 1], of tokens [B, N] of a call, drafts included; -1 is unknown."""
        tokens = self.whole_tokens(call, tokens.to(self._execution_device).clamp(min=0))
        pixels = self.tiling.in_tiles(self.decode_image, tokens, before=1, after=self.scale_factor)
        return pixels.to(self._execution_device)

    @pipeline_call(EXAMPLE, ImagePipelineOutput)
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        negative_prompt: str | list[str] | None = None,
        *,
        prompt_suffix: str = PROMPT_SUFFIX,
        ratio: str | None = None,
        image: PipelineImageInput | None = None,
        mask_image: PipelineImageInput | None = None,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        negative_input_ids: torch.LongTensor | None = None,
        negative_attention_mask: torch.Tensor | None = None,
        **common: Unpack[TokenArguments],
    ) -> GenerationCall:
        r"""
        Generate images.

        Args:
            prompt (`str` or `list[str]`, *optional*):
                What to generate.
            negative_prompt (`str` or `list[str]`, *optional*, defaults to the authors'):
                What to avoid in the images: one for all prompts, or one per prompt.
            prompt_suffix (`str`, *optional*, defaults to the authors' words for quality):
                Text added to every prompt, by default words for quality; `""` for none.
            ratio (`str`, *optional*, defaults to `"1:1"`):
                Width to height, as in `"16:9"`, in place of `height` and `width`: selects the size with this ratio and
                the trained area.
            {image}
            {raster_mask}
            {input_ids}
            {common}
        """
        check_one_of(prompt=prompt, input_ids=input_ids)
        if negative_prompt is not None and negative_input_ids is not None:
            raise ValueError("give either a negative_prompt or negative_input_ids")
        as_text(prompt_suffix, "prompt_suffix")
        size = self.image_size(common.pop("height", None), common.pop("width", None), ratio)
        prompts = self.prompts
        branches = [prompts.ids("prompt", prompt, input_ids, attention_mask, size, prompt_suffix)]
        count = len(branches[0][0])
        call = self.begin_call(count, size, **common)
        if call.guided or negative_prompt is not None or negative_input_ids is not None:
            negative = prompts.negative_ids(negative_prompt, negative_input_ids, negative_attention_mask, size, count)
            branches += [negative] if call.guided else []
        self.edit(call, image, mask_image)

        # Negative prompts are sequences with their own positions and header.
        rows, masks = stack(branches, self.model.config.text_config.pad_token_id, self._execution_device)
        text_model = self.on_device(self.model).model.text_model
        embedding, first = text_model.get_input_embeddings(), self._first_code
        # The authors apply guidance to log-probabilities over the whole vocabulary. These differ from logits by a
        # constant for each of the two sides, so guided logits of the image tokens alone give the same distribution.
        model = LanguageTokenModel(
            compiled_like(self.model, text_model),
            embed=lambda tokens: embedding(tokens + first),
            head=CodeHead(self.model.lm_head, first, self._vocab_size),
            layout=Layout((size[0] // self.scale_factor, size[1] // self.scale_factor)),
            input_ids=rows,
            attention_mask=masks,
            row_end=self.model.config.vocabulary_map[END_OF_ROW],
            codebook=self.code_vectors(),
            branches=len(branches),
            network=self.model,
            neighbours=self.neighbours,
        )
        call.bind(model)
        return call
