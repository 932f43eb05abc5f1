"""Tiny InfinityStar pipelines with random weights: 17 frames of 144 x 432 pixels, the least of all sizes, are 22
passes."""

import json
from pathlib import Path

import tiny

from arimage.convert import convert_infinitystar
from arimage.pipelines.infinitystar.pipeline_infinitystar import InfinityStarPipeline
from arimage.pipelines.infinitystar.transformer_infinitystar import InfinityStarTransformer
from arimage.pipelines.infinitystar.vq_infinitystar import InfinityStarVideoTokenizer


FIXTURES = Path(__file__).parent / "fixtures"
CONFIG = json.loads((FIXTURES / "config.json").read_text())
FRAMES, SIZE = 17, (192, 336)
# What the files do not show.
TRAINED = ("semantic_scales", "image_scale_repetition", "video_scale_repetition")
# The tiny tokenizer has words and letters only.
TEXT_LENGTH = 96


def tokenizer(seed: int = 0) -> InfinityStarVideoTokenizer:
    return tiny.randomise(InfinityStarVideoTokenizer((4, 4, 4, 4), 1, 1), seed + 1)


def transformer(seed: int = 0, **changes) -> InfinityStarTransformer:
    settings = {
        "caption_dim": tiny.TEXT_WIDTH,
        "num_text_tokens": TEXT_LENGTH,
        "latent_channels": 4,
        "bits": (1, 2),
        "hidden_size": 32,
        "num_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "pixels": "0.06M",
        "semantic_scales": 9,
        "image_scale_repetition": (1,) * 11,
        "video_scale_repetition": (1,) * 11,
    }
    return tiny.randomise(InfinityStarTransformer(**{**settings, **changes}), seed)


def pipeline(seed: int = 0, **changes) -> InfinityStarPipeline:
    words = tiny.text_tokenizer()
    words.model_max_length = TEXT_LENGTH
    encoder = tiny.text_encoder(len(words), seed=seed)
    return InfinityStarPipeline(transformer(seed, **changes), tokenizer(seed), words, encoder)


def golden_pipeline(**changes) -> InfinityStarPipeline:
    """Of the authors' files."""
    return convert_infinitystar(
        FIXTURES / "weights",
        FIXTURES / "infinitystar_videovae_tiny.pth",
        text_encoder=FIXTURES / "text_encoder",
        pixels="0.06M",
        **{name: CONFIG[name] for name in TRAINED},
        **changes,
    )


PIPELINES = {"infinitystar": (pipeline, {"special", "videos", "captions"})}
