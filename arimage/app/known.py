"""What a model knows, for the demo: the pictures that it has learned, and whether a prompt is among them."""

import difflib
import json
from dataclasses import dataclass

from ..auto import ASSETS
from ..eval.emoji import REFERENCE
from ..pipelines.base import ARImagePipeline


@dataclass(frozen=True)
class Unknown:
    """A prompt that a model does not know: names of the `nearest` pictures, and the same in one sentence."""

    nearest: list[str]
    message: str


@dataclass(frozen=True)
class Known:
    """The pictures that a model knows, by their names, each with its other captions."""

    pictures: dict[str, list[str]]

    def check(self, prompt: str, model: str) -> Unknown | None:
        """What to tell about a prompt; None if it is known."""
        words = [word for word in prompt.lower().split() if word not in ("a", "an", "the")]
        if " ".join(words) in self.pictures:
            return None
        nearest = difflib.get_close_matches(" ".join(words), self.pictures, cutoff=0.5)
        names = ", ".join(f'"{name}"' for name in nearest)
        about = f"the nearest are {names}" if nearest else "none of them is similar"
        return Unknown(
            nearest, f'"{prompt}" is not among the {len(self.pictures)} pictures that {model} knows; {about}'
        )


def known_of(pipe: ARImagePipeline) -> Known | None:
    """What a model knows; None if it takes any text, or no text."""
    if not str(pipe.name_or_path).startswith(str(ASSETS)):
        return None
    lines = (REFERENCE / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return Known({json.loads(line)["name"]: [] for line in lines})
