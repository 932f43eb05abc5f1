"""Tiny MAR pipelines: the reference's, and one whose encoder and decoder differ and whose patches have four places."""

from pathlib import Path

from diffusers import AutoencoderKL
from tiny import NUM_CLASSES, autoencoder, randomise

from arimage.models.denoising_head import DenoisingHead
from arimage.pipelines.mar.pipeline_mar import MARPipeline
from arimage.pipelines.mar.transformer_mar import MARTransformer


FOLDER = Path(__file__).parent / "fixtures"
STEPS = {"num_inference_steps": 4, "num_diffusion_steps": [4, 2, 1]}


def transformer(**changes) -> MARTransformer:
    settings = {
        "num_classes": NUM_CLASSES,
        "token_dim": 12,
        "patch_size": 2,
        "grid_size": 4,
        "num_buffers": 3,
        "hidden_size": 32,
        "num_layers": 2,
        "num_attention_heads": 4,
        "decoder_hidden_size": 24,
        "num_decoder_layers": 5,
        "num_decoder_attention_heads": 2,
        "mlp_ratio": 2.0,
    }
    model = randomise(MARTransformer(**settings | changes), 0)
    model.null_vector.data.add_(0.5)
    return model


def head(**changes) -> DenoisingHead:
    settings = {"token_dim": 12, "condition_dim": 24, "hidden_size": 32, "num_layers": 2}
    return randomise(DenoisingHead(**settings | changes), 1)


def vae() -> AutoencoderKL:
    return autoencoder(2, scaling_factor=0.25)


def pipeline() -> MARPipeline:
    """Ten classes to images of 16 pixels: 16 tokens of width 12."""
    pipe = MARPipeline(transformer(), head(), vae())
    pipe.generation_config.update(STEPS)
    return pipe


def pipeline_with_drafter() -> MARPipeline:
    parts = {"drafter": transformer(num_layers=1), "drafter_head": head()}
    pipe = MARPipeline(**{**pipeline().components, **parts})
    pipe.generation_config.update(STEPS)
    return pipe


PIPELINES = {
    "mar": (pipeline, {"special"}),
}
