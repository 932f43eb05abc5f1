"""Tiny Halton-MaskGIT pipelines with random weights, of a class and of a text."""

from pathlib import Path

import tiny

from arimage.pipelines.halton_maskgit.pipeline_halton_maskgit import HaltonMaskGITPipeline
from arimage.pipelines.halton_maskgit.transformer_halton_maskgit import HaltonMaskGITTransformer


FOLDER = Path(__file__).parent / "fixtures"


def transformer(conditioning: str = "class", grid: int = 4, seed: int = 0, **changes) -> HaltonMaskGITTransformer:
    """With heads that do not fill the width, and two registers."""
    settings = tiny.any_order_settings(grid) | {"num_attention_heads": 5, "num_registers": 2}
    if conditioning == "text":
        settings |= {"conditioning": "text", "num_condition_tokens": tiny.TEXT_LENGTH, "caption_dim": tiny.TEXT_WIDTH}
    model = tiny.randomise(HaltonMaskGITTransformer(**settings | changes), seed)
    # They are the weights of the logits, too.
    model.token_embedding.weight.data *= 0.3
    return model


def pipeline(conditioning: str = "class", grid: int = 4, seed: int = 0) -> HaltonMaskGITPipeline:
    """A class or a text to images of grid * SCALE_FACTOR pixels."""
    texts = {}
    if conditioning == "text":
        tokenizer = tiny.text_tokenizer()
        texts = {"tokenizer": tokenizer, "text_encoder": tiny.text_encoder(len(tokenizer), seed=seed)}
    pipe = HaltonMaskGITPipeline(transformer(conditioning, grid, seed), tiny.image_tokenizer(seed=seed), **texts)
    pipe.decoding = "halton:steps=5"
    pipe.set_progress_bar_config(disable=True)
    return pipe


PIPELINES = {
    "halton-maskgit-class": (pipeline, {"special", "fused", "trained"}),
    "halton-maskgit-text": (lambda: pipeline("text"), {"text", "captions", "twin"}),
}
