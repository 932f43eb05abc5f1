"""Films of several clips on the card: further calls replay the passes of others, with other texts, images and
settings."""

import card
import numpy as np
import pytest
import torch
from accelerator.runs import fresh
from families import seeded
from PIL import Image


def picture(seed):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (192, 336, 3), dtype=np.uint8))


# Texts of one length, without and with padding.
TEXTS = {"alike": [["a red heart"], ["a blue book"], ["a green tree"]]}
TEXTS["padded"] = [["a red heart", "cat"], ["tree", "a blue book"], ["a green tree", "book"]]


@pytest.mark.slow
@pytest.mark.parametrize("texts", [pytest.param("alike", marks=pytest.mark.slow), "padded"])
@pytest.mark.parametrize(
    "given", [pytest.param(False, marks=pytest.mark.slow, id="text"), pytest.param(True, id="image")]
)
def test_further_films_replay_the_passes_of_others(texts, given):
    def films(pipe):
        found = []
        for number, prompts in enumerate(TEXTS[texts]):
            out = pipe(
                prompts,
                num_frames=17,
                generator=[seeded(10 * number + film) for film in range(len(prompts))],
                guidance_scale=[2.0 + number, 3.0],
                temperature=0.5 + number / 4,
                output_type="latent",
                **({"image": picture(number)} if given else {}),
            )
            found.append((out.tokens, out.stats))
        return found

    expected = films(fresh("infinitystar", "cpu"))
    with card.card() as device:
        pipe = fresh("infinitystar")
        found = films(pipe)
        replays = device.replays
    for (ours, stats), (theirs, _) in zip(found, expected, strict=True):
        assert all(torch.equal(one.cpu(), other) for one, other in zip(ours, theirs, strict=True))
        assert stats.forward_passes == len(theirs) - 10 * given
    # Every pass but the prefill is captured in the second call.
    assert [stats.steps for _, stats in found] == ["eager", "captured", "captured"]
    assert replays == 2 * (len(expected[0][0]) - 10 * given - 1)
