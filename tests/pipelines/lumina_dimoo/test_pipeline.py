"""Calls of a tiny Lumina-DiMOO: batches, painting, changes of whole pictures, guidance, and what is refused."""

import numpy as np
import pytest
import torch
from families import seeded
from PIL import Image
from pipelines.lumina_dimoo import tiny

from arimage.decoding import ConfidenceDecoding, MLCache, ReCAP
from arimage.pipelines.lumina_dimoo import pipeline_lumina_dimoo


PROMPTS = ["cup", "A red fox in the snow, étude no. 7", "a blue book"]
CACHED = MLCache(steps=8, warmup=0.2, interval=3, ratio=0.7)
DECODINGS = [ConfidenceDecoding(steps=8), CACHED, ReCAP(steps=6, sampler=ConfidenceDecoding())]
NAMES = ["confidence", "ml-cache", "recap"]


@pytest.fixture(scope="module")
def pipe():
    return tiny.pipeline()


@pytest.fixture
def small_pictures(monkeypatch):
    """Pictures keep their size, where the authors scale them to 512x512 pixels."""
    monkeypatch.setattr(pipeline_lumina_dimoo, "crop_picture", lambda image: image)


def picture(seed, size=(64, 64)):
    pixels = np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), np.uint8)
    return Image.fromarray(pixels)


def alone(pipe, arguments, **common):
    """The tokens of each of several calls."""
    tokens = [pipe(**one, generator=seeded(seed), **common).tokens for seed, one in enumerate(arguments)]
    return torch.cat(tokens)


@pytest.mark.parametrize("decoding", DECODINGS, ids=NAMES)
def test_prompts_may_have_pictures_of_other_sizes(pipe, decoding, small_pictures):
    pictures = [picture(0), picture(1, (32, 48))]
    common = {"decoding": decoding, "output_type": "latent", "height": 48, "width": 64}
    arguments = [{"prompt": prompt, "image": one} for prompt, one in zip(PROMPTS, pictures, strict=False)]
    single = alone(pipe, arguments, **common)
    together = pipe(PROMPTS[:2], image=[[one] for one in pictures], generator=[seeded(0), seeded(1)], **common)
    assert torch.equal(together.tokens, single)
    assert together.tokens.shape == (2, 3, 4)


def test_each_scale_adds_what_its_branch_lacks(pipe, small_pictures):
    """c + (s - 1) (c - u) + (s' - 1) (c - w), with the logits of calls of one branch each."""
    crop = {"prompt": "cup", "image": picture(0)}

    def logits_of(**scales):
        call = pipe.prepare(**crop, **scales)
        tokens, places = torch.full((1, call.model.num_tokens), -1), torch.arange(4)[None]
        with torch.no_grad():
            return call, call.model.forward(tokens, places)

    call, two = logits_of(guidance_scale=3.0, image_guidance_scale=4.0)
    assert call.model.branches == 3 and len(two) == 2
    plain, [conditional, unconditional] = logits_of(guidance_scale=3.0, image_guidance_scale=1.0)
    assert plain.model.branches == 2
    call, [pictures_only] = logits_of(guidance_scale=1.0, image_guidance_scale=4.0)
    assert call.model.branches == 2
    guided = two[1] + 3 * (two[0] - two[1])
    torch.testing.assert_close(guided, pictures_only + 2 * (conditional - unconditional), atol=1e-3, rtol=0)
    assert (pictures_only - conditional).abs().max() > 0.1


def test_scales_with_pictures_are_the_authors_by_default(pipe):
    call = pipe.prepare("cup", image=picture(0))
    assert call.sampling.guidance_scale == 3.5 and call.model.image_guidance_scale == 5.0
    assert pipe.prepare("cup").sampling.guidance_scale == 5.0
    # The nearest of the authors' sizes.
    assert call.size == (512, 512)


def test_two_pictures_are_a_picture_and_a_style(pipe, small_pictures):
    ids = pipe.prepare("cup", image=[picture(0), picture(1)]).model.condition["prefix_ids"]
    style = pipe.prepare("other", image=[picture(0), picture(1)], task="image_ref_transfer")
    assert torch.equal(ids, style.model.condition["prefix_ids"])


def test_known_places_are_never_touched(pipe):
    image, mask = picture(2), np.zeros((64, 64), np.uint8)
    # More than half of the second token, and half of the third.
    mask[:9, 16:32] = mask[:8, 32:48] = mask[32:] = 255
    for decoding in DECODINGS:
        out = pipe("cup", image=image, mask_image=Image.fromarray(mask), decoding=decoding, generator=seeded(0))
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None] / 127.5 - 1
        given, [tokens] = pipe.encode_image(pixels)[0], out.tokens
        masked = torch.zeros(4, 4, dtype=torch.bool)
        masked[0, 1] = masked[2:] = True
        assert torch.equal(tokens[~masked], given[~masked])
        assert (tokens[masked] != given[masked]).any()
        assert np.array_equal(np.asarray(out.images[0])[mask == 0], np.asarray(image)[mask == 0])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"height": 40}, "height"),
        ({"width": 0}, "width"),
        ({"prompt": "a <|mdm_mask|> b"}, "mdm_mask"),
        ({"prompt": "a</user>"}, "</user>"),
        ({"task": "edit"}, "task"),
        ({"image_guidance_scale": 2.0}, "image_guidance_scale"),
        ({"image": picture(0), "image_guidance_scale": "2"}, "image_guidance_scale"),
        ({"image": [picture(0)] * 3}, "at most 2"),
        ({"image": [picture(0)] * 2, "task": "edit_add"}, "edit_add takes 1"),
        ({"image": picture(0), "task": "multi_view"}, "multi_view_left"),
        ({"prompt": ["a", "b"], "image": [[picture(0)], [picture(0)] * 2]}, "equally many"),
        ({"image": picture(0), "mask_image": Image.fromarray(np.eye(64, dtype=np.uint8) * 255)}, "mask_image"),
        ({"decoding": "ar"}, "halton or confidence"),
    ],
)
def test_what_is_refused(pipe, arguments, words):
    with pytest.raises(ValueError, match=words):
        pipe(**{"prompt": "cup"} | arguments)
