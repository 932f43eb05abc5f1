"""A tiny pipeline of every family and kind of condition, and how to call it."""

from importlib import import_module
from pathlib import Path

import pytest
import tiny
import torch
from pipelines.cosmos import tiny as tiny_cosmos

import arimage


# What tests choose families by.
TRAITS = {
    "usual": "from a prompt or class to tokens, with all arguments that images have in common",
    "special": "masked or continuous tokens, students with a teacher, videos, or tokens for a diffusion decoder",
    "videos": "videos",
    "language": "a language model of transformers",
    "text": "prompts; one for every way of reading them",
    "captions": "prompts that a T5 reads",
    "trained": "adapters can be trained",
    "fused": "projections can be fused; one for every network",
    "lines": "the cache may keep the last rows alone; one for every network",
    "twin": "differs from another one in its condition or its size alone",
    "shared steps": "its model, or the steps of its model, are those of another one",
}
# From a family's name to how it is built, and its traits.
PIPELINES = {}
for folder in sorted({path.parent.name for path in Path(arimage.__file__).parent.glob("pipelines/*/pipeline_*.py")}):
    PIPELINES |= import_module(f"pipelines.{folder}.tiny").PIPELINES
assert set().union(*(traits for _, traits in PIPELINES.values())) == TRAITS.keys()


def having(trait):
    """The families with a trait, and how they are built."""
    assert trait in TRAITS
    return {name: build for name, (build, traits) in PIPELINES.items() if trait in traits}


EVERY = {name: build for name, (build, _) in PIPELINES.items()}
BUILD, OTHERS, TWINS = having("usual"), having("special"), having("twin")


def quick(names, alike=()):
    """Families to parametrize a test by, of which the twins, and those `alike` for this test, are slow."""
    return [pytest.param(name, marks=pytest.mark.slow) if name in (*TWINS, *alike) else name for name in names]


# One of every kind of model, for tests of what families share.
KINDS = {
    "llamagen-text",
    "janus",
    "arpg",
    "var-text",
    "mar",
    "halton-maskgit-class",
    "latent-llama",
    "cosmos-text",
    "glm-image",
}
assert KINDS <= EVERY.keys()


def one_of_each_kind(names):
    """Families to parametrize a test by, of which all but one of each kind are slow."""
    return [name if name in KINDS else pytest.param(name, marks=pytest.mark.slow) for name in names]


def condition_of(pipe):
    if pipe.abilities.generates_video:
        if pipe.begins_with_text:
            return {"prompt": "a red heart", "num_frames": 17}
        return {"tokens": tiny_cosmos.given()} | ({"prompt": "a red heart"} if pipe.transformer.reads_text else {})
    return {"prompt": "a red heart"} if pipe.num_classes is None else {"class_labels": 3}


# Of different lengths.
PROMPTS = ["a red heart", "a blue book, flat style", "tree", "cat", "a grinning cat face", "book", "green tree"]


def conditions_of(pipe, count):
    """Different prompts, classes or maps for `count` images, at most seven."""
    if pipe.abilities.generates_video and not pipe.begins_with_text:
        given = {"tokens": tiny_cosmos.given(count)}
        return given | ({"prompt": PROMPTS[:count]} if pipe.transformer.reads_text else {})
    if pipe.num_classes is not None:
        return {"class_labels": [(3 * i) % tiny.NUM_CLASSES for i in range(count)]}
    return {"prompt": PROMPTS[:count]} | ({"num_frames": 17} if pipe.abilities.generates_video else {})


def pictures_of(out):
    """The images or videos of an output."""
    return out.frames if hasattr(out, "frames") else out.images


LATENT = {"output_type": "latent"}


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def flat(tokens):
    return torch.cat([part.flatten(1) for part in tokens], dim=1) if isinstance(tokens, list) else tokens.flatten(1)


def tokens(pipe, **settings):
    """Those [B, N] of a call with one seed."""
    return flat(pipe(**condition_of(pipe), **LATENT, generator=seeded(0), **settings).tokens)


def close(found, wanted, atol=1e-4):
    torch.testing.assert_close(found, wanted, atol=atol, rtol=0)
