"""Tiny students of Distilled Decoding with random weights."""

from pathlib import Path

import tiny
from pipelines.llamagen import tiny as tiny_llamagen
from pipelines.var import tiny as tiny_var

from arimage.pipelines.distilled_decoding.pipeline_llamagen_dd import LlamaGenDDPipeline
from arimage.pipelines.distilled_decoding.pipeline_var_dd import VARDDPipeline
from arimage.pipelines.distilled_decoding.transformer_llamagen_dd import LlamaGenDDTransformer
from arimage.pipelines.distilled_decoding.transformer_var_dd import VARDDTransformer


FIXTURES = Path(__file__).parent / "fixtures"


def pipeline(family: str, seed: int = 0, teacher: bool = True, **settings) -> LlamaGenDDPipeline | VARDDPipeline:
    """A student of "llamagen" or "var" and, by default, its teacher; from NUM_CLASSES classes to 8x8
    pixels."""
    shape = {
        "vocab_size": tiny.CODES,
        "codebook_dim": 4,
        "num_classes": tiny.NUM_CLASSES,
        "hidden_size": 32,
        "num_layers": 2,
    }
    if family == "llamagen":
        student = LlamaGenDDTransformer(
            grid_size=4,
            intermediate_size=64,
            num_attention_heads=4,
            num_key_value_heads=2,
            codes_until=6,
            **shape,
            **settings,
        )
        parts = tiny.image_tokenizer(seed=seed), tiny_llamagen.transformer("class", seed=seed + 1) if teacher else None
        pipe = LlamaGenDDPipeline(tiny.randomise(student, seed), *parts)
    else:
        student = VARDDTransformer(scales=tiny.SCALES, num_attention_heads=4, codes_until=2, **shape, **settings)
        parts = tiny.scale_tokenizer(seed), tiny_var.transformer("class", seed + 1) if teacher else None
        pipe = VARDDPipeline(tiny.randomise(student, seed), *parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


PIPELINES = {
    "llamagen-dd": (lambda: pipeline("llamagen"), {"special"}),
    "var-dd": (lambda: pipeline("var"), {"special"}),
}
