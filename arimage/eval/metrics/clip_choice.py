"""CLIP as a zero-shot judge (https://arxiv.org/abs/2103.00020): which of several texts an image is nearest to."""

import numpy as np
import torch
import torch.nn.functional as F

from .clip_score import ClipExtractor, text_features


def clip_choices(
    features: np.ndarray, questions: list[dict[str, list[str]]], extractor: ClipExtractor, batch_size: int = 32
) -> list[dict[str, bool]]:
    """Whether images choose, by cosine, the first text of each of their questions; a tie is a wrong answer.

    Args:
        features: of the images, [N, D].
        questions: for each image, the two or more texts of each question, by its name.
        batch_size: texts per call of the extractor.
    """
    texts = list(dict.fromkeys(text for row in questions for some in row.values() for text in some))
    found = F.normalize(text_features(texts, extractor, batch_size), dim=-1)
    place = {text: index for index, text in enumerate(texts)}

    def is_first(image: torch.Tensor, some: list[str]) -> bool:
        first, *others = (found[[place[text] for text in some]] @ image).tolist()
        return first > max(others)

    # The length of an image's features does not change its choice.
    pairs = zip(torch.from_numpy(features), questions, strict=True)
    return [{name: is_first(image, some) for name, some in row.items()} for image, row in pairs]
