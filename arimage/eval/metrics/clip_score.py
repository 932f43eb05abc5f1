"""CLIP score: the cosine between an image and its prompt (https://arxiv.org/abs/2104.08718)."""

import numpy as np
import torch
import torch.nn.functional as F

from .features import ClipExtractor


PREFIX = "A photo depicts "


def clip_scores(
    features: np.ndarray, prompts: list[str], extractor: ClipExtractor, batch_size: int = 32
) -> np.ndarray:
    """Cosines [N] of image features [N, D] with the features of `PREFIX` + prompt, without scale and not cut at 0."""
    texts = [PREFIX + prompt for prompt in prompts]
    batches = [extractor.of_texts(texts[i : i + batch_size]) for i in range(0, len(texts), batch_size)]
    return F.cosine_similarity(torch.from_numpy(features), torch.cat(batches).float().cpu()).numpy()
