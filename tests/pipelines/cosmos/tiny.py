"""Tiny video pipelines with random weights: 17 frames of 48 x 64 pixels are 3 x 3 x 4 tokens."""

from copy import deepcopy
from functools import cache
from pathlib import Path

import tiny
import torch
from diffusers.utils import logging

from arimage.convert import convert_cosmos, convert_cosmos_tokenizer
from arimage.pipelines.cosmos.pipeline_cosmos import CosmosPipeline
from arimage.pipelines.cosmos.transformer_cosmos import CosmosTransformer


FOLDER = Path(__file__).parent / "fixtures" / "model"
TOKENIZER = FOLDER.with_name("tokenizer")
SHAPE, FRAMES, SIZE = (3, 3, 4), 17, (48, 64)
TEXT_LENGTH = 12


def golden_pipeline(name: str) -> CosmosPipeline:
    """Of the authors' files "base", "base_yarn" or "video2world"."""
    logging.set_verbosity_error()
    pipe = convert_cosmos(FOLDER / f"{name}.pt", tokenizer=TOKENIZER, num_frames=FRAMES, height=SIZE[0], width=SIZE[1])
    logging.set_verbosity_warning()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def transformer(kind: str = "video", seed: int = 0, block_tokens: int = 1) -> CosmosTransformer:
    """Of videos alone ("video"), or with text ("text")."""
    model = CosmosTransformer(
        shape=SHAPE,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        vocab_size=240,
        context_dim=tiny.TEXT_WIDTH if kind == "text" else None,
        block_tokens=block_tokens,
    )
    return tiny.randomise(model, seed)


@cache
def video_tokenizer():
    return convert_cosmos_tokenizer(TOKENIZER)


def pipeline(kind: str = "video", seed: int = 0, block_tokens: int = 1, **components) -> CosmosPipeline:
    if kind == "text":
        tokenizer = tiny.text_tokenizer()
        components |= {"tokenizer": tokenizer, "text_encoder": tiny.text_encoder(len(tokenizer), seed=seed)}
    pipe = CosmosPipeline(transformer(kind, seed, block_tokens), deepcopy(video_tokenizer()), **components)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def given(count: int = 1, maps: int = 1) -> torch.LongTensor:
    """Token maps that a video continues."""
    return torch.randint(240, (count, maps, *SHAPE[1:]), generator=torch.Generator().manual_seed(5))


PIPELINES = {
    "cosmos": (pipeline, {"special", "videos", "fused", "lines", "shared steps"}),
    "cosmos-text": (lambda: pipeline("text"), {"special", "videos", "text", "captions", "lines"}),
    "cosmos-blocks": (lambda: pipeline("text", block_tokens=4), {"videos", "shared steps"}),
}
