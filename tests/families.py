"""A tiny pipeline of every family and kind of condition, and how to call it."""

import pytest
import tiny
import tiny_cosmos
import tiny_emu3
import tiny_emu35
import tiny_glm_image
import tiny_janus
import tiny_latent_llama
import tiny_lumina_mgpt
import tiny_mammothmoda2
import tiny_mar
import torch

from arimage import JanusPipeline
from arimage.convert import convert_janus


def janus():
    pipe = JanusPipeline(convert_janus(tiny_janus.FOLDER).model, tiny_janus.processor())
    pipe.set_progress_bar_config(disable=True)
    return pipe


# From a prompt or class to tokens, with all arguments that images have in common.
BUILD = {
    "llamagen-text": tiny.text_pipeline,
    "llamagen-class": tiny.class_pipeline,
    "var-text": lambda: tiny.scale_pipeline("text"),
    "var-class": lambda: tiny.scale_pipeline("class"),
    "infinity": tiny.bit_pipeline,
    "janus": janus,
    "emu3": tiny_emu3.pipeline,
    "emu3.5": tiny_emu35.pipeline,
    "lumina": tiny_lumina_mgpt.pipeline,
    "lumina-2": lambda: tiny_lumina_mgpt.pipeline(tiny_lumina_mgpt.VERSION_2),
    "anole": tiny_lumina_mgpt.anole_pipeline,
}

# Continuous tokens, students with a teacher, videos, and tokens for a diffusion decoder.
OTHERS = {
    "mar": tiny_mar.pipeline,
    "llamagen-dd": lambda: tiny.distilled_pipeline("llamagen"),
    "var-dd": lambda: tiny.distilled_pipeline("var"),
    "cosmos": tiny_cosmos.pipeline,
    "cosmos-text": lambda: tiny_cosmos.pipeline("text"),
    "glm-image": tiny_glm_image.pipeline,
    "mammothmoda2": tiny_mammothmoda2.pipeline,
    "mammothmoda2-dev": lambda: tiny_mammothmoda2.pipeline("dev"),
}

# Every family, and every kind of model of a family.
EVERY = {
    **BUILD,
    **OTHERS,
    "arpg": lambda: tiny.any_order_pipeline("arpg"),
    "arpg-text": lambda: tiny.any_order_pipeline("arpg", "text"),
    "arpg-places": lambda: tiny.any_order_pipeline("arpg with places", "text"),
    "lpd": lambda: tiny.any_order_pipeline("lpd"),
    "randar": lambda: tiny.any_order_pipeline("randar"),
    "latent-llama": tiny_latent_llama.pipeline,
    "cosmos-blocks": lambda: tiny_cosmos.pipeline("text", block_tokens=4),
}

# Differ from another family in their condition or their size alone.
TWINS = ("llamagen-class", "var-text", "lumina-2", "arpg-text", "mammothmoda2-dev")


def quick(names, alike=()):
    """Families to parametrize a test by, of which the twins, and those `alike` for this test, are slow."""
    return [pytest.param(name, marks=pytest.mark.slow) if name in (*TWINS, *alike) else name for name in names]


def condition_of(pipe):
    if pipe.abilities.generates_video:
        return {"tokens": tiny_cosmos.given()} | ({"prompt": "a red heart"} if pipe.transformer.reads_text else {})
    return {"prompt": "a red heart"} if pipe.num_classes is None else {"class_labels": 3}


def pictures_of(out):
    """The images or videos of an output."""
    return out.frames if hasattr(out, "frames") else out.images


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def flat(tokens):
    return torch.cat([part.flatten(1) for part in tokens], dim=1) if isinstance(tokens, list) else tokens.flatten(1)
