"""ML-Cache: which rows it evaluates, and what it shares with the decoding that it makes cheaper."""

import pytest
import torch
from pipelines.halton_maskgit import tiny as tiny_halton
from pipelines.lumina_dimoo import tiny as tiny_dimoo

from arimage.decoding import ConfidenceDecoding, HaltonDecoding, MLCache, decode


@pytest.fixture(scope="module", params=["lumina-dimoo", "halton-maskgit"])
def call(request):
    """A guided call for two images, and its seeds."""
    if request.param == "lumina-dimoo":
        return tiny_dimoo.pipeline().prepare(["cup", "A red fox in the snow"], guidance_scale=3.0)
    return tiny_halton.pipeline().prepare(class_labels=[3, 7], guidance_scale=3.0)


def tokens_of(call, decoding, images=slice(None)):
    index = torch.arange(2)[images]
    with torch.no_grad():
        state = decode(call.model.take(index), decoding, call.sampling, call.seeds[index])
    assert state.finished.all()
    return state.tokens


SAMPLERS = [ConfidenceDecoding(steps=6), HaltonDecoding(steps=6)]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=["confidence", "halton"])
def test_full_steps_alone_are_those_of_the_sampler(call, sampler):
    wanted = tokens_of(call, sampler)
    assert torch.equal(tokens_of(call, MLCache(interval=1, sampler=sampler)), wanted)
    assert torch.equal(tokens_of(call, MLCache(warmup=0.9, sampler=sampler)), wanted)
    assert not torch.equal(tokens_of(call, MLCache(warmup=0, interval=9, sampler=sampler)), wanted)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=["confidence", "halton"])
def test_an_image_does_not_depend_on_its_batch(call, sampler):
    decoding = MLCache(warmup=0.2, interval=3, ratio=0.6, sampler=sampler)
    together = tokens_of(call, decoding)
    alone = [tokens_of(call, decoding, slice(image, image + 1)) for image in range(2)]
    assert torch.equal(together, torch.cat(alone))


def test_a_partial_pass_over_all_rows_is_a_full_one(call):
    model = call.model
    places = torch.arange(model.num_tokens).expand(2, -1)
    before = torch.full((2, model.num_tokens), -1)
    after = torch.where(places % 3 == 0, places % 5, -1)
    rows = torch.arange(model.num_rows).expand(2, -1).flip(1)
    with torch.no_grad():
        for logits in (False, True):
            context = model.open_context(2, logits=logits)
            model.forward(before, places, context=context)
            found = model.forward(after, places, rows=rows, context=context)
            torch.testing.assert_close(found, model.forward(after, places), atol=1e-4, rtol=1e-4)


def test_a_partial_step_evaluates_the_rows_with_the_lowest_logits(call, monkeypatch):
    """Of each branch its own, as many as up to the quantile, and all rows that have no logits."""
    model, passes, forward = call.model, [], type(call.model).forward

    def record(self, tokens, places, *, rows=None, context=None):
        if rows is not None and context is not None:
            passes.append((rows, context.logits.clone()))
        return forward(self, tokens, places, rows=rows, context=context)

    monkeypatch.setattr(type(model), "forward", record)
    tokens_of(call, MLCache(steps=4, warmup=0, interval=2, ratio=0.7))
    assert len(passes) == 2
    for rows, logits in passes:
        for branch in range(2):
            for image in range(2):
                scores = logits[branch, image].amax(-1)
                there = scores[scores < torch.inf]
                wanted = (scores <= there.quantile(1 - 0.7)).nonzero().flatten().tolist()
                wanted += range(len(scores), model.num_rows)
                chosen = rows[branch, image]
                assert sorted(chosen[chosen < model.num_rows].tolist()) == wanted
        assert not torch.equal(rows[0].sort().values, rows[1].sort().values)
