"""The pipeline of Halton-MaskGIT: classes and texts, editing, decodings, callbacks, saving and loading."""

import pytest
import tiny
import torch
from families import LATENT, seeded
from pipelines.halton_maskgit import tiny as tiny_halton

from arimage import HaltonMaskGITPipeline
from arimage.decoding import Layout
from arimage.pipelines.halton_maskgit.pipeline_halton_maskgit import CONFIDENCE
from arimage.pipelines.halton_maskgit.transformer_halton_maskgit import HaltonMaskGITModel


CONDITIONS = {"class": {"class_labels": [1, 2, 3]}, "text": {"prompt": ["a red heart", "a blue book", "green tree"]}}


@pytest.fixture(scope="module")
def pipe():
    return tiny_halton.pipeline()


@pytest.fixture(scope="module")
def pipes(pipe):
    return {"class": pipe, "text": tiny_halton.pipeline("text")}


def tokens(pipe, seed=0, **options):
    condition = {} if "prompt" in options else {"class_labels": 3}
    return pipe(**{**condition, **options}, generator=seeded(seed), **LATENT).images


@torch.no_grad()
def test_padding_of_a_text_and_texts_that_are_dropped_have_no_effect(pipes):
    transformer = pipes["text"].transformer
    embeds = torch.randn(2, tiny.TEXT_LENGTH, tiny.TEXT_WIDTH, generator=seeded(0))
    mask, codes = torch.ones(2, tiny.TEXT_LENGTH, dtype=torch.long), torch.full((2, 16), tiny.CODES)
    mask[0, 3:] = 0
    dropped = torch.tensor([False, True])
    other = embeds.clone()
    other[0, 3:], other[1] = 7, 5
    found, wanted = (
        transformer(codes, prompt_embeds=each, prompt_attention_mask=mask, unconditional=dropped)
        for each in (embeds, other)
    )
    assert torch.equal(found, wanted)
    other[0, 2] += 1
    assert not torch.allclose(
        transformer(codes, prompt_embeds=other, prompt_attention_mask=mask, unconditional=dropped)[0], found[0]
    )


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("logits", [False, True])
@torch.no_grad()
def test_passes_over_few_rows(pipes, condition, logits):
    """Those over all rows in any order are passes over the picture; those over some change nothing else."""
    pipe = pipes[condition]
    model = pipe.prepare(**CONDITIONS[condition], guidance_scale=2.0).model
    given = torch.randint(-1, tiny.CODES, (3, 16), generator=seeded(0))
    changed, places = given.clone(), torch.arange(16).expand(3, -1)
    changed[:, 5] = (given[:, 5] + 2) % tiny.CODES
    context, size = model.open_context(3, logits=logits), model.num_rows
    before = model.forward(given, places, context=context)
    keys = context.stacks[0].clone()
    # Padding writes nowhere.
    rows = torch.tensor([5, 9, size, size]).expand(2, 3, -1)
    asked = torch.tensor([[9, 5, 16]]).expand(3, -1)
    part = model.forward(changed, asked, rows=rows, context=context)
    wanted = model.forward(changed, places)
    assert part.shape == (2, 3, 3, tiny.CODES) and not torch.allclose(part[:, :, 0], before[:, :, 9], atol=1e-2)
    kept = torch.ones(size, dtype=torch.bool).index_fill(0, torch.tensor([5, 9]), False)
    assert torch.equal(context.stacks[0][..., :size, :][..., kept, :], keys[..., :size, :][..., kept, :])
    if logits:
        # The logits of all other places are still there.
        assert torch.equal(
            model.forward(changed, asked.clone().fill_(2), rows=rows, context=context)[:, :, 0], before[:, :, 2]
        )
        assert context.logits.shape == (2, 3, 16, tiny.CODES)
    everything = torch.arange(size).flip(0).expand(3, -1)
    torch.testing.assert_close(model.forward(changed, places, rows=everything, context=context), wanted)


def test_an_order_is_refused(pipe):
    layout = Layout((4, 4), torch.arange(16).flip(0)[None])
    with pytest.raises(ValueError, match="layout has an order"):
        HaltonMaskGITModel(pipe.transformer, {"class_labels": torch.zeros(1).long()}, layout, CONFIDENCE)


def test_components_that_do_not_fit_are_refused(pipe):
    with pytest.raises(ValueError, match="tokens: the transformer has 40"):
        HaltonMaskGITPipeline(tiny_halton.transformer(vocab_size=40), pipe.vq)
    with pytest.raises(ValueError, match="num_attention_heads is 33"):
        tiny_halton.transformer(num_attention_heads=33)
    with pytest.raises(ValueError, match="steps is 17"):
        pipe(class_labels=1, decoding="halton:steps=17")
    with pytest.raises(ValueError, match="in any order"):
        pipe(class_labels=1, decoding="ar")
