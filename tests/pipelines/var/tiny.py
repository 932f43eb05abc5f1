"""Tiny VAR pipelines with random weights."""

from pathlib import Path

import tiny

from arimage.pipelines.var.pipeline_var import VARPipeline
from arimage.pipelines.var.transformer_var import VARTransformer


FOLDER = Path(__file__).parent / "fixtures"


def transformer(conditioning: str, seed: int = 0, **changes) -> VARTransformer:
    settings = {
        "conditioning": conditioning,
        "num_classes": tiny.NUM_CLASSES,
        "caption_dim": tiny.TEXT_WIDTH if conditioning == "text" else None,
        "num_condition_tokens": tiny.TEXT_LENGTH if conditioning == "text" else 0,
        "vocab_size": tiny.CODES,
        "codebook_dim": 4,
        "scales": tiny.SCALES,
        "hidden_size": 32,
        "num_layers": 2,
        "num_attention_heads": 4,
    }
    return tiny.randomise(VARTransformer(**{**settings, **changes}), seed)


def pipeline(conditioning: str, seed: int = 0, refiner: bool = True) -> VARPipeline:
    """A class or a text to images of SCALES[-1] * SCALE_FACTOR pixels."""
    texts = {}
    if conditioning == "text":
        tokenizer = tiny.text_tokenizer()
        texts = {"tokenizer": tokenizer, "text_encoder": tiny.text_encoder(len(tokenizer), seed=seed)}
    small = transformer(conditioning, seed + 1, hidden_size=16, num_layers=1) if refiner else None
    return VARPipeline(transformer(conditioning, seed), tiny.scale_tokenizer(seed), refiner=small, **texts)


PIPELINES = {
    "var-text": (lambda: pipeline("text"), {"usual", "text", "captions", "trained", "twin"}),
    "var-class": (lambda: pipeline("class"), {"usual", "trained", "shared steps"}),
}
