"""Known captions: which prompts a model with a small vocabulary of images was trained on. What reads them is a hook,
the entry point `known` of the group arimage.captions. No heavy imports."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ...settings.installed import installed


KNOWN_CAPTIONS = "known_captions.json"
# Prompts to try with a model whose list has none.
EXAMPLES = ["a red heart", "pizza", "clown face", "cat face", "green apple"]


@dataclass(frozen=True)
class Unknown:
    """A prompt that a model does not know: the names of up to three pictures that it knows, the nearest first, and a
    sentence for the user."""

    nearest: list[str]
    message: str


class KnownCaptions(Protocol):
    """The captions that a model was trained on, stored as `known_captions.json` in its folder."""

    @property
    def shown(self) -> Mapping[str, str]:
        """The name of each picture, by a caption that shows it."""
        ...

    @property
    def learned(self) -> Mapping[str, Sequence[str]]:
        """The further captions of each picture, by the caption that shows it."""
        ...

    @property
    def unlearned(self) -> Mapping[str, Sequence[str]]:
        """Captions that the model has not learned well, by the name of their picture."""
        ...

    @property
    def examples(self) -> list[str]:
        """Prompts to try; empty for `EXAMPLES`."""
        ...

    def check(self, prompt: str, model: str) -> Unknown | None:
        """What to tell the user of `model` about a prompt; None if the model knows it."""
        ...

    def taught(self, captions: list[str]) -> "KnownCaptions":
        """The same with captions that an adapter was trained on."""
        ...

    def combined(self) -> str:
        """How captions can be combined, in lines; empty if they cannot."""
        ...

    def to_text(self) -> str:
        """The text of the file."""
        ...


def load_known(folder: Path) -> KnownCaptions | None:
    """The captions in the folder of a pipeline; None if it has no list, or nothing is installed that reads it."""
    path, hook = folder / KNOWN_CAPTIONS, installed("captions").get("known")
    return None if hook is None or not path.is_file() else hook.load()(path)


def examples_of(known: KnownCaptions | None) -> list[str]:
    """Prompts to try with a model that knows these captions, the first one by default."""
    return EXAMPLES if known is None or not known.examples else known.examples


def quoted(names: list[str]) -> str:
    """The names in quotation marks, as in: "a", "b" and "c"."""
    every = [
        f'"{name if len(name) <= 80 else name[:77] + "..."}"' for name in (" ".join(name.split()) for name in names)
    ]
    return " and ".join(filter(None, [", ".join(every[:-1]), *every[-1:]]))


def tell_nearest(names: list[str]) -> str:
    """The end of a sentence about something unknown."""
    return f"the nearest {'are' if names[1:] else 'is'} {quoted(names)}" if names else "none is similar"
