"""The prompts of GLM-Image: texts, and reference images that the image is generated from."""

from dataclasses import dataclass

import torch
from PIL import Image
from transformers import BatchFeature, GlmImageProcessor

from ..text.tokenizing import check_special, tokenize


MAX_ASPECT = 4


@dataclass(frozen=True)
class Source:
    """A reference image of a prompt, resized to whole tokens of the decoder, the rows and columns of these, and their
    codes, int64 [rows * columns]."""

    reference: Image.Image
    grid: tuple[int, int]
    codes: torch.LongTensor


@dataclass(frozen=True)
class GlmImagePrompt:
    """A text and the references of one prompt, which the decoder reads too."""

    text: str
    sources: list[Source]


def encode_prompts(
    processor: GlmImageProcessor, texts: list[str], sources: list[list[Image.Image]] | None, size: tuple[int, int]
) -> BatchFeature:
    """Ids, mask and grids of prompts for images of `size` (height, width) in the model's template, padded on the left,
    as the processor returns them. All prompts have equally many sources."""
    for text in texts:
        check_special(processor.tokenizer, text)
    for reference in (reference for references in sources or [] for reference in references):
        if max(reference.size) > MAX_ASPECT * min(reference.size):
            raise ValueError(
                f"an image has {reference.width}x{reference.height} pixels: give one whose sides differ at most "
                f"{MAX_ASPECT} times"
            )
    turns = []
    for i, text in enumerate(texts):
        references = [] if sources is None else [{"type": "image", "image": reference} for reference in sources[i]]
        turns.append([{"role": "user", "content": [*references, {"type": "text", "text": text}]}])
    return tokenize(
        processor.apply_chat_template,
        turns,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs={"padding": True, "target_h": size[0], "target_w": size[1]},
    )
