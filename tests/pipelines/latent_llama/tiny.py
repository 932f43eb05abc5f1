"""Tiny pipelines of continuous tokens in turn, with a drafter."""

import tiny

from arimage.pipelines.latent_llama.pipeline_latent_llama import LatentLlamaPipeline
from arimage.pipelines.latent_llama.transformer_latent_llama import LatentLlamaTransformer


def transformer(seed=0, **changes) -> LatentLlamaTransformer:
    settings = {
        "conditioning": "class",
        "num_classes": tiny.NUM_CLASSES,
        "grid_size": 3,
        "patch_size": 2,
        "token_dim": 16,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_attention_heads": 4,
        "head_hidden_size": 24,
        "num_head_layers": 2,
    }
    return tiny.randomise(LatentLlamaTransformer(**settings | changes), seed)


def pipeline(**changes) -> LatentLlamaPipeline:
    """Ten classes to images of 12 pixels: 9 tokens of width 16."""
    pipe = LatentLlamaPipeline(
        transformer(), tiny.image_tokenizer(), drafter=transformer(1, hidden_size=16, num_layers=1), **changes
    )
    pipe.generation_config["num_diffusion_steps"] = 6
    return pipe


PIPELINES = {
    "latent-llama": (pipeline, {"fused"}),
}
