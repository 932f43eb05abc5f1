"""Captions of a batch: which variant each has, and the sentences around them."""

import collections

import torch

from arimage_emoji.training.sentences import ADJECTIVES, FRAMES, sample_captions, with_article


def sample(captions, count=4000, **shares):
    index = torch.arange(count) % len(captions)
    return sample_captions(captions, index, torch.Generator().manual_seed(0), **shares)


def test_the_primary_caption_and_all_variants_are_sampled_in_their_shares():
    counts = collections.Counter(sample([["a dog", "a dog", "a puppy", "a hound", "a pup"]], primary_share=0.25))
    # The primary one is also two of the five variants.
    assert abs(counts["a dog"] / 4000 - 0.55) < 0.03
    assert min(counts[caption] for caption in ("a puppy", "a hound", "a pup")) > 500


def test_every_image_gets_its_own_captions():
    assert sample([["a dog"], ["a cat"]], count=4, framed_share=0.0) == ["a dog", "a cat"] * 2


def test_a_framed_caption_is_part_of_a_sentence():
    found = sample([["an owl"]], framed_share=0.5)
    plain = sum(caption == "an owl" for caption in found) / len(found)
    assert 0.48 < plain < 0.56
    whole = {frame.format(a=with_article(f"{adjective} owl")) for frame in FRAMES for adjective in ADJECTIVES}
    whole |= {frame.format(a="an owl") for frame in FRAMES} | {"an owl"}
    assert set(found) <= whole and len(set(found)) > len(FRAMES)
    # What has no article keeps its words together.
    assert not any("big pizza" in caption for caption in sample([["pizza"]], framed_share=1.0))
