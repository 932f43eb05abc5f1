"""Tiny LlamaGen pipelines with random weights."""

from pathlib import Path

import tiny

from arimage.models.neighbours import NeighbourModel
from arimage.models.window_drafter import WindowDrafter
from arimage.pipelines.llamagen.denoiser_llamagen import LlamaGenDenoiser
from arimage.pipelines.llamagen.drafter_llamagen import LlamaGenDrafter
from arimage.pipelines.llamagen.pipeline_llamagen import LlamaGenPipeline
from arimage.pipelines.llamagen.transformer_llamagen import LlamaGenTransformer


FIXTURES = Path(__file__).parent / "fixtures"


def transformer(conditioning: str, grid: int = 4, seed: int = 0, **changes) -> LlamaGenTransformer:
    settings = {
        "conditioning": conditioning,
        "grid_size": grid,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": tiny.CODES,
        "num_classes": tiny.NUM_CLASSES,
        "num_condition_tokens": tiny.TEXT_LENGTH if conditioning == "text" else 1,
        "caption_dim": tiny.TEXT_WIDTH,
    }
    return tiny.randomise(LlamaGenTransformer(**{**settings, **changes}), seed)


def drafter(of: LlamaGenTransformer, seed: int = 0) -> LlamaGenDrafter:
    return tiny.randomise(LlamaGenDrafter.for_transformer(of), seed + 3)


def denoiser(of: LlamaGenTransformer, seed: int = 0) -> LlamaGenDenoiser:
    return tiny.randomise(LlamaGenDenoiser.for_transformer(of, codebook_dim=4, rank=8), seed + 4)


def neighbours(seed: int = 0) -> NeighbourModel:
    return tiny.randomise(NeighbourModel(tiny.CODES, rank=8), seed + 5)


def window_drafter(of: LlamaGenTransformer, seed: int = 0) -> WindowDrafter:
    return tiny.randomise(WindowDrafter.for_transformer(of, rank=4, hidden_size=8), seed + 6)


def text_pipeline(grid: int = 4, seed: int = 0, **changes) -> LlamaGenPipeline:
    """Text to images of grid * SCALE_FACTOR pixels."""
    tokenizer, model = tiny.text_tokenizer(), transformer("text", grid, seed, **changes)
    return LlamaGenPipeline(
        model,
        tiny.image_tokenizer(seed=seed),
        tokenizer,
        tiny.text_encoder(len(tokenizer), seed=seed),
        drafter(model, seed),
        denoiser(model, seed),
        neighbours=neighbours(seed),
    )


def class_pipeline(grid: int = 4, seed: int = 0) -> LlamaGenPipeline:
    """NUM_CLASSES classes to images of grid * SCALE_FACTOR pixels."""
    model = transformer("class", grid, seed)
    parts = {"drafter": drafter(model, seed), "denoiser": denoiser(model, seed)}
    parts["neighbours"] = window_drafter(model, seed)
    return LlamaGenPipeline(model, tiny.image_tokenizer(seed=seed), **parts)


PIPELINES = {
    "llamagen-text": (text_pipeline, {"usual", "text", "captions", "trained", "fused", "lines"}),
    "llamagen-class": (class_pipeline, {"usual", "trained", "lines", "twin", "shared steps"}),
}
