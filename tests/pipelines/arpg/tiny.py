"""Tiny ARPG pipelines with random weights."""

from pathlib import Path

import tiny

from arimage.pipelines.arpg.pipeline_arpg import ARPGPipeline
from arimage.pipelines.arpg.transformer_arpg import ARPGTransformer


FOLDER = Path(__file__).parent / "fixtures"
CLASSES = ARPGTransformer, ARPGPipeline


def transformer(
    conditioning: str = "class", grid: int = 4, seed: int = 0, places: bool = False, **changes
) -> ARPGTransformer:
    """With embeddings of places, copies of the condition and attention to words, or with none of them."""
    settings = tiny.any_order_settings(grid) | {"num_layers": 4}
    if conditioning == "text":
        settings |= {"conditioning": "text", "num_condition_tokens": tiny.TEXT_LENGTH, "caption_dim": tiny.TEXT_WIDTH}
    if places:
        settings |= {"place_embeddings": True, "condition_copies": 3, "reads_words": conditioning == "text"}
    return tiny.randomise(ARPGTransformer(**settings | changes), seed)


def pipeline(conditioning: str = "class", grid: int = 4, seed: int = 0, places: bool = False) -> ARPGPipeline:
    """A class or a text to images of grid * SCALE_FACTOR pixels."""
    texts = {}
    if conditioning == "text":
        tokenizer = tiny.text_tokenizer()
        texts = {"tokenizer": tokenizer, "text_encoder": tiny.text_encoder(len(tokenizer), seed=seed)}
    pipe = ARPGPipeline(transformer(conditioning, grid, seed, places), tiny.image_tokenizer(seed=seed), **texts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


PIPELINES = {
    "arpg": (pipeline, {"trained", "fused"}),
    "arpg-text": (lambda: pipeline("text"), {"text", "captions", "twin", "shared steps"}),
    "arpg-places": (lambda: pipeline("text", places=True), {"shared steps"}),
}
