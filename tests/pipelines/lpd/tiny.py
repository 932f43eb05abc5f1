"""Tiny LPD pipelines with random weights."""

from pathlib import Path

import tiny

from arimage.pipelines.lpd.pipeline_lpd import LPDPipeline
from arimage.pipelines.lpd.transformer_lpd import LPDTransformer


FOLDER = Path(__file__).parent / "fixtures"
CLASSES = LPDTransformer, LPDPipeline


def transformer(conditioning: str = "class", grid: int = 4, seed: int = 0, **changes) -> LPDTransformer:
    settings = tiny.any_order_settings(conditioning, grid)
    return tiny.randomise(LPDTransformer(**settings | changes), seed)


def pipeline(conditioning: str = "class", grid: int = 4, seed: int = 0) -> LPDPipeline:
    return tiny.any_order_pipeline(LPDPipeline, transformer(conditioning, grid, seed), seed)


PIPELINES = {"lpd": (pipeline, {"trained", "shared steps"})}
