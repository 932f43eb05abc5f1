"""The texts of pipelines whose transformer reads the output of a T5 encoder, padded on the right."""

from typing import Any

import torch
import torch.nn.functional as F
from diffusers.utils import logging
from transformers import PreTrainedTokenizerBase, T5EncoderModel

from ...models.conditions import with_unconditional
from .checks import MAX_PROMPT_CHARACTERS, TEXT_TOKENS, as_texts, check_embeds, check_text_encoder_loaded, text_length
from .tokenizing import tokenize


logger = logging.get_logger(__name__)

# Embeddings [B, P, D] and their mask [B, P].
Text = tuple[torch.Tensor, torch.Tensor]


def encode(
    tokenizer: PreTrainedTokenizerBase,
    text_encoder: T5EncoderModel,
    texts: list[str],
    length: int,
    padding: bool | str,
    device: torch.device,
) -> Text:
    """Texts of at most `length` tokens, padded on the right. Warns about those that are cut."""
    if any(len(ids) > length for ids in tokenize(tokenizer, texts).input_ids):
        logger.warning(f"a prompt is longer than the {length} tokens that this model reads and was cut")
    options = {"max_length": length, "padding": padding, "truncation": True, "return_tensors": "pt"}
    text = tokenize(tokenizer, texts, **options).to(device)
    return text_encoder(text.input_ids, attention_mask=text.attention_mask).last_hidden_state, text.attention_mask


class T5Texts:
    """Encodes and checks the prompts of a pipeline. Texts are padded to multiples of `text_multiple`, so that few of
    their lengths differ."""

    transformer: Any
    tokenizer: PreTrainedTokenizerBase | None
    text_encoder: T5EncoderModel | None
    text_multiple = 1

    @torch.no_grad()
    def encode_texts(self: Any, texts: list[str], max_sequence_length: int | None = None) -> Text:
        """Encode texts to embeddings [B, P, D], padded on the right, and their mask [B, P].

        Raises:
            ValueError: if `max_sequence_length` is not a number of tokens, or the pipeline has no text encoder.
        """
        check_text_encoder_loaded(self.tokenizer, self.text_encoder)
        self.check_offloading()
        read = TEXT_TOKENS if self.transformer is None else self.transformer.config.num_text_tokens
        length = text_length(max_sequence_length, min(read, self.tokenizer.model_max_length))
        return encode(self.tokenizer, self.text_encoder, texts, length, True, self._execution_device)

    def check_text(self, name: str, prompt: Any, embeds: Any, mask: Any, *, optional: bool = False) -> int | None:
        """Refuse a text that cannot be used; return the number of texts, None if there is none."""
        if prompt is None and embeds is None and optional:
            return None
        if (prompt is None) == (embeds is None):
            raise ValueError(f"give either a {name} or {name}_embeds")
        if prompt is not None:
            check_text_encoder_loaded(self.tokenizer, self.text_encoder)
            return len(as_texts(prompt, name, MAX_PROMPT_CHARACTERS))
        config = self.transformer.config
        return check_embeds(name, embeds, mask, config.caption_dim, range(1, config.num_text_tokens + 1))

    def check_texts(self, text: tuple, negative: tuple) -> tuple[int, int | None]:
        """Refuse prompts and negative prompts, each with embeddings and a mask, that cannot be used together; return
        the numbers of both."""
        count = self.check_text("prompt", *text)
        negatives = self.check_text("negative_prompt", *negative, optional=True)
        assert count is not None
        if negatives not in (None, 1, count):
            raise ValueError(f"negative_prompt holds {negatives} texts for {count} prompts: give one, or one for each")
        return count, negatives

    def encoded(self: Any, texts: list[str] | None, embeds: Any, mask: Any) -> Text | None:
        """The embeddings and the mask of texts, each encoded once, or those that are given, on the device; None if
        there are neither."""
        if texts is not None:
            different = list(dict.fromkeys(texts))
            rows = [different.index(text) for text in texts]
            embeds, mask = (part[rows] for part in self.encode_texts(different))
        elif embeds is None:
            return None
        elif mask is None:
            mask = torch.ones(embeds.shape[:2], dtype=torch.long)
        return embeds.to(self._execution_device, torch.float32), mask.to(self._execution_device)

    def encode_condition(self, text: Text | None, negative: Text | None, guided: bool) -> dict[str, torch.Tensor]:
        """The texts of the transformer's rows: one row per prompt, under guidance followed by the rows of the negative
        prompt, or by those without a text."""
        assert text is not None
        longest = max(part[1].shape[1] for part in (text, negative) if part is not None)
        length = -(-longest // self.text_multiple) * self.text_multiple

        def padded(part: Text) -> dict[str, torch.Tensor]:
            missing = length - part[1].shape[1]
            return {
                "prompt_embeds": F.pad(part[0], (0, 0, 0, missing)),
                "prompt_attention_mask": F.pad(part[1], (0, missing)),
            }

        condition = padded(text)
        if not guided:
            return condition
        if negative is None:
            return with_unconditional(condition, kept=("prompt_attention_mask",))
        count = len(text[0])
        return {
            name: torch.cat([condition[name], value.expand(count, *value.shape[1:])])
            for name, value in padded(negative).items()
        }
