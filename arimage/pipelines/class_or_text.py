"""What the pipelines share whose checkpoints generate images of a class, or of a text read by a T5 encoder."""

import torch
from diffusers.utils import logging
from torch import nn
from transformers import T5EncoderModel

from .base import ARImagePipeline
from .captions import clean_caption
from .checks import as_texts


logger = logging.get_logger(__name__)

# Cleaning and tokenizing take time that grows with the square of the longest word, and no token has more letters.
CHARACTERS_PER_TOKEN = 32


def check_text_encoder(text_encoder: T5EncoderModel | None, transformer: nn.Module) -> None:
    """Refuse a text encoder that the transformer was not trained with."""
    if text_encoder is not None and text_encoder.config.d_model != transformer.config.caption_dim:
        raise ValueError(
            f"the text encoder is {text_encoder.config.d_model} wide, the transformer expects "
            f"{transformer.config.caption_dim}: load the encoder that it was trained with"
        )


def left_pad(
    prompt_embeds: torch.Tensor, prompt_attention_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.BoolTensor]:
    """Rotate right-padded embeddings [B, P, D] so that the tokens of mask [B, P] come last; the padding becomes zero."""
    length = prompt_embeds.shape[1]
    count = prompt_attention_mask.sum(1, keepdim=True)
    index = (torch.arange(length, device=prompt_embeds.device) + count) % length
    mask = prompt_attention_mask.flip(-1).bool()
    return prompt_embeds.gather(1, index[..., None].expand_as(prompt_embeds)) * mask[..., None], mask


class ClassOrTextPipeline(ARImagePipeline):
    """Base of pipelines with the components `transformer`, whose config says "class" or "text", `tokenizer` and `text_encoder`."""

    # Whether class_labels may hold the id after the last class, which stands for no class in particular.
    _accepts_no_class = False

    @property
    def num_classes(self) -> int | None:
        config = self.transformer.config
        return config.num_classes if config.conditioning == "class" else None

    def encode_prompt(self, prompt: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Right-padded text embeddings [B, P, D] and their mask [B, P], from captions cleaned as in the original."""
        length = self.transformer.config.num_condition_tokens
        cleaned = [clean_caption(text[: CHARACTERS_PER_TOKEN * length]) for text in prompt]
        if any(len(ids) > length for ids in self.tokenizer(cleaned).input_ids):
            logger.warning(f"a prompt is longer than the {length} tokens that this model reads and was cut")
        text = self.tokenizer(
            cleaned, max_length=length, padding="max_length", truncation=True, return_tensors="pt"
        ).to(self._execution_device)
        embeds = self.text_encoder(text.input_ids, attention_mask=text.attention_mask).last_hidden_state
        return embeds, text.attention_mask

    def check_condition(self, prompt, class_labels, prompt_embeds, prompt_attention_mask) -> int:
        """Refuse a condition that the checkpoint cannot generate; return how many prompts or classes there are."""
        if self.num_classes is not None:
            last = self.num_classes - 1 + self._accepts_no_class
            if class_labels is None or prompt is not None or prompt_embeds is not None:
                raise ValueError(
                    f"this checkpoint generates classes: give class_labels, ids from 0 to {last}, and no prompt"
                )
            return len(self._labels(class_labels, last))
        if class_labels is not None:
            raise ValueError("this checkpoint generates from text: give a prompt instead of class_labels")
        if (prompt is None) == (prompt_embeds is None):
            raise ValueError("give either a prompt or prompt_embeds with prompt_attention_mask")
        if prompt is not None:
            if self.text_encoder is None or self.tokenizer is None:
                raise ValueError(
                    "this pipeline has no text encoder: give prompt_embeds and prompt_attention_mask, or convert the "
                    "checkpoint again with --text-encoder"
                )
            return len(as_texts(prompt))
        length, width = self.transformer.config.num_condition_tokens, self.transformer.config.caption_dim
        if not isinstance(prompt_embeds, torch.Tensor):
            raise ValueError(f"prompt_embeds are {prompt_embeds!r}: give a tensor [B, {length}, {width}]")
        if prompt_embeds.ndim != 3 or prompt_embeds.shape[1:] != (length, width) or not len(prompt_embeds):
            raise ValueError(
                f"prompt_embeds are {tuple(prompt_embeds.shape)}: this model expects [B, {length}, {width}]"
            )
        mask = prompt_attention_mask
        if not isinstance(mask, torch.Tensor) or mask.shape != prompt_embeds.shape[:2]:
            raise ValueError(f"prompt_attention_mask must be [B, {length}], like prompt_embeds")
        if not mask[:, 0].all() or (mask.int().diff() > 0).any():
            raise ValueError(
                "prompt_attention_mask must be ones, at least one per row, and then zeros: pad on the right"
            )
        return len(prompt_embeds)

    def _labels(self, class_labels, last: int) -> torch.LongTensor:
        refusal = f"class_labels are {class_labels!r}: give one or more ids from 0 to {last}"
        try:
            labels = torch.as_tensor(class_labels).flatten()
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(refusal) from error
        whole = not labels.is_floating_point() and not labels.is_complex() and labels.dtype != torch.bool
        if not whole or len(labels) == 0 or labels.min() < 0 or labels.max() > last:
            raise ValueError(refusal)
        return labels.long()

    def encode_condition(self, prompt, class_labels, prompt_embeds, prompt_attention_mask) -> dict[str, torch.Tensor]:
        """The condition of every prompt or class, `class_labels` [B'], or `prompt_embeds` [B', P, D] and their mask [B', P]."""
        if self.num_classes is not None:
            condition = {"class_labels": torch.as_tensor(class_labels).flatten().long()}
        else:
            if prompt_embeds is None:
                prompt_embeds, prompt_attention_mask = self.encode_prompt(as_texts(prompt))
            condition = {"prompt_embeds": prompt_embeds, "prompt_attention_mask": prompt_attention_mask}
        return {name: value.to(self._execution_device) for name, value in condition.items()}
