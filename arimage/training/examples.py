"""Pictures and clips that a module of a recipe makes from those of a data set."""

from importlib import import_module
from typing import Any, Protocol, cast

from ..pipelines.text.known import KnownCaptions
from .data.captioned import ImageCaptions


class Examples(Protocol):
    """What the module has that a recipe names as `examples`; one of pictures needs nothing of clips, and the other way
    round. The settings are dataclasses or models of pydantic, which check the tables `scenes` and `clips`; those of
    clips have `frames`."""

    SceneSettings: type
    ClipSettings: type

    def make_scenes(self, data: ImageCaptions, settings: Any) -> ImageCaptions:
        """The pictures that a model is trained on, those of `data` first."""
        ...

    def known_scenes(self, data: ImageCaptions, trained: ImageCaptions, *, framed: bool = False) -> KnownCaptions:
        """What a model knows that was trained on `trained`: `data` itself, or what `make_scenes` made of it. `framed`
        says whether captions became parts of sentences, as `draw_captions` makes them."""
        ...

    def make_clips(self, data: ImageCaptions, settings: Any, *, held_out: bool = False) -> ImageCaptions:
        """Clips of the pictures of `data`, images [M, T, 3, S, S]: those that are held out, or the others."""
        ...

    def known_clips(self, clips: ImageCaptions) -> KnownCaptions:
        """What a model knows that was trained on `clips`."""
        ...


class Plain:
    """Pictures as they are, where a recipe names no module."""

    @staticmethod
    def known_scenes(data: ImageCaptions, trained: ImageCaptions, *, framed: bool = False) -> None:
        return None


def load_examples(name: str | None) -> Examples:
    """The module of a recipe.

    Raises:
        ValueError: if it cannot be imported.
    """
    if name is None:
        return cast(Examples, Plain)
    try:
        return cast(Examples, import_module(name))
    except ImportError as error:
        raise ValueError(
            f"examples is {name!r}, which cannot be imported ({error}): give an installed module"
        ) from error
