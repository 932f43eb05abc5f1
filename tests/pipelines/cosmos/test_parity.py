"""Logits and greedy tokens equal those of the authors' implementation, on random weights in their file format."""

import pytest
import torch
from families import close
from pipelines.cosmos.tiny import FOLDER
from safetensors.torch import load_file

from arimage.convert.checkpoint import load_original
from arimage.decoding import Layout
from arimage.pipelines.cosmos.convert import cosmos_transformer_from_original
from arimage.pipelines.cosmos.transformer_cosmos import CosmosTokenModel


pytestmark = pytest.mark.usefixtures("no_grad")


SHAPE = (3, 3, 4)


@pytest.fixture(scope="module", params=["base", "base_yarn", "video2world"])
def golden(request):
    """The transformer and the authors' outputs."""
    transformer = cosmos_transformer_from_original(
        load_original(FOLDER / f"{request.param}.pt"), shape=SHAPE, yarn=request.param == "base_yarn"
    )
    return transformer, load_file(FOLDER / f"{request.param}.expected.safetensors")


def videos_of(expected):
    return expected["tf_tokens"].unflatten(1, SHAPE)


def bound(transformer, expected, maps):
    given = videos_of(expected)[:, :maps]
    return CosmosTokenModel(transformer, Layout((SHAPE[0] - maps, *SHAPE[1:])), given, expected.get("context"))


def test_teacher_forced_logits_equal_the_original(golden):
    transformer, expected = golden
    logits = transformer.predict(videos_of(expected), expected.get("context"))
    assert logits.dtype == torch.float32
    close(logits, expected["tf_logits"])


@pytest.mark.parametrize("queries", [1, 5])
def test_cached_logits_equal_the_original_teacher_forced_ones(golden, queries):
    transformer, expected = golden
    model = bound(transformer, expected, maps=1)
    tokens = expected["tf_tokens"][:, 12:-1]
    cache, first = model.prefill(len(tokens))
    logits = [first[0, :, None]]
    positions = torch.arange(model.num_tokens - 1).expand(len(tokens), -1)
    for fed, at in zip(tokens.split(queries, dim=1), positions.split(queries, dim=1), strict=True):
        logits.append(model.forward(fed, at, cache)[0])
    close(torch.cat(logits, dim=1), expected["tf_logits"][:, -model.num_tokens :])
