"""Tiny Infinity pipelines with random weights."""

from pathlib import Path

import tiny

from arimage.pipelines.infinity.bsq_infinity import InfinityVQModel
from arimage.pipelines.infinity.pipeline_infinity import InfinityPipeline
from arimage.pipelines.infinity.transformer_infinity import InfinityTransformer


FIXTURES = Path(__file__).parent / "fixtures"


def tokenizer(seed: int = 0, **changes) -> InfinityVQModel:
    settings = {"channels": 8, "channel_multipliers": (1, 2), "layers_per_block": 1, "latent_channels": 4}
    return tiny.randomise(InfinityVQModel(**{**settings, "norm_num_groups": 4, **changes}), seed + 1)


def transformer(seed: int = 0, **changes) -> InfinityTransformer:
    settings = {
        "caption_dim": tiny.TEXT_WIDTH,
        "num_text_tokens": tiny.TEXT_LENGTH,
        "bits": 4,
        "hidden_size": 32,
        "num_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "num_pool_heads": 2,
        "pixels": "0.06M",
    }
    return tiny.randomise(InfinityTransformer(**{**settings, **changes}), seed)


def pipeline(seed: int = 0) -> InfinityPipeline:
    """A text to images of 32x32 pixels and the like, of 7 maps."""
    words = tiny.text_tokenizer()
    encoder = tiny.text_encoder(len(words), seed=seed)
    return InfinityPipeline(transformer(seed), tokenizer(seed), words, encoder)


PIPELINES = {"infinity": (pipeline, {"usual", "text", "captions"})}
