"""Tiny RandAR pipelines with random weights."""

import tiny

from arimage.pipelines.randar.pipeline_randar import RandARPipeline
from arimage.pipelines.randar.transformer_randar import RandARTransformer


CLASSES = RandARTransformer, RandARPipeline


def transformer(conditioning: str = "class", grid: int = 4, seed: int = 0, **changes) -> RandARTransformer:
    settings = tiny.any_order_settings(conditioning, grid)
    return tiny.randomise(RandARTransformer(**settings | changes), seed)


def pipeline(conditioning: str = "class", grid: int = 4, seed: int = 0) -> RandARPipeline:
    return tiny.any_order_pipeline(RandARPipeline, transformer(conditioning, grid, seed), seed)


PIPELINES = {"randar": (pipeline, {"trained", "fused", "shared steps"})}
