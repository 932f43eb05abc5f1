"""The prompts of Janus (https://arxiv.org/abs/2410.13848), for generating images and for questions about images."""

from typing import Any

import torch
from PIL import Image
from transformers import JanusProcessor

from ...media.files import to_rgb
from ..text.token_prompts import encode_left
from ..text.tokenizing import tokenize


def begin_of_image(config: Any) -> int:
    """The id of the begin-of-image token in a model's generation config.

    Raises:
        ValueError: if the config does not name it.
    """
    arguments = getattr(config, "generation_kwargs", None) or {}
    if "boi_token_id" not in arguments:
        raise ValueError(
            "generation_config of the model has no boi_token_id in its generation_kwargs: put the id of the "
            "begin-of-image token there, or load the repository with AutoPipeline, since DiffusionPipeline does not "
            "download model/generation_config.json"
        )
    return arguments["boi_token_id"]


class JanusPrompts:
    """Token ids of prompts and of questions about images, in the model's template.

    Args:
        processor: tokenizes prompts and preprocesses images.

    Raises:
        ValueError: if there is no processor.
    """

    def __init__(self, processor: JanusProcessor | None):
        if processor is None:
            raise ValueError(
                "this pipeline has no processor: give input_ids and attention_mask, or convert the checkpoint again "
                "with its tokenizer in the folder"
            )
        self.processor = processor

    def encode(self, texts: list[str]) -> tuple[torch.LongTensor, torch.LongTensor]:
        """Token ids [B, P] of prompts up to the begin-of-image token, padded on the left, and their mask [B, P]."""
        tokenizer = self.processor.tokenizer
        texts = [tokenizer.bos_token + self._turn(text) + tokenizer.boi_token for text in texts]
        return encode_left(tokenizer, texts)

    def questions(self, image: Image.Image | list[Image.Image], question: str | list[str]) -> Any:
        """The inputs of the model for questions about images: one of each, or lists of equal length. A single one is
        used with each of the others.

        Raises:
            ValueError: if the lists have different lengths.
        """
        images = [to_rgb("image", one) for one in (image if isinstance(image, list) else [image])]
        questions = question if isinstance(question, list) else [question]
        count = max(len(images), len(questions))
        if {len(images), len(questions)} - {1, count}:
            raise ValueError(f"{len(images)} images and {len(questions)} questions: give as many, or one for all")
        return tokenize(
            self.processor,
            text=[self._turn(text, {"type": "image"}) for text in questions * (count // len(questions))],
            images=images * (count // len(images)),
            padding=True,
            padding_side="left",
            return_tensors="pt",
        )

    def _turn(self, text: str, *before: dict[str, str]) -> str:
        """A user's turn: the contents `before`, the text, and the beginning of the model's turn."""
        turn = {"role": "user", "content": [*before, {"type": "text", "text": text}]}
        return self.processor.apply_chat_template([turn], tokenize=False, add_generation_prompt=True)
