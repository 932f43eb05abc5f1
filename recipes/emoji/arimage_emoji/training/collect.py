"""The captions that a model has learned, collected from its training set."""

from arimage.media.texts import as_words

from ..data.scenes import SCENE_PATTERNS, scene_words
from ..data.wording import TEMPLATES
from ..known import KnownCaptions, fits, parse_pattern
from .captioned import ImageCaptions
from .sentences import ADJECTIVES, FRAMES


# How data sets and `captions_of` make captions of a name.
PATTERNS = (
    "{picture}, noto style",
    "{picture}, glossy style",
    "noto emoji: {picture}",
    *(template.format(a="{picture}", n="{picture}") for template in TEMPLATES),
)


def known_scenes(data: ImageCaptions, trained: ImageCaptions, *, framed: bool = False) -> KnownCaptions:
    """What a model knows that was trained on `trained`: `data` itself, or what `make_scenes` made of it. Captions that
    a pattern makes of others are left out, and so are lists that begin with the name of their picture.

    Args:
        framed: whether captions became parts of sentences in training, as `sample_captions` makes them.
    """
    made, slots = ((), {}) if trained is data else (SCENE_PATTERNS, scene_words(data))
    captions: dict[str, set[str]] = {name: {name} for name in data.names}
    for name, texts in zip(trained.names, trained.captions, strict=True):
        if name in captions:
            captions[name].update(texts)
    used = [pattern for pattern in dict.fromkeys(PATTERNS) if pattern != "{picture}" and _is_used(pattern, captions)]
    every = [*used, *made]
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
