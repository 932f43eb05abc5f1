"""The captions that a model was trained on, and the nearest of them to a prompt. Read by arimage as the hook
`known` of arimage.captions. No heavy imports."""

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from difflib import SequenceMatcher
from functools import cached_property
from itertools import takewhile
from pathlib import Path

from arimage.media.texts import ARTICLES, Words, as_words
from arimage.pipelines.text.known import Unknown, quoted, tell_nearest
from arimage.settings.schema import check, read_object


NEAREST = 3
# The first of all emoji by their code points, and the first food.
KEYCAP, FOOD = "keycap: *", "hot dog"
# Only the first words of a longer prompt are looked up.
MAX_WORDS = 24
# The least `SequenceMatcher.ratio` of two spellings of the same word, the least similarity of a caption that is
# suggested, and the weights of the noun of a prompt ("apple") relative to the other words ("green"), and of a caption
# relative to a name.
SPELLING, NEARNESS, THING, CAPTION = 0.82, 0.2, 1.5, 0.8
_PLACE = re.compile(r"\{(\w+)\}")
_FILLERS = ARTICLES | {"and", "at", "by", "for", "from", "in", "next", "of", "on", "or", "to", "with"}


@dataclass(frozen=True)
class KnownCaptions:
    """The captions that a model was trained on, stored as `known_captions.json` in its folder.

    Attributes:
        pictures: the names of the pictures, each with its alternative captions.
        words: the words for each place in a pattern, such as {"colour": ["red", "blue"]}. The place "picture" takes
            every caption of `pictures`.
        patterns: templates of further captions: "a picture of {picture}", "{colour} {fruit}".
        unlearned: captions that the model was trained on and has not learned well, by the name of their picture, which
            may be one of them. They are neither known nor suggested.
        examples: prompts to try.
    """

    pictures: dict[str, list[str]]
    words: dict[str, list[str]] = field(default_factory=dict)
    patterns: list[str] = field(default_factory=list)
    unlearned: dict[str, list[str]] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)
    # For the validation of the file by pydantic.
    __pydantic_config__ = {"extra": "forbid"}

    @classmethod
    def load(cls, path: Path) -> "KnownCaptions":
        """The captions in a file.

        Raises:
            ValueError: if it does not hold captions.
        """
        known = check(cls, read_object(path), path)
        places = {place for pattern in known.patterns for place in _PLACE.findall(pattern)}
        for place in places - {"picture", *known.words}:
            raise ValueError(
                f"{path}: a pattern has the place {{{place}}}, and words has no list of that name: add it"
            )
        return known

    def to_text(self) -> str:
        """The text of the file."""
        return json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n"

    def taught(self, captions: list[str]) -> "KnownCaptions":
        """The same with captions that an adapter was trained on, which are known whether or not they were learned
        before."""
        new = {text for text in captions if text not in self.pictures or text in self.unlearned.get(text, ())}
        return replace(
            self,
            pictures={**self.pictures, **{text: self.pictures.get(text, []) for text in captions if text in new}},
            unlearned={name: [one for one in its if one not in new] for name, its in self.unlearned.items()},
        )

    def combined(self) -> str:
        """How captions can be combined, in lines; empty if they cannot."""
        if not self.words:
            return ""
        slots = (
            f"{slot}: {', '.join(words[:12])}{', ...' if words[12:] else ''}" for slot, words in self.words.items()
        )
        return "\n".join(["Combined as in:", *(f"  {pattern}" for pattern in self.patterns), *slots])

    def _captions_of(self, name: str) -> list[str]:
        others = self.pictures[name]
        return others if name in self.unlearned.get(name, ()) else [name, *others]

    @property
    def shown(self) -> dict[str, str]:
        return self._shown

    @property
    def learned(self) -> dict[str, list[str]]:
        return self._further

    @cached_property
    def _shown(self) -> dict[str, str]:
        """The name of each picture by a caption that shows it: its name, or if that is among `unlearned`, the first of
        its others that shows no other picture already."""
        shown: dict[str, str] = {}
        names = [*self.pictures]
        # Emoji lie in the order of their code points, in which foods, plants and animals follow on keycaps and signs.
        start = names.index(FOOD) if KEYCAP in names[:1] and FOOD in names else 0
        for name in names[start:] + names[:start]:
            free = (
                one for one in self._captions_of(name) if one == name or one not in shown and one not in self.pictures
            )
            for caption in itertools.islice(free, 1):
                shown[caption] = name
        return shown

    @cached_property
    def _further(self) -> dict[str, list[str]]:
        """The further captions of each picture, by the caption that shows it."""
        return {
            caption: [one for one in self._captions_of(name) if one != caption] for caption, name in self.shown.items()
        }

    @cached_property
    def _learned(self) -> "_Captions":
        return _Captions(self, ((name, *others) for name, others in self.learned.items()))

    @cached_property
    def _written(self) -> frozenset[str]:
        return frozenset(caption for name, others in self.learned.items() for caption in (name, *others))

    @cached_property
    def _unlearned(self) -> "_Captions":
        return _Captions(self, self.unlearned.values())

    @cached_property
    def _stems(self) -> list[tuple[str, frozenset[str]]]:
        """The name and the stems of every caption."""
        return [
            (name, _stems(as_words(caption))) for name, others in self.learned.items() for caption in (name, *others)
        ]

    @cached_property
    def _weights(self) -> dict[str, float]:
        """The weight of each stem: the more pictures have it, the lower it is."""
        stems: dict[str, set[str]] = {}
        for name, its in self._stems:
            stems.setdefault(name, set()).update(its)
        counts = Counter(stem for its in stems.values() for stem in its)
        return {stem: math.log(1 + len(stems) / count) for stem, count in counts.items()}

    def knows(self, prompt: str) -> bool:
        """Whether the prompt is a known caption or matches a pattern. Case, articles and punctuation are ignored."""
        words = as_words(prompt)
        # Most prompts are written as a caption is, which is found without the words of all.
        return " ".join(words) in self._written or self._learned.fit(words)

    def nearest(self, prompt: str, count: int = NEAREST) -> list[str]:
        """Names of up to `count` pictures whose captions have the most words in common with the prompt, allowing for
        plurals and misspellings; the nearest first."""
        weights = self._weights
        words = as_words(prompt)[:MAX_WORDS]
        thing = _stems(tuple(takewhile(lambda word: word not in _FILLERS, words))[-1:])
        asked: dict[str, float] = {}
        whole = 0.0
        for stem in _stems(words):
            factor = THING if stem in thing else 1
            # A word that no caption has gets the largest weight.
            whole += factor * weights.get(stem, math.log(1 + len(self.learned)))
            for known, alike in _spelt_alike(stem, weights).items():
                asked[known] = max(factor * alike, asked.get(known, 0.0))
        scores: dict[str, float] = {}
        for name, its in self._stems:
            shared = sum(weights[stem] * asked[stem] for stem in its & asked.keys())
            if shared:
                score = shared / math.sqrt(whole * sum(weights[stem] for stem in its))
                is_name = its == _stems(as_words(name))
                scores[name] = max(score if is_name else CAPTION * score, scores.get(name, 0.0))
        near = sorted(
            (name for name in scores if scores[name] >= NEARNESS), key=lambda name: (-scores[name], len(name))
        )
        return near[:count]

    def check(self, prompt: str, model: str) -> Unknown | None:
        """The message for the user of `model` about a prompt that is unknown, or known and not learned well; None if
        the model knows the prompt."""
        if self.knows(prompt):
            return None
        nearest = self.nearest(prompt)
        if self._unlearned.fit(as_words(prompt)):
            what = f"is a caption that {model} has not learned well: most of its images show something else"
        else:
            combines = self.words.keys() - {"adjective"}
            pictures = f"{len(self.learned):,} pictures that {model} knows{' and can combine' if combines else ''}"
            what = f"is not among the {pictures}"
        return Unknown(nearest, f"{quoted([prompt])} {what}; {tell_nearest(nearest)}")


class _Captions:
    """Captions, and what the patterns of a list make of them.

    Args:
        known: the list with the patterns.
        captions: captions of pictures.
    """

    def __init__(self, known: KnownCaptions, captions: Iterable[Iterable[str]]):
        self.captions = frozenset(as_words(caption) for its in captions for caption in its)
        sets = {slot: frozenset(map(as_words, words)) for slot, words in known.words.items()}
        self.patterns = [parse_pattern(pattern, sets | {"picture": self.captions}) for pattern in known.patterns]
        longest = [sum(max(map(len, part), default=0) for part in parts) for parts in self.patterns]
        self.most_words = max(longest + [len(caption) for caption in self.captions], default=0)

    def fit(self, words: Words) -> bool:
        """Whether the words are one of the captions, or a pattern makes them of one."""
        # A text of thousands of words would take seconds to compare with the patterns.
        if len(words) > self.most_words:
            return False
        return words in self.captions or any(fits(words, parts) for parts in self.patterns)


def parse_pattern(pattern: str, words: Mapping[str, Set[Words]]) -> list[Set[Words]]:
    """The parts of a pattern: the words allowed in each place.

    Raises:
        KeyError: if there are no words for one of its places.
    """
    parts = _PLACE.split(pattern)
    every = [words[part] if i % 2 else {as_words(part)} for i, part in enumerate(parts)]
    return [part for part in every if part != {()}]


def fits(words: Words, parts: Sequence[Set[Words]]) -> bool:
    """Whether the words consist of one member of each part, in order."""
    if not parts:
        return not words
    ends = range(1, len(words) + 1)
    return any(words[:end] in parts[0] and fits(words[end:], parts[1:]) for end in ends)


def _stems(words: Words) -> frozenset[str]:
    return frozenset(_stem(word) for word in words if word not in _FILLERS)


def _stem(word: str) -> str:
    """The word without the ending of a plural."""
    if len(word) > 4 and word.endswith("ies"):
        return word[:-3] + "y"
    if len(word) > 4 and word.endswith(("ches", "shes", "xes", "oes")):
        return word[:-2]
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith(("ss", "us", "is")) else word


def _spelt_alike(word: str, known: dict[str, float]) -> dict[str, float]:
    """The known words that equal this one or differ by a typing error, and their similarity (1 is equal)."""
    if word in known:
        return {word: 1.0}
    alike = {}
    for other in known:
        # Typing errors are rare in the first letter: "house" is not "mouse".
        if other[0] != word[0] or min(len(word), len(other)) < 3:
            continue
        matcher = SequenceMatcher(None, word, other)
        if matcher.real_quick_ratio() >= SPELLING and (quick := matcher.quick_ratio()) >= SPELLING:
            # The same letters in another order count as one typing error.
            ratio = SPELLING if quick == 1 else matcher.ratio()
            if ratio >= SPELLING:
                alike[other] = ratio
    return alike
