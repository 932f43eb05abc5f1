"""Edits of continuous tokens on the card: further calls replay the steps of others, with other images, texts, scales
and sizes of the reference."""

import card
import numpy as np
import pytest
import torch
from accelerator.runs import fresh
from families import seeded
from PIL import Image


def picture(seed, width=16, height=16):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


# Prompts with references of up to 16 tokens share a width.
CALLS = [
    (["make it red", "a <image> fox"], [picture(0), picture(1)], {"guidance_scale": 2.0}),
    (["a dog", "make it blue"], [picture(2), picture(3)], {"guidance_scale": 3.0, "temperature": 0.8}),
    (["a cat", "x"], [picture(4, 12, 16), picture(5)], {"guidance_scale": 1.5}),
]


@pytest.mark.parametrize(
    ("decoding", "image_guidance_scale"),
    [
        pytest.param("ar", 1.0, marks=pytest.mark.slow, id="two rows"),
        pytest.param("sjd-coupled:window=4", 1.5, id="three rows"),
    ],
)
def test_further_edits_replay_the_steps_of_others(decoding, image_guidance_scale):
    def edits(pipe):
        found = []
        for number, (prompts, images, settings) in enumerate(CALLS):
            out = pipe(
                prompts,
                image=images,
                image_guidance_scale=image_guidance_scale,
                height=16,
                width=16,
                decoding=decoding,
                generator=[seeded(2 * number + i) for i in range(2)],
                output_type="latent",
                **settings,
            )
            found.append((out.images, out.stats))
        return found

    expected = edits(fresh("nextstep", "cpu"))
    with card.card():
        found = edits(fresh("nextstep"))
    for (ours, stats), (theirs, plain) in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, atol=1e-4, rtol=1e-4)
        assert stats.forward_passes == plain.forward_passes
    assert [stats.steps for _, stats in found[1:]] == ["captured", "captured"]
