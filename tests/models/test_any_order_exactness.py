"""Networks for any order, small enough to enumerate: decodings sample from their distribution in every order, and
given tokens on all sides."""

import itertools

import any_order
import pytest
import torch
from decoding.test_exactness import assert_follows

from arimage.decoding import GroupDecoding, Layout, Sampling, decode, decoding_from_name, decoding_from_text


GRID, CODES, N = (2, 2), 3, 4
ORDERS = {"raster": [0, 1, 2, 3], "spread out": [0, 3, 2, 1], "other": [2, 0, 3, 1]}
DECODINGS = [
    "ar",
    "sjd-coupled:window=3",
    "sjd-tree:window=4,width=2,depth=2",
    "sjd-lazy:window=4,chain=1,tokens=2",
    "sjd",
]
IMAGES = torch.tensor(list(itertools.product(range(CODES), repeat=N)))


@torch.no_grad()
def joint_of(transformer, order, sampling, known=()):
    """Probabilities [V ** N] of all images by rank, where the first tokens are `known`."""
    places = torch.empty_like(IMAGES).scatter(1, torch.tensor(order).expand(len(IMAGES), -1), IMAGES)
    arguments = {"order": torch.tensor(order).expand(len(IMAGES), -1), "class_labels": torch.ones(len(IMAGES)).long()}
    logits = torch.stack(
        [
            transformer.predict(places, **arguments, unconditional=torch.full((len(IMAGES),), group == 1))
            for group in range(2)
        ]
    )
    rows = sampling.probabilities(logits, torch.arange(N).expand(len(IMAGES), -1)).double()
    rows = rows / rows.sum(-1, keepdim=True)
    rows = rows.gather(2, IMAGES[..., None])[..., 0]
    for rank, token in enumerate(known):
        rows[:, rank] = (IMAGES[:, rank] == token).double()
    return rows.prod(1)


def bound(family, order, size):
    transformer = any_order.transformer(
        family, grid=2, hidden_size=16, intermediate_size=16, vocab_size=CODES, num_classes=2
    )
    layout = Layout(GRID, torch.tensor(order).expand(size, -1).clone())
    kind = any_order.classes(family)[1]._token_model
    model = kind(transformer, {"class_labels": torch.ones(size, dtype=torch.long)}, layout, guided=True)
    model.merge_prompts()
    return transformer, model


SIZES = [2_000, pytest.param(200_000, marks=pytest.mark.slow)]
# Every family in one order, every order with one family, and every decoding with two or three; all, and many more
# images, are slow.
QUICK = [*((family, "other") for family in any_order.FAMILIES), ("arpg", "raster"), ("lpd", "spread out")]
CASES = [(*case, [DECODINGS[2 * i % 5], DECODINGS[(2 * i + 1) % 5]], SIZES[0]) for i, case in enumerate(QUICK)] + [
    pytest.param(family, order, DECODINGS, 200_000, marks=pytest.mark.slow)
    for family in any_order.FAMILIES
    for order in ORDERS
]


@pytest.mark.every(3)
@torch.no_grad()
@pytest.mark.parametrize(("family", "order", "decodings", "size"), CASES)
def test_images_follow_the_distribution_of_the_order(family, order, decodings, size):
    sampling, order = Sampling(guidance_scale=1.5, temperature=1.5, top_k=2), ORDERS[order]
    transformer, model = bound(family, order, size)
    joint = joint_of(transformer, order, sampling)
    for number, text in enumerate(decodings):
        tokens = decode(model, decoding_from_text(text), sampling, torch.arange(size) + (number << 32)).tokens
        assert_follows(tokens, joint, CODES)
    if order != ORDERS["raster"]:
        other = joint_of(transformer, ORDERS["raster"], sampling)
        with pytest.raises(AssertionError, match="chi-square|total variation|impossible"):
            assert_follows(tokens, other, CODES)


@pytest.mark.every(2)
@torch.no_grad()
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("family", any_order.FAMILIES)
def test_what_is_generated_follows_the_distribution_given_what_is_known(family, size):
    # The token at place 1 is generated last, given those on all sides of it.
    order, known = [0, 3, 2, 1], (2, 1)
    transformer, model = bound(family, order, size)
    forced = torch.tensor([*known, -1, -1]).expand(size, -1)
    settings = Sampling(temperature=1.5, guidance_scale=1.5, forced=forced)
    joint = joint_of(transformer, order, Sampling(temperature=1.5, guidance_scale=1.5), known)
    for number, text in enumerate(("ar", "sjd-coupled:window=3")):
        tokens = decode(model, decoding_from_text(text), settings, torch.arange(size) + (number << 32)).tokens
        assert_follows(tokens, joint, CODES)


@pytest.mark.every(2)
@torch.no_grad()
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("family", any_order.FAMILIES)
def test_groups_of_one_follow_the_distribution_and_larger_ones_do_not(family, size):
    sampling, order = Sampling(guidance_scale=1.5, temperature=1.5), ORDERS["other"]
    transformer, model = bound(family, order, size)
    joint, seeds = joint_of(transformer, order, sampling), torch.arange(size)
    one = decode(model, GroupDecoding(4, guidance_schedule="constant"), sampling, seeds)
    assert_follows(one.tokens, joint, CODES)
    assert torch.equal(one.tokens, decode(model, decoding_from_name("ar"), sampling, seeds).tokens)
    larger = decode(model, GroupDecoding((1, 3), guidance_schedule="constant"), sampling, seeds).tokens
    with pytest.raises(AssertionError, match="chi-square|total variation"):
        assert_follows(larger, joint, CODES)
