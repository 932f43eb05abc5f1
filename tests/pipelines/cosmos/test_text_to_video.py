"""Videos from a text alone, and guidance by it."""

import pytest
import torch
from pipelines.cosmos import tiny as tiny_cosmos
from pipelines.cosmos.tiny import SHAPE

from arimage.decoding import Layout
from arimage.pipelines.cosmos.transformer_cosmos import CosmosTokenModel


PROMPTS = ["a red heart", "a blue book"]


@pytest.fixture(scope="module")
def pipe():
    return tiny_cosmos.pipeline("text", begins_with_text=True)


def test_a_text_alone_begins_a_video(pipe, tmp_path):
    settings = {"generator": torch.Generator().manual_seed(0), "output_type": "latent"}
    videos = pipe(PROMPTS, **settings).tokens
    none = torch.empty(1, 0, *SHAPE[1:], dtype=torch.long)
    settings["generator"].manual_seed(0)
    assert videos.shape == (2, *SHAPE) and torch.equal(videos, pipe(PROMPTS, tokens=none, **settings).tokens)
    assert not torch.equal(videos[0], videos[1])
    assert pipe("a red heart", num_frames=9, output_type="latent").tokens.shape == (1, 2, *SHAPE[1:])
    pipe.save_pretrained(tmp_path)
    assert "text-to-video" in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize("given", [0, 1])
def test_guided_logits_are_those_with_the_text_and_without(pipe, given):
    embeds = torch.randn(2, 5, pipe.transformer.config.context_dim, generator=torch.Generator().manual_seed(0))
    maps = tiny_cosmos.given(2, given)
    layout = Layout((SHAPE[0] - given, *SHAPE[1:]))

    def logits(embeds, guided):
        model = CosmosTokenModel(pipe.transformer, layout, maps, embeds, guided=guided)
        model.merge_prompts()
        cache, first = model.prefill(2)
        tokens = torch.tensor([[3, 5, -1], [7, 1, 2]])
        positions = torch.tensor([[0, 1, -1], [0, 1, 2]])
        return first, model.forward(tokens, positions, cache)

    with torch.no_grad():
        for both, with_text, without in zip(
            logits(embeds, True), logits(embeds, False), logits(torch.zeros_like(embeds), False), strict=True
        ):
            torch.testing.assert_close(both, torch.cat([with_text, without]), atol=1e-4, rtol=1e-4)


def test_only_models_of_text_alone_are_guided():
    with pytest.raises(ValueError, match="guidance_scale is 2.0, but this checkpoint was trained without"):
        tiny_cosmos.pipeline("text")("a red heart", tokens=tiny_cosmos.given(), guidance_scale=2.0)
    with pytest.raises(ValueError, match="guided needs a model with text"):
        CosmosTokenModel(tiny_cosmos.transformer(), Layout((2, 3, 4)), tiny_cosmos.given(), guided=True)
