"""What the pipelines share whose language model is a Chameleon (https://arxiv.org/abs/2405.09818)."""

import torch
import torch.nn.functional as F
from diffusers import VQModel
from transformers import ChameleonForConditionalGeneration, PreTrainedTokenizerBase

from ...decoding import Layout
from ...kernels.codebook import nearest_code
from ...models.compiled import compiled_like
from ...models.language_heads import CodeHead
from ...models.language_model import LanguageTokenModel
from ...models.neighbours import NeighbourModel
from ...tokenizers.tiling import Tiling
from ..abilities import EDITING, TOKEN_SAMPLING, Abilities
from ..base import ARImagePipeline
from ..call import GenerationCall
from ..text.checks import MAX_PROMPT_CHARACTERS, as_texts, check_one_of, check_token_ids
from ..text.token_prompts import pad_left
from ..text.tokenizing import tokenize
from .family import FAMILY


# Names of tokens in the vocabulary.
BEGIN_OF_IMAGE = "<racm3:break>"
TURN_END = "<reserved08706>"
LETTERS = str.maketrans("ABCDEFGHIJ", "0123456789")


def first_code_of(vocabulary: dict[str, int], count: int) -> int:
    """The id of image token 0 in a vocabulary with `count` image tokens, whose ids follow each other."""
    # Chameleon spells the number in letters; of Lumina-mGPT 2.0's names only the order is known.
    numbers = {
        int(name[6:-1].translate(LETTERS)): token for name, token in vocabulary.items() if name.startswith("IMGIMG")
    } or dict(enumerate(sorted(token for name, token in vocabulary.items() if name.startswith("<MOVQGAN"))))
    if sorted(numbers) != list(range(count)) or any(token != numbers[0] + number for number, token in numbers.items()):
        raise ValueError(
            f"the transformer's vocabulary_map names {len(numbers)} image tokens, expected {count} with ids that "
            "follow each other: load the image tokenizer and the transformer that belong together"
        )
    return numbers[0]


class ChameleonPipeline(ARImagePipeline):
    """Base of pipelines with the components `transformer`, `vq` and `tokenizer`. A family adds `header`, and calls
    `check_prompt` and `add_model` in its `__call__`."""

    family = FAMILY
    abilities = Abilities("tokens", TOKEN_SAMPLING | EDITING)
    model_cpu_offload_seq = "transformer->vq"
    _optional_components = ["tokenizer", "neighbours"]
    # It runs between forward passes.
    _exclude_from_cpu_offload = ["neighbours"]
    # How many tokens stand between a prompt and the first image token.
    _header_length = 1

    def __init__(
        self,
        transformer: ChameleonForConditionalGeneration,
        vq: VQModel,
        tokenizer: PreTrainedTokenizerBase | None,
        image_size: int,
        neighbours: NeighbourModel | None,
    ):
        super().__init__()
        self._vocabulary = transformer.config.vocabulary_map or {}
        missing = {BEGIN_OF_IMAGE, TURN_END} - self._vocabulary.keys()
        if missing:
            raise ValueError(f"the transformer's vocabulary_map has no {min(missing)!r}: convert the checkpoint again")
        self._first_code = first_code_of(self._vocabulary, vq.config.num_vq_embeddings)
        self.register_modules(transformer=transformer, vq=vq, tokenizer=tokenizer, neighbours=neighbours)
        self.register_to_config(image_size=image_size)
        self._tiling = Tiling(self.scale_factor)

    @property
    def _truncates_levels(self) -> bool:
        # So do Chameleon's authors.
        return self.vq.config.norm_type == "group"

    @property
    def image_sizes(self) -> list[tuple[int, int]]:
        return [(self.config.image_size,) * 2]

    @property
    def scale_factor(self) -> int:
        """Pixels per token along each side."""
        return 2 ** (len(self.vq.config.block_out_channels) - 1)

    def check_prompt(self, prompt, input_ids, attention_mask) -> tuple[int, torch.LongTensor, torch.Tensor | None]:
        """Refuse what cannot be a prompt; return how many prompts there are, and the token ids [B, P] with their mask,
        padded on the left."""
        check_one_of(prompt=prompt, input_ids=input_ids)
        if input_ids is None:
            return len(as_texts(prompt, limit=MAX_PROMPT_CHARACTERS)), input_ids, None
        size = self.transformer.config.vocab_size
        count = check_token_ids("input_ids", input_ids, attention_mask, vocab_size=size)
        if attention_mask is not None:
            attention_mask = attention_mask.to(input_ids.device)
            order = attention_mask.long().argsort(dim=1, stable=True)
            input_ids, attention_mask = input_ids.gather(1, order), attention_mask.gather(1, order)
        return count, input_ids, attention_mask

    def has_header(self, input_ids: torch.LongTensor) -> bool:
        """Whether token ids, padded on the left, end with a header, not with the end of the prompt.

        Raises:
            ValueError: if only some of the prompts do.
        """
        begins = input_ids[:, -self._header_length :][:, 0] == self._vocabulary[BEGIN_OF_IMAGE]
        if begins.any() and not begins.all():
            raise ValueError("input_ids end with the header of an image in some prompts only: give it to all, or none")
        return bool(begins.all())

    def encode_texts(self, texts: list[str]) -> tuple[torch.LongTensor, torch.LongTensor]:
        """Token ids [B, P] of texts up to the turn end, padded on the left, and their mask.

        Raises:
            ValueError: if there is no tokenizer.
        """
        if self.tokenizer is None:
            raise ValueError("this pipeline has no tokenizer: give input_ids and attention_mask, not a prompt")
        begin = self.tokenizer.bos_token_id
        begin = self.tokenizer.eos_token_id if begin is None else begin
        end = self._vocabulary[TURN_END]
        rows = [[begin, *tokenize(self.tokenizer.encode, text, add_special_tokens=False), end] for text in texts]
        return pad_left(rows, end)

    def add_model(
        self,
        call: GenerationCall,
        ids: torch.LongTensor,
        mask: torch.Tensor | None,
        header: list[int],
        unconditional: list[int],
        row_end: int | None,
    ) -> None:
        """Give a call its model, for token ids [B, P] of prompts with or without the header and their mask. `header`
        stands between a prompt and the first image token, `unconditional` before it when there is no prompt, `row_end`
        at the end of a row."""
        seen = torch.ones_like(ids) if mask is None else mask.long()
        if self.has_header(ids):
            ids, seen = ids[:, : -len(header)], seen[:, : -len(header)]
        ids, seen = ids.to(self._execution_device), seen.to(self._execution_device)
        rows, columns = (side // self.scale_factor for side in call.size)
        prefix, alone = (
            torch.tensor(part, device=ids.device).expand(len(ids), -1) for part in (header, unconditional)
        )
        if call.given_tokens is not None:
            # Images of one prompt share their panel.
            panels = call.given_tokens[:: call.num_images_per_prompt]
            above = F.pad(panels + self._first_code, (0, 1), value=row_end).flatten(1)
            prefix, alone = torch.cat([prefix, above], dim=1), torch.cat([alone, above], dim=1)
            rows -= call.given_tokens.shape[1]
        ids, seen = torch.cat([ids, prefix], dim=1), torch.cat([seen, torch.ones_like(prefix)], dim=1)
        if call.guided:
            padding = (ids.shape[1] - alone.shape[1], 0)
            ids = torch.cat([ids, F.pad(alone, padding)])
            seen = torch.cat([seen, F.pad(torch.ones_like(alone), padding)])

        # First, since bringing one component to the device sends the one before it away.
        codebook = self.code_vectors()
        transformer = self.on_device(self.transformer)
        embedding, first = transformer.get_input_embeddings(), self._first_code
        model = LanguageTokenModel(
            compiled_like(transformer, transformer.model),
            embed=lambda tokens: embedding(tokens + first),
            head=CodeHead(transformer.lm_head, first, self.vq.config.num_vq_embeddings),
            layout=Layout((rows, columns)),
            input_ids=ids,
            attention_mask=seen,
            row_end=row_end,
            codebook=codebook,
            branches=1 + call.guided,
            network=transformer,
            neighbours=self.neighbours,
        )
        call.bind(model)

    def code_vectors(self) -> torch.Tensor:
        """The vectors of all tokens in the image tokenizer [V, D]."""
        codes = torch.arange(self.vq.config.num_vq_embeddings, device=self._execution_device)
        return self.on_device(self.vq).quantize.embedding(codes)

    def encode_image(self, pixels: torch.Tensor) -> torch.LongTensor:
        """The tokens [B, h, w] of images [B, 3, H, W] in [-1, 1]."""

        def encode(images: torch.Tensor) -> torch.Tensor:
            return self.vq.encode(images).latents

        latents = self.tiling.encoded(encode, pixels.to(self.vq.dtype))
        latents = latents.permute(0, 2, 3, 1)
        return nearest_code(latents.flatten(0, 2), self.code_vectors()).view(latents.shape[:3])

    def decode_image(self, tokens: torch.LongTensor) -> torch.Tensor:
        """Pixels [B, 3, H, W], nominally in [-1, 1], of tokens [B, h, w]."""
        vectors = self.on_device(self.vq).quantize.embedding(tokens).permute(0, 3, 1, 2)
        return self.vq.decode(vectors, force_not_quantize=True).sample

    @torch.no_grad()
    def decode_tokens(self, call: GenerationCall, tokens: torch.LongTensor) -> torch.Tensor:
        """Pixels [B, 3, H, W], nominally in [-1, 1], of the tokens [B, N] of a call, drafts included; -1 is not known
        yet."""
        tokens = tokens.to(self._execution_device).clamp(min=0)
        tokens = self.whole_tokens(call, tokens)
        pixels = self.tiling.in_tiles(self.decode_image, tokens, before=1, after=self.scale_factor)
        if self.current_call is not None:
            # The next forward pass needs it.
            self.on_device(self.transformer)
        return pixels
