"""The base of pipelines whose checkpoints generate images from a class, or from a text with a T5 encoder."""

from difflib import get_close_matches

import torch
from torch import nn
from transformers import T5EncoderModel

from ...media.texts import composed
from ..base import ARImagePipeline
from ..components import check_parts
from ..text.captions import caption_for
from ..text.checks import (
    MAX_TEXT_TOKENS,
    TEXT_TOKENS,
    as_texts,
    check_embeds,
    check_text_encoder_loaded,
    describe,
    text_length,
)
from ..text.known import quoted, tell_nearest
from ..text.t5_texts import encode


# The time for cleaning and tokenizing grows with the square of the length of the longest word. No token is longer.
CHARACTERS_PER_TOKEN = 32


def check_text_encoder(text_encoder: T5EncoderModel | None, transformer: nn.Module | None) -> None:
    """Refuse a text encoder that does not fit the transformer."""
    if text_encoder is not None and transformer is not None:
        widths = {"text_encoder": text_encoder.config.d_model, "transformer": transformer.config.caption_dim}
        check_parts("channels of a text", **widths)


def left_pad(
    prompt_embeds: torch.Tensor, prompt_attention_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.BoolTensor]:
    """Rotate right-padded embeddings [B, P, D] so that the tokens of mask [B, P] come last; the padding becomes
    zero."""
    length = prompt_embeds.shape[1]
    count = prompt_attention_mask.long().sum(1, keepdim=True)
    index = (torch.arange(length, device=prompt_embeds.device) + count) % length
    mask = prompt_attention_mask.flip(-1).bool()
    return prompt_embeds.gather(1, index[..., None].expand_as(prompt_embeds)) * mask[..., None], mask


def last_state(prompt_embeds: torch.Tensor, prompt_attention_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The embedding [B, 1, D] of the last token of right-padded embeddings [B, P, D] with mask [B, P], and its mask
    [B, 1]."""
    ends = prompt_attention_mask.long().sum(1) - 1
    rows = torch.arange(len(ends), device=ends.device)
    return prompt_embeds[rows, ends][:, None], prompt_attention_mask[:, :1]


class ClassOrTextPipeline(ARImagePipeline):
    """Base class of pipelines with the components `transformer` (whose config says "class" or "text"), `tokenizer` and
    `text_encoder`, and with `id2label` in the config of the pipeline."""

    # Whether class_labels may contain the id after the last class, which means "no class".
    _accepts_no_class = False

    @property
    def num_classes(self) -> int | None:
        # A pipeline with only a text encoder has no classes.
        if self.transformer is None or self.transformer.config.get("conditioning") == "text":
            return None
        return self.transformer.config.num_classes

    @property
    def class_names(self) -> list[str] | None:
        labels = self.config.get("id2label")
        return None if labels is None else [labels[str(i)] for i in range(len(labels))]

    def name_classes(self, id2label: dict[int, str] | dict[str, str] | None) -> None:
        """Store the names of the classes in the config.

        Raises:
            ValueError: if there is not exactly one name per class.
        """
        if id2label is None:
            return
        # JSON keys are strings.
        names = {int(key): name for key, name in id2label.items()}
        if sorted(names) != [*range(self.num_classes or 0)]:
            raise ValueError(
                f"id2label names {len(names)} classes, and the transformer has {self.num_classes or 'none'}: name "
                "each once"
            )
        self.register_to_config(id2label={str(key): names[key] for key in sorted(names)})

    def get_label_ids(self, label: str | list[str]) -> list[int]:
        """The ids of classes, given their names, such as "golden retriever"; case is ignored, and whether accents are
        composed.

        Raises:
            ValueError: if no class or several classes have this name, or the checkpoint does not name its classes.
        """
        if self.class_names is None:
            raise ValueError(
                "this checkpoint generates classes and does not name them: give class_labels, ids from 0 to "
                f"{self._last_class}"
            )
        ids: dict[str, list[int]] = {}
        for i, names in enumerate(self.class_names):
            # Some names are lists of synonyms.
            for name in names.split(","):
                ids.setdefault(composed(name.strip().casefold()), []).append(i)
        found = []
        for name in as_texts(label, "label"):
            its = ids.get(composed(name.strip().casefold()), [])
            if not its:
                nearest = tell_nearest(get_close_matches(composed(name.strip().casefold()), ids))
                raise ValueError(f"{quoted([name])} is not the name of a class of this checkpoint: {nearest}")
            if len(its) > 1:
                raise ValueError(f"{quoted([name])} is the name of the classes {its}: give one of these ids")
            found += its
        return found

    @torch.no_grad()
    def encode_prompt(
        self, prompt: str | list[str], max_sequence_length: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode prompts, cleaned as in the original code, to `prompt_embeds`, right-padded text embeddings [B, P, D],
        and `prompt_attention_mask` [B, P]. Needs only the tokenizer and the text encoder.

        Args:
            prompt: one text or several.
            max_sequence_length: P, by default the length that the transformer reads. Without a transformer, or for one
                that reads the state of the last token only, it is the tokenizer's maximum length, at most 512.

        Raises:
            ValueError: if `prompt` is not text, `max_sequence_length` is not a number of tokens, or the pipeline has
                no text encoder.
        """
        return self.embed_prompt(prompt, max_sequence_length)

    def embed_prompt(
        self, prompt: str | list[str], max_sequence_length: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`encode_prompt`, differentiable, for training."""
        check_text_encoder_loaded(self.tokenizer, self.text_encoder)
        self.check_offloading()
        prefix = None if self.transformer is None else self.transformer.config.num_condition_tokens
        read = min(TEXT_TOKENS, self.tokenizer.model_max_length) if prefix in (None, 1) else prefix
        length = text_length(max_sequence_length, read)
        texts = [text[: CHARACTERS_PER_TOKEN * length] for text in as_texts(prompt)]
        cleaned = [caption_for(self.tokenizer, text) for text in texts]
        return encode(self.tokenizer, self.text_encoder, cleaned, length, "max_length", self._execution_device)

    def check_condition(self, prompt, class_labels, prompt_embeds, prompt_attention_mask) -> int:
        """Refuse a condition that the checkpoint cannot use; return the number of prompts or classes."""
        if self.num_classes is not None:
            if (class_labels is None) == (prompt is None) or prompt_embeds is not None:
                raise ValueError(
                    f"this checkpoint generates classes: give class_labels, ids from 0 to {self._last_class}, or "
                    "their names as the prompt"
                )
            return len(self._class_ids(prompt, class_labels))
        if class_labels is not None:
            raise ValueError("this checkpoint generates from text: give a prompt instead of class_labels")
        if (prompt is None) == (prompt_embeds is None):
            raise ValueError("give either a prompt or prompt_embeds with prompt_attention_mask")
        if prompt is not None:
            check_text_encoder_loaded(self.tokenizer, self.text_encoder)
            return len(as_texts(prompt))
        prefix, width = self.transformer.config.num_condition_tokens, self.transformer.config.caption_dim
        lengths = range(1, MAX_TEXT_TOKENS + 1) if prefix == 1 else range(prefix, prefix + 1)
        return check_embeds("prompt", prompt_embeds, prompt_attention_mask, width, lengths, needs_mask=True)

    @property
    def _last_class(self) -> int:
        return (self.num_classes or 0) - 1 + self._accepts_no_class

    def _class_ids(self, prompt, class_labels) -> torch.LongTensor:
        """The ids [B'] of the classes of a call."""
        if prompt is not None:
            return torch.tensor(self.get_label_ids(as_texts(prompt)))
        refusal = f"class_labels are {describe(class_labels)}: give one or more ids from 0 to {self._last_class}"
        if isinstance(class_labels, str | list | tuple):
            listed = [class_labels] if isinstance(class_labels, str) else class_labels
            class_labels = [self.get_label_ids(one)[0] if isinstance(one, str) else one for one in listed]
        try:
            labels = torch.as_tensor(class_labels).flatten()
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(refusal) from error
        whole = not labels.is_floating_point() and not labels.is_complex() and labels.dtype != torch.bool
        if not whole or len(labels) == 0 or labels.min() < 0 or labels.max() > self._last_class:
            raise ValueError(refusal)
        return labels.long()

    def encode_condition(self, prompt, class_labels, prompt_embeds, prompt_attention_mask) -> dict[str, torch.Tensor]:
        """The condition of every prompt or class: `class_labels` [B'], or `prompt_embeds` [B', P, D] and their mask
        [B', P]."""
        if self.num_classes is not None:
            return {"class_labels": self._class_ids(prompt, class_labels).to(self._execution_device)}
        if prompt_embeds is None:
            texts = as_texts(prompt)
            different = list(dict.fromkeys(texts))
            rows = [different.index(text) for text in texts]
            embeds, mask = (part[rows] for part in self.encode_prompt(different))
        else:
            device = self._execution_device
            embeds, mask = prompt_embeds.to(device), prompt_attention_mask.to(device)
        if self.transformer.config.num_condition_tokens == 1:
            embeds, mask = last_state(embeds, mask)
        return {"prompt_embeds": embeds, "prompt_attention_mask": mask}

    def encode_prefix(self, prompt, class_labels, prompt_embeds, prompt_attention_mask) -> dict[str, torch.Tensor]:
        """`encode_condition` for transformers that read a text as a prefix, padded on the left."""
        condition = self.encode_condition(prompt, class_labels, prompt_embeds, prompt_attention_mask)
        if "prompt_embeds" in condition:
            embeds, mask = left_pad(condition["prompt_embeds"], condition["prompt_attention_mask"])
            condition = {"prompt_embeds": embeds, "prompt_attention_mask": mask}
        return condition
