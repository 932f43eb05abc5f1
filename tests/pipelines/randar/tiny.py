"""Tiny RandAR pipelines with random weights."""

import tiny

from arimage.pipelines.randar.pipeline_randar import RandARPipeline
from arimage.pipelines.randar.transformer_randar import RandARTransformer


CLASSES = RandARTransformer, RandARPipeline


def transformer(grid: int = 4, seed: int = 0, **changes) -> RandARTransformer:
    return tiny.randomise(RandARTransformer(**tiny.any_order_settings(grid) | changes), seed)


def pipeline(grid: int = 4, seed: int = 0) -> RandARPipeline:
    """A class to images of grid * SCALE_FACTOR pixels."""
    return RandARPipeline(transformer(grid, seed), tiny.image_tokenizer(seed=seed))


PIPELINES = {"randar": (pipeline, {"trained", "fused", "shared steps"})}
