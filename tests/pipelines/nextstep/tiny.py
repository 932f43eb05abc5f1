"""Tiny NextStep pipelines with random weights: 16 tokens of 12 numbers are an image of 16 x 16 pixels."""

import json
from pathlib import Path

import tiny
from diffusers import AutoencoderKL
from transformers import Qwen2Config, Qwen2Model, Qwen2TokenizerFast

from arimage.convert import convert_nextstep
from arimage.models.denoising_head import DenoisingHead
from arimage.pipelines.nextstep.pipeline_nextstep import NextStepPipeline
from arimage.pipelines.nextstep.projector import NextStepProjector


FIXTURES = Path(__file__).parent / "fixtures"
REFERENCE = json.loads((FIXTURES / "reference.json").read_text(encoding="utf-8"))
WIDTH, TOKEN_DIM, STEPS = 32, 12, 4


def golden_pipeline(version: str = "1.1", **changes) -> NextStepPipeline:
    """Of the authors' files of NextStep-1.1 or NextStep-1."""
    return convert_nextstep(FIXTURES / f"v{version}", vae=FIXTURES / "v1.1" / "vae", **changes)


def model(seed: int = 0, **changes) -> Qwen2Model:
    settings = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen2Config(vocab_size=327, num_key_value_heads=2, **settings | changes)
    return tiny.randomise(Qwen2Model(config), seed)


def head(seed: int = 0) -> DenoisingHead:
    shape = {"token_dim": TOKEN_DIM, "condition_dim": WIDTH, "hidden_size": 32, "num_layers": 2}
    head = tiny.randomise(DenoisingHead(**shape, learned_variance=False), seed + 1)
    head.output_projection.weight.data *= 0.05
    return head


def vae(seed: int = 0) -> AutoencoderKL:
    without = {"use_quant_conv": False, "use_post_quant_conv": False}
    return tiny.autoencoder(seed + 2, scaling_factor=0.9, shift_factor=0.1, **without)


def projector(seed: int = 0) -> NextStepProjector:
    projector = tiny.randomise(NextStepProjector(TOKEN_DIM, WIDTH), seed + 3)
    # Tokens of about 1 that depend a little on those before: from token to token guidance multiplies what is rounded.
    projector.of_tokens.weight.data *= 0.01
    return projector


def drafting(seed: int = 10) -> dict:
    return {
        "drafter": model(seed, num_hidden_layers=1),
        "drafter_projector": projector(seed),
        "drafter_head": head(seed),
    }


def pipeline(seed: int = 0, **more) -> NextStepPipeline:
    tokenizer = Qwen2TokenizerFast.from_pretrained(FIXTURES / "v1.1")
    pipe = NextStepPipeline(model(seed), projector(seed), head(seed), vae(seed), tokenizer, image_size=16, **more)
    pipe.generation_config.update(num_diffusion_steps=STEPS, guidance_scale=2.0)
    return pipe


PIPELINES = {"nextstep": (pipeline, {"special", "text"})}
