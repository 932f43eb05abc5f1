"""Next Block Prediction: a Cosmos transformer that predicts the tokens of a row together."""

import pytest
import tiny
import torch
from pipelines.cosmos import tiny as tiny_cosmos
from pipelines.cosmos.tiny import SHAPE

from arimage.decoding import Layout, SpeculativeJacobiDecoding
from arimage.pipelines.cosmos.transformer_cosmos import CosmosTokenModel


FRAME = SHAPE[1] * SHAPE[2]
ROW = SHAPE[2]
PROMPTS = ["a red heart", "a blue book"]
# Half a row, a row and a frame.
BLOCKS = [2, ROW, FRAME]


def videos():
    return torch.randint(240, (2, *SHAPE), generator=torch.Generator().manual_seed(1))


def embeds_of(kind):
    generator = torch.Generator().manual_seed(2)
    return torch.randn(2, 5, tiny.TEXT_WIDTH, generator=generator) if kind == "text" else None


def bound(transformer, maps, kind):
    layout = Layout((SHAPE[0] - maps, *SHAPE[1:]))
    return CosmosTokenModel(transformer, layout, videos()[:, :maps], embeds_of(kind))


@pytest.mark.every(3)
@torch.no_grad()
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(("kind", "maps"), [("text", 0), ("text", 1), ("video", 1)])
def test_logits_with_a_cache_are_those_that_training_sees(kind, maps, block):
    transformer, tokens = tiny_cosmos.transformer(kind, block_tokens=block), videos().flatten(1)[:, maps * FRAME :]
    expected = transformer.predict(videos(), embeds_of(kind))[:, -tokens.shape[1] :]
    model = bound(transformer, maps, kind)
    cache, first = model.prefill(2)
    torch.testing.assert_close(first[0], expected[:, :block], atol=1e-4, rtol=1e-4)
    # First come wrong drafts, then the right tokens, two blocks per pass: the later one of an image comes first.
    ranks = torch.arange(tokens.shape[1])
    model.forward(tokens.flip(1), ranks.expand(2, -1), cache)
    for positions in ranks[:-block].split(2 * block):
        positions = torch.stack([positions, positions.flip(0)])
        logits = model.forward(tokens.gather(1, positions), positions, cache)[0]
        after = (positions + block)[..., None].expand_as(logits)
        torch.testing.assert_close(logits, expected.gather(1, after), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("block", [0, 5, 24])
def test_blocks_that_do_not_divide_a_frame_are_refused(block):
    with pytest.raises(ValueError, match=f"block_tokens is {block}: give (at least 1|.* the 12 tokens of a frame)"):
        tiny_cosmos.transformer(block_tokens=block)


@pytest.fixture(scope="module")
def pipe():
    return tiny_cosmos.pipeline("text", block_tokens=ROW, begins_with_text=True)


@pytest.mark.parametrize("maps", [0, 1])
def test_a_forward_pass_decides_a_row(pipe, maps):
    settings = {"output_type": "latent"} | ({"tokens": tiny_cosmos.given(2, maps)} if maps else {})

    def generate(decoding, **more):
        return pipe(PROMPTS, decoding=decoding, generator=torch.Generator().manual_seed(0), **settings | more)

    output, rows = generate("ar"), (SHAPE[0] - maps) * SHAPE[1]
    assert output.tokens.shape == (2, *SHAPE) and output.stats.forward_passes == rows and output.stats.exact
    assert torch.equal(output.tokens[:, :maps], settings.get("tokens", output.tokens[:, :0]))
    assert torch.equal(generate("ar", batch_size=1).tokens, output.tokens)
    assert torch.equal(generate(SpeculativeJacobiDecoding(1), top_k=1).tokens, generate("ar", top_k=1).tokens)


@pytest.mark.parametrize(
    "decoding", ["sjd", SpeculativeJacobiDecoding(6, "coupled", "previous"), "sjd-gumbel"], ids=str
)
def test_guided_rows_of_a_batch_are_those_of_autoregressive_calls(pipe, decoding):
    settings = {"guidance_scale": 3.0, "output_type": "latent", "top_k": 1}
    output = pipe(PROMPTS, num_videos_per_prompt=2, batch_size=3, decoding=decoding, **settings)
    assert torch.equal(output.tokens[0], output.tokens[1]) and output.stats.exact
    for prompt, video in zip(PROMPTS, output.tokens[::2], strict=True):
        assert torch.equal(pipe(prompt, decoding="ar", **settings).tokens[0], video)


@pytest.mark.parametrize("decoding", ["sjd-tree", "sjd-lazy", "zipar", "pjd", "flow:guesses=random", "groups"])
def test_other_decodings_refuse_rows(pipe, decoding):
    with pytest.raises(ValueError, match="predicts whole blocks of tokens"):
        pipe("a red heart", decoding=decoding)
