"""Tiny LPD pipelines with random weights."""

from pathlib import Path

import tiny

from arimage.pipelines.lpd.pipeline_lpd import LPDPipeline
from arimage.pipelines.lpd.transformer_lpd import LPDTransformer


FOLDER = Path(__file__).parent / "fixtures"
CLASSES = LPDTransformer, LPDPipeline


def transformer(grid: int = 4, seed: int = 0, **changes) -> LPDTransformer:
    return tiny.randomise(LPDTransformer(**tiny.any_order_settings(grid) | changes), seed)


def pipeline(grid: int = 4, seed: int = 0) -> LPDPipeline:
    """A class to images of grid * SCALE_FACTOR pixels."""
    return LPDPipeline(transformer(grid, seed), tiny.image_tokenizer(seed=seed))


PIPELINES = {"lpd": (pipeline, {"trained", "shared steps"})}
