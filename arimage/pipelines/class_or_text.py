"""What the pipelines have in common whose checkpoints draw a class, or a text read by a T5 encoder."""

import torch
from diffusers.pipelines.pixart_alpha.pipeline_pixart_alpha import PixArtAlphaPipeline
from diffusers.utils import logging
from torch import nn
from transformers import T5EncoderModel

from .base import ARImagePipeline, as_texts


logger = logging.get_logger(__name__)


def check_text_encoder(text_encoder: T5EncoderModel | None, transformer: nn.Module) -> None:
    """Refuse a text encoder that the transformer was not trained with."""
    if text_encoder is not None and text_encoder.config.d_model != transformer.config.caption_dim:
        raise ValueError(
            f"the text encoder is {text_encoder.config.d_model} wide, the transformer expects "
            f"{transformer.config.caption_dim}: load the encoder that it was trained with"
        )


class ClassOrTextPipeline(ARImagePipeline):
    """Base of pipelines with the components `transformer`, whose config says "class" or "text", `tokenizer` and `text_encoder`."""

    # Whether the id after the last class may be asked for, which stands for no class in particular.
    _draws_no_class = False

    bad_punct_regex = PixArtAlphaPipeline.bad_punct_regex
    _clean_caption = PixArtAlphaPipeline._clean_caption
    _text_preprocessing = PixArtAlphaPipeline._text_preprocessing

    def encode_prompt(self, prompt: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Right-padded text embeddings [B, P, D] and their mask [B, P], from captions cleaned as in the original."""
        length = self.transformer.config.num_condition_tokens
        cleaned = self._text_preprocessing(prompt, clean_caption=True)
        text = self.tokenizer(
            cleaned, max_length=length, padding="max_length", truncation=True, return_tensors="pt"
        ).to(self._execution_device)
        longest = max(len(ids) for ids in self.tokenizer(cleaned).input_ids)
        if longest > length:
            logger.warning(f"the prompt has {longest} tokens and was cut to the {length} that this model reads")
        embeds = self.text_encoder(text.input_ids, attention_mask=text.attention_mask).last_hidden_state
        return embeds, text.attention_mask

    def check_inputs(self, prompt, class_labels, prompt_embeds, prompt_attention_mask) -> int:
        """Refuse a condition that the checkpoint cannot draw; return how many prompts or classes there are."""
        config = self.transformer.config
        if config.conditioning == "class":
            last = config.num_classes - 1 + self._draws_no_class
            if class_labels is None or prompt is not None or prompt_embeds is not None:
                raise ValueError(
                    f"this checkpoint draws classes: give class_labels, ids from 0 to {last}, and no prompt"
                )
            labels = torch.as_tensor(class_labels).flatten()
            if len(labels) == 0 or labels.is_floating_point() or labels.min() < 0 or labels.max() > last:
                raise ValueError(f"class_labels are {class_labels}: give one or more ids from 0 to {last}")
            return len(labels)
        if class_labels is not None:
            raise ValueError("this checkpoint draws from text: give a prompt instead of class_labels")
        if (prompt is None) == (prompt_embeds is None):
            raise ValueError("give either a prompt or prompt_embeds with prompt_attention_mask")
        if prompt is not None:
            if self.text_encoder is None or self.tokenizer is None:
                raise ValueError(
                    "this pipeline has no text encoder: give prompt_embeds and prompt_attention_mask, or convert the "
                    "checkpoint again with --text-encoder"
                )
            return len(as_texts(prompt))
        expected = (config.num_condition_tokens, config.caption_dim)
        if prompt_embeds.ndim != 3 or prompt_embeds.shape[1:] != expected:
            raise ValueError(
                f"prompt_embeds are {tuple(prompt_embeds.shape)}: this model expects [B, {expected[0]}, {expected[1]}]"
            )
        if prompt_attention_mask is None or prompt_attention_mask.shape != prompt_embeds.shape[:2]:
            raise ValueError(f"prompt_attention_mask must be [B, {expected[0]}], like prompt_embeds")
        if not prompt_attention_mask[:, 0].all() or (prompt_attention_mask.int().diff() > 0).any():
            raise ValueError(
                "prompt_attention_mask must be ones, at least one a row, and then zeros: pad on the right"
            )
        return len(prompt_embeds)

    def condition(
        self,
        prompt: str | list[str] | None,
        class_labels: int | list[int] | torch.LongTensor | None,
        num_images_per_prompt: int,
        prompt_embeds: torch.Tensor | None,
        prompt_attention_mask: torch.Tensor | None,
    ) -> dict[str, torch.Tensor]:
        """The condition of every image, `class_labels` [B], or `prompt_embeds` [B, P, D] and `prompt_attention_mask` [B, P]."""
        self.check_inputs(prompt, class_labels, prompt_embeds, prompt_attention_mask)
        if self.transformer.config.conditioning == "class":
            condition = {"class_labels": torch.as_tensor(class_labels).flatten()}
        else:
            if prompt_embeds is None:
                prompt_embeds, prompt_attention_mask = self.encode_prompt(
                    [prompt] if isinstance(prompt, str) else prompt
                )
            condition = {"prompt_embeds": prompt_embeds, "prompt_attention_mask": prompt_attention_mask}
        device = self._execution_device
        return {
            name: value.to(device).repeat_interleave(num_images_per_prompt, dim=0) for name, value in condition.items()
        }
