"""Janus (https://arxiv.org/abs/2410.13848) and Janus-Pro (https://arxiv.org/abs/2501.17811): images from text, and
text from images."""

from typing import Unpack

import torch
import torch.nn.functional as F
from diffusers.image_processor import PipelineImageInput
from PIL import Image
from transformers import JanusForConditionalGeneration, JanusModel, JanusProcessor

from ...decoding import Layout
from ...kernels.codebook import nearest_code
from ...models.compiled import compiled_like
from ...models.language_heads import CodeEmbedding
from ...models.language_model import LanguageTokenModel
from ...models.neighbours import NeighbourModel
from ...tokenizers.tiling import Tiling
from ..abilities import EDITING, TOKEN_SAMPLING, Abilities
from ..arguments import TokenArguments, pipeline_call
from ..base import ARImagePipeline
from ..call import GenerationCall
from ..output import ImagePipelineOutput
from ..text.checks import MAX_PROMPT_CHARACTERS, as_texts, check_one_of, check_token_ids
from .family import FAMILY
from .prompts import JanusPrompts, begin_of_image


EXAMPLE = """
# downloaded and converted once; `arimage models` says how large it is
pipe = AutoPipeline.from_pretrained("janus-pro-1b", dtype=torch.bfloat16).to("cuda")
image = pipe("a red heart", generator=torch.Generator().manual_seed(0)).images[0]
"""


class JanusPipeline(ARImagePipeline):
    """Generates images from text with Janus or Janus-Pro, edits images, and answers questions about images.

    Args:
        model (`JanusForConditionalGeneration`): the language model, the image tokenizer and the vision encoder. Its
            `generation_config` names the tokens of a prompt: `bos_token_id`, `pad_token_id` and, in
            `generation_kwargs`, `boi_token_id`.
        processor (`JanusProcessor`, *optional*): tokenizes prompts and preprocesses images. Without it the pipeline
            takes `input_ids`.
        neighbours (`NeighbourModel`, *optional*): fitted to tokens like those of this model, for the `corrections` of
            `SpeculativeJacobiDecoding`.

    Raises:
        ValueError: if the model does not name a begin-of-image token.
    """

    family = FAMILY
    abilities = Abilities("tokens", TOKEN_SAMPLING | EDITING)
    model_cpu_offload_seq = "model"
    _lora_loadable_modules = ["model"]
    _optional_components = ["processor", "neighbours"]
    # It runs between forward passes.
    _exclude_from_cpu_offload = ["neighbours"]
    _truncates_levels = True

    def __init__(
        self,
        model: JanusForConditionalGeneration,
        processor: JanusProcessor | None = None,
        neighbours: NeighbourModel | None = None,
    ):
        super().__init__()
        self.begin_of_image = begin_of_image(model.generation_config)
        self.register_modules(model=model, processor=processor, neighbours=neighbours)
        self.generation_config["guidance_scale"] = 5.0
        self._tiling = Tiling(self.scale_factor)

    @property
    def parts(self) -> JanusModel:
        """The networks of the model, on their device."""
        return self.on_device(self.model).model

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of tokens in an image."""
        return (self.model.config.vq_config.num_patches,) * 2

    @property
    def scale_factor(self) -> int:
        """Pixels per token along each side."""
        return 2 ** (len(self.model.config.vq_config.channel_multiplier) - 1)

    @property
    def image_sizes(self) -> list[tuple[int, int]]:
        return [(self.grid[0] * self.scale_factor, self.grid[1] * self.scale_factor)]

    @property
    def prompts(self) -> JanusPrompts:
        return JanusPrompts(self.processor)

    def encode_prompt(self, prompt: str | list[str]) -> tuple[torch.LongTensor, torch.LongTensor]:
        """Token ids [B, P] of texts in the model's template, padded on the left, and their mask [B, P]."""
        ids, mask = self.prompts.encode(as_texts(prompt))
        return ids.to(self._execution_device), mask.to(self._execution_device)

    @torch.no_grad()
    def understand(
        self, image: Image.Image | list[Image.Image], question: str | list[str], **generate_kwargs
    ) -> list[str]:
        """Answer questions about images.

        Args:
            image, question: one of each, or lists of equal length. A single image or question is used for all of the
                others.
            generate_kwargs: arguments of transformers' `generate`, by default `max_new_tokens=512, do_sample=False`.

        Raises:
            ValueError: if the pipeline has no processor, or the lists have different lengths.
        """
        inputs = self.prompts.questions(image, as_texts(question, "question")).to(
            self._execution_device, self.model.dtype
        )
        ids = self.model.generate(**inputs, **{"max_new_tokens": 512, "do_sample": False, **generate_kwargs})
        self.maybe_free_model_hooks()
        return self.processor.batch_decode(ids[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)

    def code_vectors(self) -> torch.Tensor:
        """The unit vectors of all tokens, float32 [V, D]."""
        codebook = self.parts.vqmodel.quantize.embedding
        codes = torch.arange(codebook.weight.shape[0], device=self._execution_device)
        return F.normalize(codebook(codes).float(), dim=-1).to(self._execution_device)

    def encode_image(self, pixels: torch.Tensor) -> torch.LongTensor:
        """Encode images [B, 3, H, W] in [-1, 1] to the tokens [B, h, w] whose vectors have the greatest cosine
        similarity. This is what the original code does; transformers compares vectors that are not normalised."""
        vq = self.parts.vqmodel
        latents = self.tiling.encoded(vq.encoder, pixels.to(vq.dtype))
        latents = vq.quant_conv(latents).permute(0, 2, 3, 1)
        latents = F.normalize(latents.float(), dim=-1).to(self._execution_device)
        return nearest_code(latents.flatten(0, 2), self.code_vectors()).view(latents.shape[:-1])

    def decode_image(self, tokens: torch.LongTensor) -> torch.Tensor:
        """Pixels [B, 3, H, W], nominally in [-1, 1], of tokens [B, h, w]."""
        vq = self.parts.vqmodel
        vectors = F.normalize(vq.quantize.embedding(tokens), dim=-1).permute(0, 3, 1, 2).contiguous()
        return vq.decoder(vq.post_quant_conv(vectors))

    @torch.no_grad()
    def decode_tokens(self, call: GenerationCall, tokens: torch.LongTensor) -> torch.Tensor:
        """Pixels [B, 3, H, W], nominally in [-1, 1], of the tokens [B, N] of a call, drafts included; -1 is not known
        yet."""
        tokens = self.whole_tokens(call, tokens.to(self._execution_device).clamp(min=0))
        pixels = self.tiling.in_tiles(self.decode_image, tokens, before=1, after=self.scale_factor)
        return pixels.to(self._execution_device)

    @pipeline_call(EXAMPLE, ImagePipelineOutput)
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        *,
        image: PipelineImageInput | None = None,
        mask_image: PipelineImageInput | None = None,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        **common: Unpack[TokenArguments],
    ) -> GenerationCall:
        r"""
        Generate images.

        Args:
            prompt (`str` or `list[str]`, *optional*):
                What to generate. Prompts may differ in length.
            {image}
            {raster_mask}
            input_ids (`torch.LongTensor`, *optional*), attention_mask (`torch.Tensor`, *optional*):
                Token ids [B, P] that begin with the BOS and end with the begin-of-image token, padded on the left, and
                their mask [B, P], in place of `prompt`. Without a mask there is no padding.
            {common}
        """
        check_one_of(prompt=prompt, input_ids=input_ids)
        if prompt is None:
            size = self.model.config.text_config.vocab_size
            check_token_ids("input_ids", input_ids, attention_mask, last=self.begin_of_image, vocab_size=size)
        else:
            input_ids, attention_mask = self.encode_prompt(as_texts(prompt, limit=MAX_PROMPT_CHARACTERS))
        assert input_ids is not None
        count = len(input_ids)
        call = self.begin_call(count, **common)
        self.edit(call, image, mask_image)
        ids = input_ids.to(self._execution_device)
        mask = torch.ones_like(ids) if attention_mask is None else attention_mask.to(ids.device)
        if call.guided:
            # The unconditional rows have padding tokens in place of all words, which are attended to.
            config = self.model.generation_config
            stays = (ids == config.bos_token_id) | (ids == self.begin_of_image)
            ids = torch.cat([ids, torch.where(stays, ids, config.pad_token_id)])
            mask = mask.repeat(2, 1)
        parts = self.parts
        model = LanguageTokenModel(
            compiled_like(self.model, parts.language_model),
            embed=CodeEmbedding(parts.generation_embeddings, parts.generation_aligner),
            head=parts.generation_head,
            layout=Layout(self.grid),
            input_ids=ids,
            attention_mask=mask,
            codebook=self.code_vectors(),
            branches=1 + call.guided,
            network=self.model,
            neighbours=self.neighbours,
        )
        call.bind(model)
        return call
