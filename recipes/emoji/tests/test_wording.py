from arimage.eval.runs.prompts import read_prompts
from arimage.media.texts import as_words
from arimage_emoji import EMOJI_CHECKS
from arimage_emoji.data.scenes import HeldOut
from arimage_emoji.data.wording import captions_of, written_captions
from arimage_emoji.known import fits, parse_pattern
from arimage_emoji.metrics.reference import read_gallery
from arimage_emoji.training.sentences import ADJECTIVES, FRAMES


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
    for row in read_prompts(EMOJI_CHECKS.path):
        if row["check"] != "paraphrases":
            continue
        captions = [caption for caption in captions_of(row["parts"][0][0], []) if as_words(caption) not in held_out]
        words["picture"] = frozenset(map(as_words, captions))
        for frame in FRAMES:
            parts = parse_pattern(frame.format(a="{adjective} {picture}"), words)
            assert not fits(as_words(row["prompt"]), parts), (frame, row["prompt"])
