"""The captions that a model has learned, collected from its training set."""

from collections.abc import Iterable, Mapping

from arimage.pipelines.text.known import KnownCaptions, as_words, fits, parse_pattern

from .captioned import ImageCaptions
from .drawing import ADJECTIVES, FRAMES


def collect_captions(
    data: ImageCaptions,
    trained: ImageCaptions,
    *,
    patterns: Iterable[str] = (),
    made: Iterable[str] = (),
    words: Mapping[str, list[str]] | None = None,
    framed: bool = False,
) -> KnownCaptions:
    """The captions of a training set, without those that a pattern makes of others and without lists that begin with
    the name of their picture.

    Args:
        data: the pictures as they are.
        trained: what the model is trained on: `data` itself, or pictures that were made of it.
        patterns: how captions are made of the name of a picture, as in "a picture of {picture}"; those that `trained`
            does not use are left out.
        made: patterns of the captions of pictures that were made.
        words: the words that stand for each other in the patterns, by the name of their slot.
        framed: whether captions became parts of sentences in training, as `draw_captions` makes them.
    """
    captions: dict[str, set[str]] = {name: {name} for name in data.names}
    for name, texts in zip(trained.names, trained.captions, strict=True):
        if name in captions:
            captions[name].update(texts)
    used = [pattern for pattern in dict.fromkeys(patterns) if pattern != "{picture}" and _is_used(pattern, captions)]
    every, slots = [*used, *made], dict(words or {})
    sets = {slot: frozenset(map(as_words, choices)) for slot, choices in slots.items()}
    pictures = {}
    for name, texts in captions.items():
        own = {as_words(name)}
        parsed = [parse_pattern(pattern, sets | {"picture": own}) for pattern in every]
        pictures[name] = []
        # The shorter ones first: the others are made of them.
        for text in sorted(texts, key=lambda text: (len(text), text)):
            follows = as_words(text) in own or any(fits(as_words(text), parts) for parts in parsed)
            if not follows and not text.startswith((f"{name}, ", f"{name} (")):
                own.add(as_words(text))
                pictures[name].append(text)
    if framed:
        adorned = "{adjective} {picture}"
        sentences = (frame.format(a=caption) for frame in FRAMES for caption in ("{picture}", adorned))
        every = list(dict.fromkeys([*every, adorned, *sentences]))
        slots |= {"adjective": list(ADJECTIVES)}
    return KnownCaptions(pictures, slots, every)


def _is_used(pattern: str, captions: dict[str, set[str]]) -> bool:
    return any(as_words(pattern.format(picture=name)) in map(as_words, texts) for name, texts in captions.items())
