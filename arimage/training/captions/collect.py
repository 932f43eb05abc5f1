"""The captions that a model has learned, collected from its training set."""

from ...pipelines.text.known import KnownCaptions, as_words, fits, parse_pattern
from ..data import ImageCaptions
from .scenes import SCENE_PATTERNS, scene_words
from .wording import ADJECTIVES, FRAMES, TEMPLATES


# How data sets and `captions_of` make captions of a name.
PATTERNS = (
    "{picture}, noto style",
    "{picture}, glossy style",
    "noto emoji: {picture}",
    *(template.format(a="{picture}", n="{picture}") for template in TEMPLATES),
)


def collect_captions(data: ImageCaptions, trained: ImageCaptions, *, framed: bool = False) -> KnownCaptions:
    """The captions of a training set, without those that a pattern makes of others and without lists that begin with
    the name of their picture.

    Args:
        data: the pictures as they are.
        trained: what the model is trained on: `data` itself, or what `make_scenes` made of it.
        framed: whether captions became parts of sentences in training, as `draw_captions` makes them.
    """
    captions: dict[str, set[str]] = {name: {name} for name in data.names}
    for name, texts in zip(trained.names, trained.captions, strict=True):
        if name in captions:
            captions[name].update(texts)
    patterns = [
        pattern for pattern in dict.fromkeys(PATTERNS) if pattern != "{picture}" and _is_used(pattern, captions)
    ]
    words = {}
    if trained is not data:
        patterns, words = [*patterns, *SCENE_PATTERNS], scene_words(data)
    sets = {slot: frozenset(map(as_words, choices)) for slot, choices in words.items()}
    pictures = {}
    for name, texts in captions.items():
        own = {as_words(name)}
        parsed = [parse_pattern(pattern, sets | {"picture": own}) for pattern in patterns]
        pictures[name] = []
        # The shorter ones first: the others are made of them.
        for text in sorted(texts, key=lambda text: (len(text), text)):
            made = as_words(text) in own or any(fits(as_words(text), parts) for parts in parsed)
            if not made and not text.startswith((f"{name}, ", f"{name} (")):
                own.add(as_words(text))
                pictures[name].append(text)
    if framed:
        adorned = "{adjective} {picture}"
        sentences = (frame.format(a=caption) for frame in FRAMES for caption in ("{picture}", adorned))
        patterns = list(dict.fromkeys([*patterns, adorned, *sentences]))
        words = words | {"adjective": list(ADJECTIVES)}
    return KnownCaptions(pictures, words, patterns)


def _is_used(pattern: str, captions: dict[str, set[str]]) -> bool:
    return any(as_words(pattern.format(picture=name)) in map(as_words, texts) for name, texts in captions.items())
