"""What a recipe's `examples` names: pictures and clips that are made from the sprites of a data set."""

from arimage.pipelines.text.known import KnownCaptions

from ..training.captioned import ImageCaptions
from ..training.collect import collect_captions
from .animation import ClipSettings, known_clips, make_clips
from .scenes import SCENE_PATTERNS, SceneSettings, make_scenes, scene_words
from .wording import TEMPLATES


__all__ = ["ClipSettings", "SceneSettings", "known_clips", "known_scenes", "make_clips", "make_scenes"]

# How data sets and `captions_of` make captions of a name.
PATTERNS = (
    "{picture}, noto style",
    "{picture}, glossy style",
    "noto emoji: {picture}",
    *(template.format(a="{picture}", n="{picture}") for template in TEMPLATES),
)


def known_scenes(data: ImageCaptions, trained: ImageCaptions, *, framed: bool = False) -> KnownCaptions:
    """What a model knows that was trained on `trained`: `data` itself, or what `make_scenes` made of it."""
    if trained is data:
        return collect_captions(data, trained, patterns=PATTERNS, framed=framed)
    made = {"made": SCENE_PATTERNS, "words": scene_words(data)}
    return collect_captions(data, trained, patterns=PATTERNS, framed=framed, **made)
