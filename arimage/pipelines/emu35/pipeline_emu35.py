"""Emu3.5 (https://arxiv.org/abs/2510.26583): images from text, or from text and reference images, with a language
model that has image tokens."""

from typing import Unpack

import torch
from diffusers.image_processor import PipelineImageInput, VaeImageProcessor
from PIL import Image
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from ...decoding import Layout
from ...models.compiled import compiled_like
from ...models.language_heads import CodeHead
from ...models.language_model import LanguageTokenModel
from ..abilities import EDITING, TOKEN_SAMPLING, Abilities
from ..arguments import TokenArguments, pipeline_call
from ..base import ARImagePipeline
from ..call import GenerationCall
from ..output import ImagePipelineOutput
from ..pictures.references import References, as_references, common_size, each_once, split_references
from ..text.checks import MAX_PROMPT_CHARACTERS, as_texts, check_one_of, check_token_ids
from ..text.token_prompts import Ids, check_negatives, stack
from .family import FAMILY
from .ibq_emu35 import IBQModel
from .prompts import TRAINED, TRAINED_AREA, Emu35Prompts, image_size, smart_resize, token_ids_of


EXAMPLE = """
from diffusers.utils import load_image

# downloaded and converted once; `arimage models` says how large it is
pipe = AutoPipeline.from_pretrained("emu3.5-image", dtype=torch.bfloat16).to("cuda")
image = pipe("a shiba inu in the snow", ratio="16:9", decoding="sjd-coupled").images[0]
image = pipe("make it night", image=load_image("street.png"), decoding="sjd-coupled").images[0]
"""


class Emu35Pipeline(ARImagePipeline):
    """Generates images from text, or from text and up to three reference images, with Emu3.5-Image or Emu3.5, in any
    size and aspect ratio near the trained area.

    Args:
        model (`Qwen3ForCausalLM`): the language model.
        vq (`IBQModel`): the image tokenizer.
        tokenizer (`PreTrainedTokenizerFast`, *optional*): the text tokenizer, without the names of the codes. Without
            it the pipeline takes `input_ids`.
        image_area (`int`): the area in pixels that the model was trained for.
        token_ids (`dict[str, int]`, *optional*): the ids of the tokens of a prompt and of code 0, by the names in
            `emu35_prompts.TOKENS` and `"first_code"`; by default those of the tokenizer.
        edit_guidance_scale (`float`): the default of `guidance_scale` with reference images.

    Raises:
        ValueError: if the ids are not those of the tokenizer, or the codes do not end the model's vocabulary.
    """

    family = FAMILY
    abilities = Abilities(
        "tokens", TOKEN_SAMPLING | EDITING | {"image_reference", "negative_prompt", "ratio"}, max_references=3
    )
    model_cpu_offload_seq = "model->vq"
    _lora_loadable_modules = ["model"]
    _optional_components = ["tokenizer"]
    # So do the authors.
    _truncates_levels = True

    def __init__(
        self,
        model: Qwen3ForCausalLM,
        vq: IBQModel,
        tokenizer: PreTrainedTokenizerFast | None = None,
        image_area: int = TRAINED_AREA,
        token_ids: dict[str, int] | None = None,
        edit_guidance_scale: float = 3.0,
    ):
        super().__init__()
        named = None if tokenizer is None else token_ids_of(tokenizer)
        token_ids = token_ids or named
        if token_ids is None:
            raise ValueError("there are neither a tokenizer nor token_ids: give one of the two")
        if named not in (None, token_ids):
            raise ValueError(f"token_ids are {token_ids}, but the tokenizer has {named}: leave them out")
        codes, ends = vq.config.num_vq_embeddings, model.config.vocab_size
        if token_ids["first_code"] + codes != ends:
            raise ValueError(
                f"the model has {ends} tokens, where {codes} codes from {token_ids['first_code']} on were expected at "
                "the end: load the image tokenizer, the text tokenizer and the model that belong together"
            )
        self.register_modules(model=model, vq=vq, tokenizer=tokenizer)
        self.register_to_config(image_area=image_area, token_ids=token_ids, edit_guidance_scale=edit_guidance_scale)

    @property
    def image_sizes(self) -> list[tuple[int, int]]:
        return list(dict.fromkeys(self.image_size(ratio=ratio) for ratio in TRAINED))

    def image_size(
        self, height: int | None = None, width: int | None = None, ratio: str | None = None
    ) -> tuple[int, int]:
        """Height and width in pixels of the images of a call with these arguments and no references."""
        return image_size(self.config.image_area, height, width, ratio)

    @property
    def reference_guidance_scale(self) -> float:
        return self.config.edit_guidance_scale

    @property
    def prompts(self) -> Emu35Prompts:
        return Emu35Prompts(self.tokenizer, self.config.token_ids, self.model.config.vocab_size)

    def _image_ids(self, references: list[list[Image.Image]]) -> list[list[int]]:
        """The token ids of all reference images of each prompt."""

        def encode(image: Image.Image) -> list[int]:
            pixels = VaeImageProcessor(do_resize=False).preprocess(image).to(self._execution_device)
            return self.prompts.image_ids(self.encode_image(pixels)[0])

        return [[token for ids in listed for token in ids] for listed in each_once(encode, references)]

    def _model(self, branches: list[Ids], size: tuple[int, int], codebook: torch.Tensor) -> LanguageTokenModel:
        # Negative prompts are sequences with their own positions and header.
        token_ids = self.config.token_ids
        rows, masks = stack(branches, token_ids["bos"], self._execution_device)
        model = self.on_device(self.model)
        embedding, first = model.get_input_embeddings(), token_ids["first_code"]
        # The authors apply guidance to log-probabilities over the whole vocabulary. These differ from logits by a
        # constant for each of the two sides, so guided logits of the image tokens alone give the same distribution.
        return LanguageTokenModel(
            compiled_like(model, model.model),
            embed=lambda tokens: embedding(tokens + first),
            head=CodeHead(model.lm_head, first, len(codebook)),
            layout=Layout((size[0] // self.vq.scale_factor, size[1] // self.vq.scale_factor)),
            input_ids=rows,
            attention_mask=masks,
            row_end=token_ids["row_end"],
            codebook=codebook,
            branches=len(branches),
            network=model,
        )

    def encode_image(self, pixels: torch.Tensor) -> torch.LongTensor:
        """The tokens [B, h, w] of images [B, 3, H, W] in [-1, 1]."""
        return self.on_device(self.vq).encode_codes(pixels)

    def decode_image(self, tokens: torch.LongTensor) -> torch.Tensor:
        """Pixels [B, 3, H, W], nominally in [-1, 1], of tokens [B, h, w]."""
        return self.on_device(self.vq).decode_codes(tokens)

    @torch.no_grad()
    def decode_tokens(self, call: GenerationCall, tokens: torch.LongTensor) -> torch.Tensor:
        """Pixels [B, 3, H, W], nominally in [-1, 1], of tokens [B, N] of a call, drafts included; -1 is unknown."""
        pixels = self.decode_image(self.whole_tokens(call, tokens.to(self._execution_device).clamp(min=0)))
        if self.current_call is not None:
            # The next forward pass needs it.
            self.on_device(self.model)
        return pixels

    @pipeline_call(EXAMPLE, ImagePipelineOutput)
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        negative_prompt: str | list[str] | None = None,
        *,
        image: References | None = None,
        mask_image: PipelineImageInput | None = None,
        image_reference: References | None = None,
        ratio: str | None = None,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        negative_input_ids: torch.LongTensor | None = None,
        negative_attention_mask: torch.Tensor | None = None,
        **common: Unpack[TokenArguments],
    ) -> GenerationCall:
        r"""
        Generate images, or edit given ones.

        Args:
            prompt (`str` or `list[str]`, *optional*):
                What to generate, or how to change the reference images.
            negative_prompt (`str` or `list[str]`, *optional*):
                What to avoid in the images: one for all prompts, or one per prompt. The authors use none.
            {references}
            {raster_mask}
            image_reference (as `image`, *optional*):
                Reference images of a call with `mask_image`.
            ratio (`str`, *optional*, defaults to `"1:1"`):
                Width to height, as in `"16:9"`, in place of `height` and `width`: selects the size with this ratio and
                the trained area. With reference images and no size, images have the ratio of the last reference.
            {input_ids}
            {common}
        """
        check_one_of(prompt=prompt, input_ids=input_ids)
        height, width = common.pop("height", None), common.pop("width", None)
        if negative_prompt is not None and negative_input_ids is not None:
            raise ValueError("give either a negative_prompt or negative_input_ids")
        texts = None if prompt is None else as_texts(prompt, "prompt", MAX_PROMPT_CHARACTERS)
        negatives = "" if negative_prompt is None else negative_prompt
        negatives = as_texts(negatives, "negative_prompt", MAX_PROMPT_CHARACTERS)
        count = check_token_ids("input_ids", input_ids, None) if texts is None else len(texts)
        if negative_input_ids is None:
            check_negatives("negative_prompt", len(negatives), count)
        image, given = split_references(image, mask_image, image_reference)
        references = None
        if given is not None:
            if texts is None:
                raise ValueError("input_ids hold their reference images already: give a prompt with references")
            name = "image" if image_reference is None else "image_reference"
            listed = as_references(name, given, count, self.abilities.max_references)
            references = each_once(lambda one: smart_resize(name, one, self.config.image_area), listed)
            if common.get("guidance_scale") is None:
                common["guidance_scale"] = self.reference_guidance_scale
            if height is width is ratio is None:
                width, height = common_size(references)
        size = self.image_size(height, width, ratio)
        call = self.begin_call(count, size, **common)

        # First, since bringing one component to the device sends the one before it away.
        self.edit(call, image, mask_image)
        shown = None if references is None else self._image_ids(references)
        codebook = self.on_device(self.vq).codebook(self._execution_device)
        prompts = self.prompts
        if texts is None:
            branches = [prompts.check_ids("input_ids", input_ids, attention_mask, size)]
        else:
            branches = [prompts.encode(texts, size, shown)]
        if negative_input_ids is not None:
            negative = prompts.check_ids("negative_input_ids", negative_input_ids, negative_attention_mask, size)
            check_negatives("negative_input_ids", len(negative[0]), count)
            branches += [negative] if call.guided else []
        elif call.guided:
            if self.tokenizer is None:
                raise ValueError("this pipeline has no tokenizer: give negative_input_ids, or guidance_scale=1")
            negatives = negatives if shown is None else negatives * (count // len(negatives))
            branches.append(prompts.encode(negatives, size, shown, negative=True))
        call.bind(self._model(branches, size, codebook))
        return call
