"""A tiny pipeline of every family and kind of condition, and how to call it."""

import tiny
import tiny_emu3
import tiny_janus
import tiny_lumina_mgpt
import torch

from arimage import JanusPipeline
from arimage.convert import convert_janus


def janus():
    pipe = JanusPipeline(convert_janus(tiny_janus.FOLDER).model, tiny_janus.processor())
    pipe.set_progress_bar_config(disable=True)
    return pipe


BUILD = {
    "llamagen-text": tiny.text_pipeline,
    "llamagen-class": tiny.class_pipeline,
    "var-text": lambda: tiny.scale_pipeline("text"),
    "var-class": lambda: tiny.scale_pipeline("class"),
    "janus": janus,
    "emu3": tiny_emu3.pipeline,
    "lumina": tiny_lumina_mgpt.pipeline,
    "lumina-2": lambda: tiny_lumina_mgpt.pipeline(tiny_lumina_mgpt.VERSION_2),
    "anole": tiny_lumina_mgpt.anole_pipeline,
}


def condition_of(pipe):
    return {"prompt": "a red heart"} if pipe.num_classes is None else {"class_labels": 3}


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def flat(tokens):
    return torch.cat([part.flatten(1) for part in tokens], dim=1) if isinstance(tokens, list) else tokens.flatten(1)
