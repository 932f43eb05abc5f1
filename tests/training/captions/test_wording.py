import collections

import torch

from arimage.eval.emoji.reference import read_gallery
from arimage.eval.runs.prompts import EMOJI_CHECKS, read_prompts
from arimage.pipelines.text.known import as_words, fits, parse_pattern
from arimage.training.captions.scenes import HeldOut
from arimage.training.captions.wording import (
    ADJECTIVES,
    FRAMES,
    captions_of,
    draw_captions,
    with_article,
    written_captions,
)


def draw(captions, count=4000, **shares):
    index = torch.arange(count) % len(captions)
    return draw_captions(captions, index, torch.Generator().manual_seed(0), **shares)


def test_the_primary_caption_and_all_variants_are_drawn_in_their_shares():
    counts = collections.Counter(draw([["a dog", "a dog", "a puppy", "a hound", "a pup"]], primary_share=0.25))
    # The primary one is also two of the five variants.
    assert abs(counts["a dog"] / 4000 - 0.55) < 0.03
    assert min(counts[caption] for caption in ("a puppy", "a hound", "a pup")) > 500


def test_every_image_gets_its_own_captions():
    assert draw([["a dog"], ["a cat"]], count=4, framed_share=0.0) == ["a dog", "a cat"] * 2


def test_a_framed_caption_is_part_of_a_sentence():
    drawn = draw([["an owl"]], framed_share=0.5)
    plain = sum(caption == "an owl" for caption in drawn) / len(drawn)
    assert 0.48 < plain < 0.56
    whole = {frame.format(a=with_article(f"{adjective} owl")) for frame in FRAMES for adjective in ADJECTIVES}
    whole |= {frame.format(a="an owl") for frame in FRAMES} | {"an owl"}
    assert set(drawn) <= whole and len(set(drawn)) > len(FRAMES)
    # What has no article keeps its words together.
    assert not any("big pizza" in caption for caption in draw([["pizza"]], framed_share=1.0))


def test_written_captions_are_of_pictures_that_exist():
    written = written_captions()
    assert written.keys() <= set(read_gallery()[1]) and len(written) > 1400
    assert all(len(set(captions)) == len(captions) >= 5 for captions in written.values())
    assert set(written["tomato"]) <= set(captions_of("tomato", []))


def test_flags_are_called_as_people_call_them():
    captions = captions_of("flag: France", ["flag"])
    assert captions[0] == "flag: France" and {"a flag of France", "the flag of France", "a French flag"} <= set(
        captions
    )
    assert not any("a flag: " in caption for caption in captions)
    assert "a Chad flag" in captions_of("flag: Chad", [])


def test_sentences_are_never_what_the_checks_ask_for():
    held_out = HeldOut.of_checks().prompts
    words = {"adjective": frozenset(map(as_words, (*ADJECTIVES, "")))}
    for row in read_prompts(EMOJI_CHECKS):
        if row["check"] != "paraphrases":
            continue
        captions = [caption for caption in captions_of(row["parts"][0][0], []) if as_words(caption) not in held_out]
        words["picture"] = frozenset(map(as_words, captions))
        for frame in FRAMES:
            parts = parse_pattern(frame.format(a="{adjective} {picture}"), words)
            assert not fits(as_words(row["prompt"]), parts), (frame, row["prompt"])
