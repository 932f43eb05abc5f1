"""The tiny random GLM-Image of the fixtures, in the published layout, and what diffusers and transformers do with it.

`expected.safetensors` is thinned: `*_images` have every fourth row and column of pixels, `t2i_logits_*` every fourth
token.
"""

import json
from functools import cache
from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import GlmImageForConditionalGeneration

import arimage
from arimage.decoding import Layout
from arimage.pipelines.glm_image.prompts import encode_prompts
from arimage.pipelines.glm_image.transformer_glm_image import bind_prompts, grids_of


FOLDER = Path(__file__).parent / "fixtures"
INPUTS = json.loads((FOLDER / "inputs.json").read_text())
EXPECTED = load_file(FOLDER / "expected.safetensors")
CODES, CASES = INPUTS["codes"], ("t2i", "i2i1", "i2i2")


@cache
def encoder() -> GlmImageForConditionalGeneration:
    """The language model; not to be changed."""
    return GlmImageForConditionalGeneration.from_pretrained(FOLDER / "vision_language_encoder").requires_grad_(False)


def small_grids(processor, texts, sources, size):
    """Images begin with 4 x 3 tokens, not with about 16 x 16 at any size."""
    inputs = encode_prompts(processor, texts, sources, size)
    if not sources:
        inputs["image_grid_thw"][1::2] = torch.tensor([1, 4, 3])
    return inputs


class GlmImagePipeline(arimage.GlmImagePipeline):
    """Generates small images by default, from small grids."""

    image_sizes = [(64, 32), (32, 64)]
    encode_prompts = staticmethod(small_grids)

    def num_tokens(self, size):
        return size[0] * size[1] // 32**2 + 12


def pipeline():
    pipe = GlmImagePipeline.from_pretrained(FOLDER)
    pipe.set_progress_bar_config(disable=True)
    pipe.generation_config["num_inference_steps"] = 2
    return pipe


def size_of(case):
    return INPUTS[case]["height"], INPUTS[case]["width"]


def sources(case, prompt):
    """The pictures of a prompt."""
    pictures = INPUTS[case].get("sources", [[], []])[prompt]
    return [Image.fromarray(EXPECTED[f"{case}_source_{prompt}_{i}"].numpy()) for i in range(len(pictures))]


def source_grids(case):
    """The grids of all pictures of a case, prompt after prompt."""
    return [tuple(grid[1:]) for grid in EXPECTED.get(f"{case}_source_grid_thw", torch.zeros(0, 3)).tolist()]


def layout_of(case):
    large, small = grids_of(size_of(case))
    return Layout(large, before=[] if source_grids(case) else [small])


def codes_of(case):
    """The expected tokens of all pictures of a case, prompt after prompt."""
    tokens = [EXPECTED[name] for b in range(2) if (name := f"{case}_source_tokens_{b}") in EXPECTED]
    return list(torch.cat(tokens).split([rows * columns for rows, columns in source_grids(case)])) if tokens else []


def bind(case, network=None):
    """The language model, or another `network`, with the prompts of a case, as its processor returned them."""
    ids, mask = EXPECTED[f"{case}_input_ids"], EXPECTED[f"{case}_attention_mask"]
    device = torch.device("cpu")
    network = encoder() if network is None else network
    return bind_prompts(network, ids, mask, source_grids(case), codes_of(case), layout_of(case), device)


PIPELINES = {"glm-image": (pipeline, {"special", "text", "fused", "shared steps"})}
