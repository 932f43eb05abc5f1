"""Tiny RAR pipelines with random weights."""

from pathlib import Path

import tiny

from arimage.pipelines.rar.pipeline_rar import RARPipeline
from arimage.pipelines.rar.transformer_rar import RARTransformer
from arimage.pipelines.rar.vq_maskgit import MaskGITVQModel


FIXTURES = Path(__file__).parent / "fixtures"


def transformer(grid: int = 4, seed: int = 0, **changes) -> RARTransformer:
    model = tiny.randomise(RARTransformer(**tiny.any_order_settings(grid) | changes), seed)
    for table in (model.position_embedding, model.target_embedding, model.modulation_embedding):
        table.weight.data *= 0.5
    return model


def image_tokenizer(seed: int = 0) -> MaskGITVQModel:
    shape = {"channels": 8, "channel_multipliers": (1, 2), "layers_per_block": 1, "norm_num_groups": 4}
    return tiny.randomise(MaskGITVQModel(**shape, latent_channels=4, codebook_size=tiny.CODES), seed + 1)


def pipeline(grid: int = 4, seed: int = 0) -> RARPipeline:
    """A class to images of grid * SCALE_FACTOR pixels, with guidance that grows along the image."""
    pipe = RARPipeline(transformer(grid, seed), image_tokenizer(seed))
    pipe.generation_config["guidance_scale_pow"] = 1.5
    return pipe


PIPELINES = {"rar-class": (pipeline, {"usual", "trained", "lines"})}
